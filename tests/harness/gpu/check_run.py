"""Runs named checks one after the other, so that a run can stop and go on later.

A check fails by raising. One that faults on the GPU ends all GPU work of its process, so no later
check runs in that process. One that does not end is ended with its process, which says where it
was; the next run goes on behind it.
"""

import faulthandler
import time
import traceback

import torch

LIMIT_S = 120
"""Longest time of a check."""
ENDLESS = f"it did not end within {LIMIT_S} s"


def context_is_lost():
    """Whether this process can no longer use the GPU, because a fault ended its CUDA context."""
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


def run(checks, done=(), deadline=float("inf"), keep=lambda results: None, after=None):
    """Run the checks and print a line for each; returns [{"check", "seconds", "error"}].

    done: results of an earlier run; a check that passed there is not run again. keep: called with
    all results after each check. after: a check of an earlier run that lost the GPU; checks that
    failed before it are not run again either. The result of a check that loses the GPU is the last
    and has "is_lost".
    """
    results = [
        result
        for result in done
        if result["error"] in ("", ENDLESS) or (after and result["error"] != "not reached")
    ]
    known = {result["check"] for result in results}
    for name, check in checks:
        if name in known:
            continue
        begin, error = time.monotonic(), ""
        if begin > deadline:
            print("the time limit is over; run the same command again to go on here")
            results.append({"check": name, "seconds": 0.0, "error": "not reached"})
            break
        keep([*results, {"check": name, "seconds": LIMIT_S, "error": ENDLESS}])
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            check()
        except Exception:
            error = traceback.format_exc(limit=-2)
        finally:
            faulthandler.cancel_dump_traceback_later()
        result = {"check": name, "seconds": round(time.monotonic() - begin, 2), "error": error}
        results.append(result)
        print(f"{'FAILED' if error else 'ok'}  {name}  {result['seconds']} s", error, flush=True)
        keep(results)
        if error and context_is_lost():
            result["is_lost"] = True
            break
    return results
