"""Step times with layers in the order of a searched schedule (docs/develop/overlap.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from nanocp.overlap import schedule as schedules
from nanocp.overlap.interference import COMPUTE, MEMORY, NETWORK
from nanocp.overlap.operations import NanoOperation, Operation, without_empty
from nanocp.overlap.predict import Order
from nanocp.simulator.costs.cluster_file import ClusterFile
from nanocp.simulator.costs.cost import CostModel, LayerTime, Loads, StepTime

_OPERATIONS: dict[str, Callable[[LayerTime], float]] = {
    "other": lambda layer: layer.other_us,
    "attention": lambda layer: layer.attention_us,
    "exchange": lambda layer: layer.exchange_us,
    "dispatch": lambda layer: layer.dispatch_combine_us / 2,
    "experts": lambda layer: layer.expert_us,
    "combine": lambda layer: layer.dispatch_combine_us / 2,
}
"""An MoE layer's operations in program order, with their microseconds of a layer."""
_IN_EVERY_LAYER = ("other", "attention", "exchange")
"""Operations in layers without experts too."""
_NETWORK = ("exchange", "dispatch", "combine")
_ROUNDING = 1e-9
"""Share of a step: sums in another order are no gain."""


@dataclass(frozen=True, slots=True)
class Case:
    """The case of a schedule search."""

    cluster: str
    """The name or path of a cluster file."""
    constants: str
    rows: int
    tokens: int
    links: int
    """Rows that an instance sends within its node."""

    @property
    def loads(self) -> Loads:
        """The load of one instance, all being alike."""
        rows = self.rows + self.links
        return Loads([self.tokens], [self.rows], [rows], [self.links], [0])


def layer_operations(model: CostModel, loads: Loads) -> tuple[Operation, ...]:
    """One MoE layer's operations in a chain; fixed costs repeat per part, but for latencies."""
    whole, half = (model.step(loads.part(part)).layer for part in (1.0, 0.5))
    operations, names = [], list(_OPERATIONS)
    for number, (name, us_of) in enumerate(_OPERATIONS.items()):
        us = us_of(whole)
        fixed_us = 0.0 if name in _NETWORK else min(max(2 * us_of(half) - us, 0.0), us)
        is_memory = name == "attention" or fixed_us > us / 2
        resource = NETWORK if name in _NETWORK else MEMORY if is_memory else COMPUTE
        needs, before = ((names[number - 1],), ()) if number else ((), (names[-1],))
        operations.append(Operation(name, resource, us, fixed_us, needs, before))
    return without_empty(operations)


class ScheduledSteps:
    """Step times of one cluster whose layers run in the order of a schedule."""

    def __init__(self, model: CostModel, file: ClusterFile, schedule: schedules.Schedule) -> None:
        self._model, self._shape = model, file.model
        self._order = Order(schedule, model.interference)

    def step(self, loads: Loads) -> StepTime:
        """The step's time in the shorter of the schedule's and program order."""
        plain = self._model.step(loads)
        parts = {
            part: self._model.step(loads.part(part)).layer
            for part in {_size(slot.nano) for slot in self._order.slots}
        }
        layers_us = [
            _size(slot.nano) * _OPERATIONS[slot.nano.operation.name](plain.layer)
            if slot.nano.operation.resource == NETWORK
            else _OPERATIONS[slot.nano.operation.name](parts[_size(slot.nano)])
            for slot in self._order.slots
        ]
        names = [slot.nano.operation.name for slot in self._order.slots]
        dense_us = [
            us if name in _IN_EVERY_LAYER else 0.0
            for us, name in zip(layers_us, names, strict=True)
        ]
        num_layers, num_moe = self._shape.num_layers, self._shape.num_moe_layers
        us = self._order.layers_us(layers_us, num_moe) + self._model.once_us
        us += self._order.layers_us(dense_us, num_layers - num_moe)
        # Without links nothing was exchanged where the schedule was searched: it comes on top.
        for name in _OPERATIONS.keys() - names:
            us += _OPERATIONS[name](plain.layer) * (
                num_layers if name in _IN_EVERY_LAYER else num_moe
            )
        plain_us = num_layers * sum(plain.layer[:3]) + num_moe * sum(plain.layer[3:])
        plain_us += self._model.once_us
        if us >= plain_us * (1 - _ROUNDING):
            return plain
        share = us / plain_us
        return StepTime(round(us), LayerTime(*(share * each for each in plain.layer)), False, True)


def write(path: Path, schedule: schedules.Schedule, case: Case, model: CostModel) -> None:
    """Write a schedule with its case."""
    operations = layer_operations(model, case.loads)
    schedules.write(path, schedule, operations, model.interference, asdict(case))


def read(path: Path, cluster: str, constants: str, model: CostModel) -> schedules.Schedule:
    """Read a schedule for this cluster.

    Raises ValueError if it is for another one, or if `nanocp.overlap.schedule.read` refuses it.
    """
    found = schedules.case_of(path)
    try:
        case = Case(**found)
    except TypeError:
        raise ValueError(
            f"{path}: case is {found}, of no simulated cluster; nanocp overlap search --cluster "
            "makes one"
        ) from None
    for name, wanted in (("cluster", cluster), ("constants", constants)):
        if found[name] != wanted:
            raise ValueError(f"{path}: case.{name} is {found[name]!r}; it must be {wanted!r}")
    return schedules.read(path, layer_operations(model, case.loads), model.interference)


def _size(nano: NanoOperation) -> float:
    return nano.end - nano.begin
