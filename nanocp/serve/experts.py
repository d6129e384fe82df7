"""Experts of a running service for its operator: where they are, and how even their load is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from control_plane.coordinator.flights.expert_changes import ExpertsNow
from control_plane.coordinator.members.expert_moves import LayerPlacement

NO_REPORT = "no instance has reported its load yet: each does every 5 s"


def answer_experts(
    why: str,
    load_mb_per_s: int,
    read: Callable[[], ExpertsNow | None],
    body: bytes | None,
    who: str,
) -> bytes:
    """Answer for /cluster/experts: JSON that `nanocp simulate --set experts=FILE` reads too.

    why: see served.why_experts_stay. load_mb_per_s: the setting, for each instance. read: asks the
    controller. Raises ValueError for a body.
    """
    if body is not None:
        raise ValueError(f"{who} cannot change experts so: set cluster.expert_load_mb_per_s")
    now = None if why else read()
    if now is None or not now.table:
        return json.dumps({"why": why or NO_REPORT}).encode()
    slots = [range(seat * now.num_slots, (seat + 1) * now.num_slots) for seat in now.seats]
    placed = [
        LayerPlacement(
            loads, [[layer[n] for n in each if layer[n] >= 0] for each in slots], now.num_slots
        )
        for layer, loads in zip(now.table, now.loads, strict=True)
    ]
    return json.dumps(
        asdict(now)
        | {
            "num_experts": len(now.loads[0]),
            "expert_load_mb_per_s": load_mb_per_s,
            "pairs": [each.instance_loads for each in placed],
            "imbalances": [each.imbalance for each in placed],
        }
    ).encode()
