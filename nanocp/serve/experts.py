"""Experts of a running service for its operator: where they are, and how even their load is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from control_plane.coordinator.flights.expert_changes import ExpertsNow
from control_plane.coordinator.members.expert_moves import LayerPlacement
from nanocp.config.whole import Config

NO_REPORT = "no instance has reported its load yet: each does every 128 windows"


def why_fixed(config: Config, num_experts: int | None) -> str:
    """Say why a cluster has no loads of experts; empty if it has.

    num_experts: of a layer, 0 if dense; None if every instance must serve.
    """
    if config.cluster.layout == "pipeline":
        return "a stage of a pipeline has all experts of its layers"
    if num_experts == 0:
        return "the model is dense: it has no experts"
    if config.cluster.num_instances == 1:
        return "the only instance has all experts"
    if num_experts is None or not config.recovers:
        return "the service ends with the first loss, so its experts stay where they are"
    return ""


def answer_experts(
    config: Config,
    num_experts: int | None,
    read: Callable[[], ExpertsNow | None],
    body: bytes | None,
    who: str,
) -> bytes:
    """Answer for /cluster/experts: JSON that `nanocp simulate --set experts=FILE` reads too.

    num_experts: see why_fixed. read: asks the controller. Raises ValueError for a body.
    """
    if body is not None:
        raise ValueError(f"{who} cannot change experts so: set cluster.expert_load_mb_per_s")
    why = why_fixed(config, num_experts)
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
            "expert_load_mb_per_s": config.cluster.expert_load_mb_per_s,
            "pairs": [each.instance_loads for each in placed],
            "imbalances": [each.imbalance for each in placed],
        }
    ).encode()
