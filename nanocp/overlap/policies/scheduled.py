"""Policy that follows a searched schedule (`nanocp overlap search`): a stream per resource."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from nanocp.overlap.interference import COMPUTE
from nanocp.overlap.ops import Op, Ops, Rule
from nanocp.overlap.policies.orders import Sequential, launch
from nanocp.overlap.schedule import Schedule


class Scheduled(Sequential):
    """Nano-operations by their starts, layer by layer (NanoFlow, 4.1).

    Less cut operations run once on several micro-batches, untagged ones as soon as they can.
    """

    def __init__(self, rules: Sequence[Rule], schedule: Schedule) -> None:
        """rules: with names of the schedule's operations as tags.

        Raises ValueError for another tag, and for an operation without the whole batch.
        """
        super().__init__(rules)
        self._period_us = schedule.period_us
        operations = {slot.nano.operation for slot in schedule.slots}
        self._stream_of = {
            each.name: "" if each.resource == COMPUTE else each.resource for each in operations
        }
        edges = {edge for slot in schedule.slots for edge in (slot.nano.begin, slot.nano.end)}
        self._parts = list(pairwise(sorted(edges)))
        self._slots: dict[tuple[str, int], tuple[float, tuple[int, ...]]] = {}
        """(tag, micro-batch) -> its slot's start and micro-batches."""
        for (operation, first, last), start_us, _ in schedule.slots:
            group = tuple(
                number
                for number, (begin, end) in enumerate(self._parts)
                if first <= begin and end <= last
            )
            name = operation.name
            for number in group:
                if (name, number) in self._slots:
                    raise ValueError(f"the schedule has rows of {name} twice")
                self._slots[name, number] = start_us, group
        names = {name for name, _ in self._slots}
        if len(self._slots) != len(names) * len(self._parts) or not edges >= {0.0, 1.0}:
            raise ValueError("an operation of the schedule has not all rows of the batch")
        if unknown := {rule.tag for rule in rules} - names:
            raise ValueError(
                f"rules cut out {', '.join(sorted(unknown))}; the schedule's operations are "
                f"{', '.join(sorted(names))}"
            )

    def begin(self, ops: Ops) -> None:
        """Cut the batch as the schedule does; one too small for that runs in program order."""
        ends = [round(end * ops.batch_size) for _, end in self._parts]
        sizes = [end - begin for begin, end in pairwise([0, *ends])]
        self._num_run: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._is_cut = min(sizes) >= 1
        if self._is_cut:
            ops.split(sizes)

    def next_round(self, ops: Ops) -> None:
        if not self._is_cut:
            return super().next_round(ops)
        heads = self._heads(ops)
        starts: list[tuple[float, tuple[Op, ...]]] = []
        for (tag, number), op in heads.items():
            if (tag, number) not in self._slots:
                starts.append((-1.0, (op,)))
                continue
            start_us, group = self._slots[tag, number]
            parts = tuple(heads[tag, one] for one in group if (tag, one) in heads)
            if len(parts) == len(group) and len({part.number for part in parts}) == 1:
                layer = self._num_run[tag, number]
                starts.append((layer * self._period_us + start_us, parts))
        _, chosen = min(starts, key=lambda start: start[0])
        for op in chosen:
            self._num_run[op.tag, op.micro_batch] += 1
        ops.execute(chosen, stream=self._stream_of.get(chosen[0].tag, ""))

    def _heads(self, ops: Ops) -> dict[tuple[str, int], Op]:
        heads: dict[tuple[str, int], Op] = {}
        for micro_batch in range(len(self._parts)):
            for op in ops.get_ready_ops(micro_batch):
                heads.setdefault((op.tag, micro_batch), op)
        return heads


LANE_TAGS = ("combine", "attention", "exchange", "experts")
"""Tags of a lane's operators in a layer."""


class Priority(Sequential):
    """Ready operators of lanes: the one that a schedule starts first."""

    def __init__(self, starts: Sequence[int]) -> None:
        """starts: of each tag in both lanes, in thousandths of a period."""
        super().__init__()
        self._starts = starts

    def begin(self, ops: Ops) -> None:
        self._places = [-1, -1]

    def next_round(self, ops: Ops) -> None:
        ready: list[tuple[int, int, int, Op]] = []
        for lane, place in enumerate(self._places):
            for op in ops.get_ready_ops(lane):
                if op.tag in LANE_TAGS:
                    place += 1 + (LANE_TAGS.index(op.tag) - place - 1) % len(LANE_TAGS)
                layer, number = divmod(place, len(LANE_TAGS))
                ready.append((1000 * layer + self._starts[2 * number + lane], lane, place, op))
        _, lane, place, op = min(ready)
        self._places[lane] = place
        launch(ops, (op,))


def priority_of(schedule: Schedule) -> str | None:
    """A `Priority` as text; None unless the schedule has two nano-batches."""
    if len({edge for slot in schedule.slots for edge in slot.nano[1:]}) != 3:
        return None
    starts, parts = [0, 0], []
    for tag in LANE_TAGS:
        for nano, start_us, _ in schedule.slots:
            for lane, is_in_lane in enumerate((nano.begin == 0, nano.end == 1)):
                if nano.operation.name == tag and is_in_lane:
                    starts[lane] = round(1000 * start_us / schedule.period_us)
        parts.append(f"{tag} {starts[0]}/{starts[1]}")
    return ", ".join(parts)
