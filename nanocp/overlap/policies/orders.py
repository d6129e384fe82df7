"""Policies: program order, and the orders of DynaFlow's Table 2."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter

from nanocp.overlap.ops import Fused, Op, Ops, OverlapPolicy, Rule

NETWORK = "network"
"""Communication. It may return early: readers of the result wait for it."""
ATTENTION = "attention"
SHARED = "shared"
"""A shared expert, which fills gaps."""


class Sequential(OverlapPolicy):
    """Program order, one micro-batch: the reference."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self.rules = rules

    def next_round(self, ops: Ops) -> None:
        ops.execute(ops.get_ready_ops(0)[:1])


class BehindFirst(Sequential):
    """Micro-batches as they are cut, each on a stream: of those that can go on, the one behind."""

    def next_round(self, ops: Ops) -> None:
        ready = [op for each in range(ops.num_micro_batches) for op in ops.get_ready_ops(each)]
        behind = min(ready, key=itemgetter(0))
        stream = f"micro-batch {behind.micro_batch}" if behind.micro_batch else ""
        ops.execute((behind,), stream=stream)


BEHIND_FIRST = BehindFirst()


def launch(
    ops: Ops,
    ready: Iterable[Op],
    beside: Collection[str] = (NETWORK,),
    fused: Fused | None = None,
) -> None:
    """Execute in turn, communication by `fused`; each tag of `beside` has a stream."""
    for op in ready:
        replace_func = fused if op.tag == NETWORK else None
        ops.execute((op,), replace_func, op.tag if op.tag in beside else "")


class SingleBatchOverlap(Sequential):
    """No split: communication starts as soon as it can, other ready operators run beside it."""

    def next_round(self, ops: Ops) -> None:
        launch(ops, sorted(ops.get_ready_ops(0), key=lambda op: op.tag != NETWORK))


class NanoFlow(Sequential):
    """Two halves in turns: one communicates, or attends, as the other computes."""

    def __init__(self, rules: Sequence[Rule] = (), least_rows: int = 2) -> None:
        """least_rows: smaller batches run in program order."""
        super().__init__(rules)
        self._least_rows = max(least_rows, 2)

    def begin(self, ops: Ops) -> None:
        if ops.batch_size >= self._least_rows:
            half = ops.batch_size // 2
            ops.split((half, ops.batch_size - half))

    def next_round(self, ops: Ops) -> None:
        go_on = self.next_of_halves if ops.num_micro_batches > 1 else super().next_round
        go_on(ops)

    def next_of_halves(self, ops: Ops) -> None:
        """Execute the next operator of each half, communication first."""
        for micro_batch in (0, 1):
            launch(ops, ops.get_ready_ops(micro_batch)[:1], (NETWORK, ATTENTION))
            launch(ops, [op for op in ops.get_ready_ops(micro_batch)[:1] if op.tag == NETWORK])


class DualBatchOverlap(NanoFlow):
    """Two halves that meet at attention, which runs once on both.

    Dispatch and combine of one run beside experts or shared expert of the other.
    """

    def next_of_halves(self, ops: Ops) -> None:
        first, *others = sorted(
            (op for half in (0, 1) for op in ops.get_ready_ops(half)),
            key=lambda op: (op.tag == ATTENTION, op.tag != NETWORK, op.tag == SHARED, op.number),
        )
        if first.tag == ATTENTION:  # and so are all others
            ops.execute([first, *(op for op in others if op.number == first.number)])
            return
        beside = [
            op
            for op in others
            if first.tag == NETWORK
            and op.tag not in (NETWORK, ATTENTION)
            and op.micro_batch != first.micro_batch
        ]
        launch(ops, [first, *beside[:1]])


class TokenWeave(NanoFlow):
    """Two halves in turns: one's fused communication, on a stream, runs as the other computes.

    The kernel chooses its CTAs.
    """

    def __init__(self, rules: Sequence[Rule], fused: Fused, least_rows: int = 2) -> None:
        super().__init__(rules, least_rows)
        self._fused = fused

    def next_of_halves(self, ops: Ops) -> None:
        heads = [op for half in (0, 1) for op in ops.get_ready_ops(half)[:1]]
        launch(ops, heads, fused=self._fused)


class Fuse(Sequential):
    """No split: a fused kernel replaces each operator with one of the tags."""

    tags: Collection[str] = ()

    def __init__(self, rules: Sequence[Rule], fused: Fused) -> None:
        super().__init__(rules)
        self._fused = fused

    def next_round(self, ops: Ops) -> None:
        for op in ops.get_ready_ops(0)[:1]:
            ops.execute((op,), self._fused if op.tag in self.tags else None)


class Flux(Fuse):
    """A GEMM and its output's all-reduce are fused."""

    tags = ("linear_all_reduce",)


class Comet(Fuse):
    """Dispatch with the experts' first GEMM, and the second with combine, are fused."""

    tags = ("dispatch_gemm", "gemm_combine")
