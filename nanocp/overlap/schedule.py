"""A periodic schedule of nano-operations, its validity rules and its YAML file.

It repeats for each layer, one period later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nanocp.files.yaml_file import read_yaml
from nanocp.overlap.interference import Interference
from nanocp.overlap.operations import NanoOperation, Operation, waits

VERSION = 1
_TOLERANCE = 1e-4
"""Solvers' rounding, as a share of a period."""


class Slot(NamedTuple):
    """Start of a nano-operation, and its share of the GPU."""

    nano: NanoOperation
    start_us: float
    """From the first start of its layer, maybe more than a period."""
    share: float
    """R, 0 to 1."""


@dataclass(frozen=True)
class Schedule:
    """One layer's nano-operations in time."""

    period_us: float
    slots: tuple[Slot, ...]


def violations(schedule: Schedule, interference: Interference) -> Iterator[str]:
    """Sentences about every law that the schedule breaks; none if it is valid.

    Durations follow from shares, dependencies end before starts, a resource runs one nano-operation
    at a time, and shares add up to 1 at most.
    """
    period, slots = schedule.period_us, schedule.slots
    slack = _TOLERANCE * period
    took_us = [duration_us(slot, interference) for slot in slots]
    for index, slot in enumerate(slots):
        if took_us[index] > period + slack:
            yield f"{name_of(slot.nano)} takes longer than a period"
    for wait in waits([slot.nano for slot in slots]):
        earlier, later = slots[wait.earlier], slots[wait.later]
        end_us = earlier.start_us + took_us[wait.earlier]
        if later.start_us + period * wait.is_of_layer_before < end_us - slack:
            yield (
                f"{name_of(later.nano)} begins {end_us - later.start_us:.1f} us before "
                f"{name_of(earlier.nano)} has ended"
            )
    for at_us in sorted({slot.start_us % period for slot in slots}):
        # A little later, so that what ends here has ended.
        running = [
            slot
            for slot, us in zip(slots, took_us, strict=True)
            if (at_us + 2 * slack - slot.start_us) % period < us - slack
        ]
        names = ", ".join(name_of(slot.nano) for slot in running)
        if (total := sum(slot.share for slot in running)) > 1 + _TOLERANCE:
            yield f"{names} have {total:.2f} of the GPU together at {at_us:.1f} us"
        resources = [slot.nano.operation.resource for slot in running]
        if len(set(resources)) < len(resources):
            yield f"{names} run at {at_us:.1f} us, two of them on the same resource"


def duration_us(slot: Slot, interference: Interference) -> float:
    """Microseconds with its part of the GPU."""
    return slot.nano.us / interference.speed(slot.nano.operation.resource, slot.share)


def name_of(nano: NanoOperation) -> str:
    """The operation and the part of the batch, such as `KQV 0.00-0.50`."""
    return f"{nano.operation.name} {nano.begin:.2f}-{nano.end:.2f}"


def digest(operations: Sequence[Operation], interference: Interference) -> str:
    """Hash of the schedule's inputs, in 16 hexadecimal digits."""
    inputs = repr((tuple(operations), interference))
    return hashlib.blake2b(inputs.encode(), digest_size=8).hexdigest()


def write(
    path: Path,
    schedule: Schedule,
    operations: Sequence[Operation],
    interference: Interference,
    case: Mapping[str, Any] | None = None,
) -> None:
    """Write the schedule as YAML. case: the source of the operations' times."""
    content = {
        "version": VERSION,
        **({"case": dict(case)} if case else {}),
        "made_for": digest(operations, interference),
        "period_us": round(schedule.period_us, 3),
        "nano_operations": [
            {
                "operation": slot.nano.operation.name,
                "rows": [slot.nano.begin, slot.nano.end],
                "start_us": round(slot.start_us, 3),
                "share_of_gpu": slot.share,
            }
            for slot in sorted(schedule.slots, key=lambda slot: slot.start_us)
        ],
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def read(path: Path, operations: Sequence[Operation], interference: Interference) -> Schedule:
    """Read a schedule that was made for these operations.

    Raises ValueError if it is none, was made for others, or breaks a law.
    """
    content = _content(path)
    expected = digest(operations, interference)
    if content.get("made_for") != expected:
        raise ValueError(
            f"{path}: made_for is {content.get('made_for')}, but these operations and their "
            f"interference are {expected}; search again"
        )
    by_name = {operation.name: operation for operation in operations}
    slots = []
    try:
        for number, entry in enumerate(content["nano_operations"]):
            if (name := entry["operation"]) not in by_name:
                raise ValueError(
                    f"nano_operations.{number}.operation is {name!r}; a step has "
                    f"{', '.join(by_name)}"
                )
            nano = NanoOperation(by_name[name], *map(float, entry["rows"]))
            slots.append(Slot(nano, float(entry["start_us"]), float(entry["share_of_gpu"])))
        schedule = Schedule(float(content["period_us"]), tuple(slots))
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    for name in by_name:
        rows = sorted(slot.nano[1:] for slot in slots if slot.nano.operation.name == name)
        if [0.0, *(end for _, end in rows)] != [*(begin for begin, _ in rows), 1.0]:
            raise ValueError(f"{path}: rows of {name} are {rows}; they must be the batch, once")
    if broken := next(violations(schedule, interference), None):
        raise ValueError(f"{path}: {broken}")
    return schedule


def case_of(path: Path) -> dict[str, Any]:
    """The case that `write` was given; empty if there was none.

    Raises ValueError if the file is no schedule.
    """
    case = _content(path).get("case", {})
    return case if isinstance(case, dict) else {}


def _content(path: Path) -> dict[str, Any]:
    content = read_yaml(path, "schedule")
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"{path}: not a schedule of version {VERSION}")
    return content
