"""Policies: program order, and the orders that DynaFlow expresses (its Table 2).

A fusing policy takes the fused callable; without a kernel, a reference composes the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from nanocp.overlap.ops import Fused, Op, Ops, Rule

NETWORK = "network"
"""Communication. It may return early: readers of the result wait for it."""
ATTENTION = "attention"


class Sequential:
    """Program order, one micro-batch: the reference."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self.rules = rules

    def schedule(self, ops: Ops) -> None:
        """Execute the next operator until none is left."""
        while not ops.is_finished:
            ops.execute(ops.get_ready_ops(0)[:1])


def launch(ops: Ops, ready: Iterable[Op]) -> None:
    """Execute one operator after the other; communication has a stream of its own."""
    for op in ready:
        ops.execute((op,), stream=NETWORK if op.tag == NETWORK else "")


class SingleBatchOverlap(Sequential):
    """No split: communication starts as soon as it can, other ready operators run beside it."""

    def schedule(self, ops: Ops) -> None:
        """Execute ready operators, communication first."""
        while not ops.is_finished:
            launch(ops, sorted(ops.get_ready_ops(0), key=lambda op: op.tag != NETWORK))


class NanoFlow(Sequential):
    """Two halves of the batch in turns: while one communicates, the other computes."""

    def __init__(self, rules: Sequence[Rule] = (), least_rows: int = 2) -> None:
        """least_rows: smaller batches run in program order."""
        super().__init__(rules)
        self._least_rows = max(least_rows, 2)

    def schedule(self, ops: Ops) -> None:
        """Cut the batch in two if it is large enough."""
        if ops.batch_size < self._least_rows:
            return super().schedule(ops)
        half = ops.batch_size // 2
        ops.split((half, ops.batch_size - half))
        while not ops.is_finished:
            self.next_round(ops)

    def next_round(self, ops: Ops) -> None:
        """Execute the next operator of each half, communication first."""
        for micro_batch in (0, 1):
            launch(ops, ops.get_ready_ops(micro_batch)[:1])
            launch(ops, [op for op in ops.get_ready_ops(micro_batch)[:1] if op.tag == NETWORK])


class DualBatchOverlap(NanoFlow):
    """Two halves in turns that meet at attention, which runs once on both."""

    def next_round(self, ops: Ops) -> None:
        """Execute attention of both halves, or the operator of the half that is behind."""
        heads = [op for half in (0, 1) for op in ops.get_ready_ops(half)[:1]]
        if len(heads) == 2 and {op.tag for op in heads} == {ATTENTION}:
            ops.execute(heads)
        else:
            launch(ops, [min(heads, key=lambda op: (op.tag == ATTENTION, op.number))])


class TokenWeave(NanoFlow):
    """Two halves in turns; a fused kernel takes the place of communication and normalisation."""

    def __init__(self, rules: Sequence[Rule], fused: Fused, least_rows: int = 2) -> None:
        super().__init__(rules, least_rows)
        self._fused = fused

    def next_round(self, ops: Ops) -> None:
        """Execute the next operator of each half, fused where it communicates."""
        for micro_batch in (0, 1):
            for op in ops.get_ready_ops(micro_batch)[:1]:
                ops.execute((op,), self._fused if op.tag == NETWORK else None)


class Fuse(Sequential):
    """No split: each operator with one of the tags is replaced by its fused kernel."""

    tags: Collection[str] = ()

    def __init__(self, rules: Sequence[Rule], fused: Fused) -> None:
        super().__init__(rules)
        self._fused = fused

    def schedule(self, ops: Ops) -> None:
        """Execute in program order."""
        while not ops.is_finished:
            for op in ops.get_ready_ops(0)[:1]:
                ops.execute((op,), self._fused if op.tag in self.tags else None)


class Flux(Fuse):
    """A GEMM and the all-reduce of its output are one kernel."""

    tags = ("linear_all_reduce",)


class Comet(Fuse):
    """Dispatch and the experts' first GEMM are one kernel, the second GEMM and combine another."""

    tags = ("dispatch_gemm", "gemm_combine")
