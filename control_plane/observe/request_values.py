"""A request as JSON values, for `nanocp why`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from control_plane.observe.timelines import Found, sentences
from nanocp.values.plan import Ended, Finished


def request_values(found: Found, wall_us: int) -> dict[str, Any]:
    """Return the request's values.

    wall_us: Unix time at the controller's time 0, us; 0: unknown.
    """
    timeline, account, part, placement = found
    arrival, moments = timeline.arrival, timeline.moments
    first_us = moments[0].at_us
    at = datetime.fromtimestamp((wall_us + first_us) / 1e6, UTC) if wall_us else None
    last = moments[-1].what
    return {
        "number": arrival.request_id,
        "client_id": arrival.client_id,
        "arrived": at and at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "state": part.value if part else "ended",
        "reason": last.reason.value if isinstance(last, Finished | Ended) else None,
        "message": last.message if isinstance(last, Ended) else "",
        "prompt_len": arrival.prompt_len,
        "max_tokens": arrival.max_tokens,
        "num_generated": last.num_tokens if isinstance(last, Finished) else None,
        "priority": arrival.priority,
        "seconds": {one.value: us / 1e6 for one, us in account.parts_us.items()},
        "num_queued_before": account.num_queued_before,
        "obstacle": account.obstacle,
        "num_prefilling_before": account.num_prefilling_before,
        "num_windows": account.num_windows,
        "step_ms": account.step_us / account.num_windows / 1e3 if account.num_windows else None,
        "num_moves": account.num_moves,
        "num_rebindings": account.num_rebindings,
        "num_preemptions": account.num_preemptions,
        "num_resubmissions": account.num_resubmissions,
        "cp_degree": placement and placement.cp_degree,
        "moe_binding": placement and placement.moe_binding,
        "timeline": [
            [round((moment.at_us - first_us) / 1e6, 6), *sentence]
            for moment, sentence in zip(moments, sentences(timeline), strict=True)
        ],
    }
