"""The engine: any order gives the same result, each operator runs once, mistakes are sentences."""

import random
import re

import pytest
import torch
from torch import nn

from harness.overlap.overlap_models import LINEARS, WIDTH, Chain, compiled, recorded
from nanocp.overlap.engine.backend import overlap_backend
from nanocp.overlap.engine.engine import Forward
from nanocp.overlap.ops import SplitFunc, SplitModule
from nanocp.overlap.policies.orders import (
    DualBatchOverlap,
    NanoFlow,
    Sequential,
    SingleBatchOverlap,
)

pytestmark = pytest.mark.usefixtures("fresh")


class RandomGraph(nn.Module):
    """Linears that each read one or two of what was made before."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        count = chance.randint(5, 20)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.reads = [
            [chance.randrange(made + 1) for _ in range(chance.randint(1, 2))]
            for made in range(count)
        ]
        self.returned = [chance.randrange(1, count + 1) for _ in range(chance.randint(1, 3))]

    def forward(self, rows):
        made = [rows]
        for layer, reads in zip(self.layers, self.reads, strict=True):
            made.append(torch.tanh(layer(sum(made[number] for number in reads))))
        return tuple(made[number] for number in self.returned)


SIZES = {16: (8, 8), 17: (4, 13), 18: (4, 5, 9)}
"""Micro-batches by the rows of a batch."""


class Any(Sequential):
    """Executes any ready operators in any grouping."""

    def __init__(self, seed: int) -> None:
        super().__init__(LINEARS)
        self.random = random.Random(seed)
        self.executed: list[tuple[int, int]] = []

    def begin(self, ops) -> None:
        ops.split(SIZES[ops.batch_size])

    def next_round(self, ops) -> None:
        ready = [op for part in range(ops.num_micro_batches) for op in ops.get_ready_ops(part)]
        chosen = self.random.choice(ready)
        group = [op for op in ready if op.number == chosen.number]
        if self.random.random() < 0.3:
            group = self.random.sample(ready, self.random.randint(1, len(ready)))
        elif self.random.random() < 0.5:
            group = [chosen]
        ops.execute(group)
        self.executed += [(op.number, op.micro_batch) for op in group]


@pytest.mark.parametrize("seed", range(12))
def test_any_order_gives_the_same_and_executes_each_operator_once(seed):
    model, policy = RandomGraph(seed).eval(), Any(seed)
    run, engines = compiled(model, policy)
    for batch, sizes in SIZES.items():
        policy.executed.clear()
        rows = torch.randn(batch, WIDTH)
        expected = model(rows)
        for _ in range(3):  # the first records, the others repeat
            for mine, whole in zip(run(rows), expected, strict=True):
                torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)
        (engine,) = engines
        assert recorded(engine, batch).sizes == sizes, "the order was not given up"
        assert len(policy.executed) == len(set(policy.executed))
        assert len(set(policy.executed)) == len(engine.program.operators) * len(sizes)


@pytest.mark.parametrize("rows", [8, 9, 12, 2])
@pytest.mark.parametrize("policy", [Sequential, NanoFlow, SingleBatchOverlap, DualBatchOverlap])
def test_policies_give_the_bits_of_the_whole_batch(policy, rows):
    model = Chain().eval()
    run, engines = compiled(model, policy(LINEARS))
    batch = torch.randn(rows, 5, WIDTH)
    assert all(torch.equal(run(batch), model(batch)) for _ in range(3))
    (engine,) = engines
    is_whole = recorded(engine, rows) is None
    assert is_whole == (policy in (Sequential, SingleBatchOverlap))


class OfLong(NanoFlow):
    """Halves batches of long contexts only."""

    def key(self, inputs):
        self.is_long = inputs[0].shape[1] > 4
        return self.is_long

    def begin(self, ops):
        if self.is_long:
            super().begin(ops)


def test_a_policy_is_asked_again_for_a_new_key():
    model = Chain().eval()
    run, engines = compiled(model, OfLong(LINEARS))
    for length in (3, 6, 4, 7):
        batch = torch.randn(8, length, WIDTH)
        torch._dynamo.mark_dynamic(batch, 1)
        assert torch.equal(run(batch), model(batch))
    (engine,) = engines
    assert [*engine.recordings] == [(8, False), (8, True)]
    assert engine.recordings[8, False] is None and engine.recordings[8, True].sizes == (4, 4)


def test_a_batch_that_is_not_split_runs_once_from_its_first_forward_on(monkeypatch):
    run, engines = compiled(Chain().eval(), Sequential(LINEARS))
    calls, batch = [], torch.randn(8, 5, WIDTH)
    run(torch.randn(4, 5, WIDTH))
    (engine,) = engines
    whole = engine._whole
    engine._whole = lambda *inputs: calls.append("whole") or whole(*inputs)
    monkeypatch.setattr(Forward, "run", lambda *_: calls.append("operators"))
    run(batch)
    assert calls == ["whole"]


def test_merging_copies_nothing_once_the_order_is_known():
    """Every part of a linear, a sum or a product is written to its place."""
    for last in (nn.Linear(WIDTH, WIDTH), Scaled(WIDTH), Residual(WIDTH)):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), last).eval()
        run, engines = compiled(model, NanoFlow(LINEARS))
        batch = torch.randn(8, WIDTH)
        run(batch)
        assert torch.equal(run(batch), model(batch))
        assert engines[0].num_copied_bytes == 0


class Scaled(nn.Module):
    """Ends in a product, as a norm does."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, rows):
        return self.weight * torch.relu(rows)


