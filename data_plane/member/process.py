"""A member as a plain process: `python -m data_plane.member.process`, its pickled MemberSpec on
standard input.

Enters: a MemberSpec. Leaves: exit status 0 after a shutdown, else 1, with a sentence on standard
error unless the controller was told it. Does not know: who started it.
"""

from __future__ import annotations

import logging
import pickle
import sys

from data_plane.member.instance_runner import run_instance
from data_plane.member.lifetime import MemberSpec, Told, sentence
from data_plane.member.prefill_runner import run_prefill
from data_plane.transport.shared_memory import sweep_stale


def run_member(spec: MemberSpec) -> None:
    """Be what the spec says until the controller says shutdown."""
    # Of members that were killed on this machine: nobody else may look here.
    sweep_stale()
    try:
        if spec.instance is None:
            run_prefill(spec)
        else:
            run_instance(spec)
    finally:
        # Of its peers here that were killed, which is why it leaves.
        sweep_stale(spec.cluster_id)


def main() -> int:
    """Read the spec, be the member; returns the exit status."""
    spec: MemberSpec = pickle.load(sys.stdin.buffer)
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s {spec.name}: %(message)s")
    try:
        run_member(spec)
    except Told as told:
        logging.debug("the member failed", exc_info=told)
        return 1
    except Exception as error:
        logging.debug("the member failed", exc_info=True)
        print(f"{spec.name}: {sentence(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
