"""The report of chaos: lost, wrong and doubled outputs, leftovers, and pauses."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nanocp.cli.demo.load import Asked
from nanocp.cli.demo.losses import Loss

if TYPE_CHECKING:  # it imports torch
    from nanocp.cli.demo.judge import Judge

MAX_NEAR_TIES = 1e-3
"""Claim: at most this share of near-ties of the reference."""
_MAX_SENTENCES = 10
_SERVING_GAP_S = 1.0
"""The service serves at a time with a token this long before and after."""


class Judgement(NamedTuple):
    """Judgement of one request."""

    counts: Counter[str]
    """Choices that are `wrong` or `doubled`, and `near_ties`."""
    failures: list[str]


def judged(asked: Sequence[Asked], judge: Judge) -> dict[str, Any]:
    """Judge every token."""
    return summed(asked, [judgement_of(request, judge) for request in asked])


def judgement_of(request: Asked, judge: Judge) -> Judgement:
    """Judge every token of one finished request."""
    counts: Counter[str] = Counter()
    found = [request.error] if request.error else []
    for choice, output in enumerate(request.outputs):
        verdict = _of_choice(request, choice, judge)
        counts.update(verdict)
        if verdict["wrong"] or verdict["doubled"]:
            found.append(f"choice {choice} of {len(output)} tokens: {dict(verdict)}")
    return Judgement(counts, [f"{request.kind} by {request.api}: {each}" for each in found])


def summed(asked: Sequence[Asked], judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Sum up requests and judgements, which may lack some."""
    num_lost = sum(bool(request.error) for request in asked)
    counts = Counter(lost=num_lost, wrong=0, doubled=0, near_ties=0)
    for judgement in judgements:
        counts.update(judgement.counts)
    sentences = [sentence for judgement in judgements for sentence in judgement.failures]
    by_kind = Counter(f"{request.kind} by {request.api}" for request in asked)
    return {
        "requests": len(asked),
        "requests_by_kind": dict(sorted(by_kind.items())),
        "tokens": sum(len(output) for request in asked for output in request.outputs),
        **counts,
        "unjudged": len(asked) - len(judgements),
        "failures": sentences[:_MAX_SENTENCES],
    }


def _of_choice(request: Asked, choice: int, judge: Judge) -> Counter[str]:
    """Count a choice as wrong once at most, and as doubled if a token came twice."""
    output, params = request.outputs[choice], request.params(choice)
    verdict = Counter(doubled=int(len(output) > params.max_tokens), wrong=0)
    if not output:
        return verdict
    first_wrong, verdict["near_ties"] = judge.first_wrong(request.prompt_ids, params, output)
    if first_wrong is not None:
        verdict["wrong"] = 1
        without = output[:first_wrong] + output[first_wrong + 1 :]
        if first_wrong and output[first_wrong] == output[first_wrong - 1]:
            later, _ = judge.first_wrong(request.prompt_ids, params, without)
            verdict["doubled"] |= later is None or later > first_wrong
    return verdict


def pauses_by_kind(asked: Sequence[Asked], losses: Sequence[Loss]) -> dict[str, dict[str, Any]]:
    """The longest time without a token, of any running stream, at each loss."""
    gaps = [gap for request in asked for gap in request.gaps()]
    pauses: defaultdict[str, list[float]] = defaultdict(list)
    next_s = [*(each.at_s for each in losses[1:]), float("inf")]
    for loss, until_s in zip(losses, next_s, strict=False):  # there may be no loss
        longest = max(
            (end - begin for begin, end in gaps if end > loss.at_s and begin < until_s), default=0.0
        )
        pauses[loss.kind].append(longest)
    return {
        kind: {
            "losses": len(lengths),
            "pause_s_p50": round(sorted(lengths)[len(lengths) // 2], 2),
            "pause_s_max": round(max(lengths), 2),
        }
        for kind, lengths in sorted(pauses.items())
    }


def serving_share(asked: Sequence[Asked], began_s: float, seconds: float) -> float:
    """Share of the time with a token at most a second before or after."""
    times = sorted(time_s for each in asked for arrivals in each.arrivals_s for time_s in arrivals)
    edges = [began_s, *(each for each in times if each < began_s + seconds), began_s + seconds]
    silent = sum(
        later - earlier - _SERVING_GAP_S
        for earlier, later in itertools.pairwise(edges)
        if later - earlier > _SERVING_GAP_S
    )
    return round(1 - silent / seconds, 3)


def claims_of(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """Each claim, and True if it holds."""
    left = ("frames_left", "tickets_left", "segments_left", "processes_left")
    return [
        ("no accepted request was lost", not result["lost"]),
        ("no output has a wrong token", not result["wrong"]),
        ("no token was given twice", not result["doubled"]),
        ("every request was judged", not result["unjudged"]),
        (
            f"{result['near_ties']} near-ties of {result['tokens']:,} tokens, at most 1 of 1,000",
            result["near_ties"] <= MAX_NEAR_TIES * result["tokens"],
        ),
        *((f"{name.replace('_', ' ')}: {result[name]}", not result[name]) for name in left),
        (
            "the service ended with status 0 when asked",
            result["exit_status"] == 0 and not result.get("ended_early"),
        ),
        ("something was lost, and tokens came", bool(result["losses"] and result["tokens"])),
    ]


def total_losses(losses: Iterable[Loss]) -> int:
    """Processes that were lost or stopped."""
    return sum(len(loss.members) for loss in losses)