class Residual(Scaled):
    """Ends in a sum."""

    def forward(self, rows):
        return rows + torch.relu(self.weight - rows)


def test_a_merged_operator_reads_neighbours_without_a_copy():
    class Once(NanoFlow):
        """The first two operators by halves, the others on both."""

        def next_round(self, ops):
            ready = [ops.get_ready_ops(half)[0] for half in (0, 1)]
            for group in [ready] if ready[0].number else [ready[:1], ready[1:]]:
                ops.execute(group)

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).eval()
    run, engines = compiled(model, Once(LINEARS))
    batch = torch.randn(12, WIDTH)
    run(batch)
    assert torch.equal(run(batch), model(batch))
    assert engines[0].num_copied_bytes == 0


@pytest.mark.parametrize("policy", [NanoFlow, DualBatchOverlap])
def test_values_are_freed_at_their_last_use(monkeypatch, policy):
    """Between two operators each half has what its next one reads, and weights."""
    alive = []

    class Watched(list):
        """The steps; before each of them, what lives is counted."""

        def __iter__(self):
            for step in list.__iter__(self):
                rows = (each for each in living() if each.shape[1:] == (5, WIDTH))
                alive.append(len({each.untyped_storage().data_ptr() for each in rows}))
                yield step

    def living():
        kept = (each for values in forwards[-1]._values for each in values)
        return [*filter(torch.is_tensor, kept), *forwards[-1]._merged_tensors.values()]

    forwards, begin = [], Forward.__init__
    monkeypatch.setattr(
        Forward, "__init__", lambda self, *of: forwards.append(self) or begin(self, *of)
    )
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).eval()
    run, engines = compiled(model, policy(LINEARS))
    batch = torch.randn(8, 5, WIDTH)
    run(batch)
    recording = recorded(engines[0], 8)
    engines[0].recordings[8, None] = recording._replace(steps=Watched(recording.steps))
    run(batch)
    assert len(alive) == len(recording.steps) and max(alive) <= 2, alive


# --- what a policy may not do


def wrong(call):
    """A policy that begins right and then makes one wrong call."""

    class Wrong(Sequential):
        def next_round(self, ops):
            call(ops)

    return Wrong(LINEARS)


def twice(ops):
    (op,) = ops.get_ready_ops(0)
    ops.execute((op,))
    ops.execute((op,))


def too_early(ops):
    (op,) = ops.get_ready_ops(0)
    ops.execute((op._replace(number=1),))


def does_nothing(ops):
    """It executes none of the ready operators."""


def never_ends(ops):
    while True:
        ops.get_ready_ops(0)


def splits_late(ops):
    ops.execute(ops.get_ready_ops(0))
    ops.split((4, 4))


@pytest.mark.parametrize(("call", "error", "sentence"), [
    (twice, ValueError, "operator 0 .* was executed before"),
    (too_early, ValueError, "operator 1 .* is not ready"),
    (does_nothing, RuntimeError, "it never ends"),
    (never_ends, RuntimeError, "it never ends"),
    (splits_late, ValueError, "split comes before the first execute"),
    (lambda ops: ops.split((3, 3)), ValueError, "micro-batches of 3, 3 rows do not make"),
    (lambda ops: ops.split((8, 0)), ValueError, "each must have one row at least"),
])  # fmt: skip
def test_a_wrong_call_is_a_sentence(call, error, sentence):
    run, _ = compiled(Chain().eval(), wrong(call))
    with pytest.raises(error, match=sentence):
        run(torch.randn(8, WIDTH))


# --- what cannot be split


class Random(Chain):
    def forward(self, rows):
        return torch.nn.functional.dropout(super().forward(rows), 0.5, training=True)


class Gram(Chain):
    def forward(self, rows):
        return self.layers[0](rows) @ self.layers[1](rows).T @ rows


class Scores(Chain):
    def forward(self, rows):
        return torch.relu(self.layers[0](rows) @ rows.T) @ rows


@pytest.mark.parametrize(("model", "reason"), [
    (Random(), "dropout.* draws random numbers"),
    (Scores(), "matmul.* has the batch in 2 dimensions"),
    (Gram(), "matmul.* has the batch in 2 dimensions"),
])  # fmt: skip
def test_what_cannot_be_split_runs_whole_and_says_why(model, reason, caplog):
    run, engines = compiled(model.eval(), NanoFlow((*LINEARS, SplitFunc("relu", ""))))
    batch = torch.randn(8, WIDTH)
    torch.manual_seed(1)
    mine = run(batch)
    torch.manual_seed(1)
    assert torch.equal(mine, model(batch))
    assert engines == []
    (record,) = [each for each in caplog.records if "program order" in each.message]
    assert re.search(reason, record.message), record.message


def test_a_fixed_batch_is_not_split(caplog):
    model = Chain().eval()
    compiled = torch.compile(model, backend=overlap_backend(NanoFlow(LINEARS)), dynamic=False)
    batch = torch.randn(8, WIDTH)
    assert torch.equal(compiled(batch), model(batch))
    assert "mark the batch as dynamic" in caplog.text


class Broken(Chain):
    """Traced in two pieces, and returns a part of what it is given."""

    def forward(self, rows):
        made = super().forward(rows)
        torch._dynamo.graph_break()
        return super().forward(made), rows[..., :4]


def test_pieces_of_a_graph_are_split_apart_in_bf16_too(caplog):
    model = Broken().eval().bfloat16()
    run, engines = compiled(model, NanoFlow(LINEARS))
    for num_rows in (8, 1, 8):
        batch = torch.randn(num_rows, WIDTH).bfloat16()
        assert all(map(torch.equal, run(batch), model(batch)))
    assert len(engines) == 2 and all(recorded(engine, 8) for engine in engines)
    assert "mark the batch as dynamic" in caplog.text, "of the batch of one row"


def method(count):
    count.add_(1)


def augmented(count):
    count += 1


def view(count):
    count.view(1).add_(1)


def part(count):
    count.view(1).chunk(1)[0].add_(1)


def keyword(count):
    torch.nn.functional.hardtanh(count, 3.0, 4.0, inplace=True)


@pytest.mark.parametrize("advance", [method, augmented, view, part, keyword])
def test_a_shared_counter_advances_once_and_rows_of_a_cache_are_written(advance):
    class Cache(nn.Module):
        """Writes its rows into a cache in place, and counts its calls."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, rows, cache, count):
            made = self.layer(rows)
            cache.copy_(made + count)
            advance(count)
            return made * count

    model = Cache().eval()
    run, engines = compiled(model, NanoFlow(LINEARS))
    rows = torch.randn(8, WIDTH)
    mine, whole = torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)
    my_count, count = torch.zeros(()), torch.zeros(())
    for _ in range(3):
        assert torch.equal(run(rows, mine, my_count), model(rows, whole, count))
        assert torch.equal(mine, whole) and torch.equal(my_count, count)
    assert count == 3 and recorded(engines[0], 8) is not None


def test_functions_are_cut_out_by_their_names():
    run, engines = compiled(Chain().eval(), NanoFlow((SplitFunc("relu", "network"),)))
    run(torch.randn(8, WIDTH))
    tags = [each.tag for each in engines[0].program.operators]
    assert tags == ["", "network"] * 3 + [""]


def test_modules_are_cut_out_by_their_class_not_by_its_name():
    other = type("Linear", (nn.Linear,), {})
    for rule, tags in ((other, ["", "mine"]), (nn.Linear, ["mine", "", "mine"])):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), other(WIDTH, WIDTH)).eval()
        run, engines = compiled(model, NanoFlow((SplitModule(rule, "mine"),)))
        run(torch.randn(8, WIDTH))
        assert [each.tag for each in engines[0].program.operators] == tags
    with pytest.raises(ValueError, match="module_class is 'Linear'; it must be a class"):
        SplitModule("Linear", "mine")


def test_what_a_half_sends_leaves_before_the_other_half_computes():
    """An operator tagged network returns at once; its result is awaited by what follows it."""
    run, engines = compiled(Chain().eval(), NanoFlow((SplitFunc("relu", "network"),)))
    run(torch.randn(8, WIDTH))
    steps = recorded(engines[0], 8).steps
    order = [(op.number, op.micro_batch) for step in steps for op in step.ops]
    for sent, half in ((number, half) for number in (1, 3, 5) for half in (0, 1)):
        meanwhile = order[order.index((sent, half)) + 1 : order.index((sent + 1, half))]
        assert any(other != half and number % 2 == 0 for number, other in meanwhile)
