"""Policies are as short as the paper says, and know operators by their tags alone."""

import ast
import inspect
from collections import Counter

import pytest

from nanocp.overlap.ops import Op
from nanocp.overlap.policies import orders

TABLE_2 = {
    "NanoFlow": 22, "DualBatchOverlap": 67, "SingleBatchOverlap": 24, "TokenWeave": 28, "Flux": 25,
    "Comet": 47,
}  # fmt: skip
"""Lines of each scheduler in DynaFlow's Table 2."""


def lines_of(name):
    """Lines of a policy's class and of those it extends, without docstrings and empty lines."""
    total = 0
    for cls in getattr(orders, name).__mro__[:-1]:
        if cls is orders.Sequential or cls.__module__ != orders.__name__:
            continue
        (tree,) = ast.parse(inspect.getsource(cls)).body
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                del node.body[0]
        total += len(ast.unparse(tree).splitlines())
    return total


@pytest.mark.parametrize("name", TABLE_2)
def test_a_policy_has_at_most_the_papers_lines(name):
    assert lines_of(name) <= TABLE_2[name]


class Played:
    """An `Ops` that notes what a policy executes of operators with tags and what they read."""

    def __init__(self, *operators: tuple[str, tuple[int, ...]], rows: int = 8) -> None:
        self.operators = operators
        self.batch_size = rows
        self.sizes: tuple[int, ...] = (rows,)
        self.executed: list[tuple[tuple[tuple[int, int], ...], object, str]] = []
        self.done: set[tuple[int, int]] = set()

    @property
    def num_micro_batches(self):
        return len(self.sizes)

    @property
    def is_finished(self):
        return len(self.done) == len(self.operators) * len(self.sizes)

    def split(self, sizes):
        self.sizes = tuple(sizes)

    def get_ready_ops(self, micro_batch):
        return tuple(
            Op(number, tag, micro_batch)
            for number, (tag, reads) in enumerate(self.operators)
            if (number, micro_batch) not in self.done
            and all((each, micro_batch) in self.done for each in reads)
        )

    def execute(self, ops, replace_func=None, stream=""):
        assert all(op in self.get_ready_ops(op.micro_batch) for op in ops)
        places = tuple((op.number, op.micro_batch) for op in ops)
        self.executed.append((places, replace_func, stream))
        self.done |= set(places)

    def order(self):
        """Operators and micro-batches, call by call."""
        return [places for places, _, _ in self.executed]

    def took(self):
        """Time if an operator takes 1 on the whole batch, and a stream runs its calls in order."""
        free, ends = Counter(), {}
        for places, _, stream in self.executed:
            read = [(each, half) for number, half in places for each in self.operators[number][1]]
            begin = max([free[stream], *(ends[each] for each in read)])
            free[stream] = begin + len(places) / len(self.sizes)
            ends |= dict.fromkeys(places, free[stream])
        return max(free.values())


def play(policy, *operators, rows=8):
    played = Played(*operators, rows=rows)
    policy.begin(played)
    while not played.is_finished:
        policy.next_round(played)
    return played


def chain(*tags):
    """Operators of which each reads the one before."""
    return [(tag, (number - 1,) if number else ()) for number, tag in enumerate(tags)]


def test_single_batch_overlap_sends_before_it_computes():
    """Two things are ready after the first: what communicates comes first, on its own stream."""
    operators = (("", ()), ("mlp", (0,)), ("network", (0,)), ("", (1, 2)))
    played = play(orders.SingleBatchOverlap(), *operators)
    assert played.order() == [((0, 0),), ((2, 0),), ((1, 0),), ((3, 0),)]
    assert [stream for _, _, stream in played.executed] == ["", "network", "", ""]
    assert played.sizes == (8,)


def test_dual_batch_overlap_merges_attention_and_takes_the_half_that_is_behind():
    played = play(orders.DualBatchOverlap(), *chain("", "attention", "mlp", "attention", ""))
    assert played.sizes == (4, 4)
    assert played.order() == [
        ((0, 0),), ((0, 1),), ((1, 0), (1, 1)), ((2, 0),), ((2, 1),), ((3, 0), (3, 1)),
        ((4, 0),), ((4, 1),),
    ]  # fmt: skip


def test_dual_batch_overlap_lets_attention_wait_for_the_other_half():
    """Attention comes before the mlp in the program; a half that is there waits at it."""
    played = play(orders.DualBatchOverlap(), *chain("attention", "network", "mlp", "", "attention"))
    assert played.order()[0] == ((0, 0), (0, 1)) and played.order()[-1] == ((4, 0), (4, 1))
    turns = [number for ((number, _),) in played.order()[1:-1]]
    assert turns == [1, 1, 2, 2, 3, 3], "no half runs ahead"


def test_nanoflow_takes_turns_operator_by_operator():
    played = play(orders.NanoFlow(), *chain("", "network", "mlp"))
    assert played.order() == [((0, 0),), ((1, 0),), ((0, 1),), ((1, 1),), ((2, 0),), ((2, 1),)]
    assert play(orders.NanoFlow(least_rows=9), *chain("", "")).sizes == (8,)


def fused(*inputs):
    return inputs


def test_token_weave_halves_the_batch_takes_turns_and_fuses_what_communicates():
    played = play(orders.TokenWeave((), fused), *chain("", "network", "mlp"), rows=9)
    assert played.sizes == (4, 5)
    assert played.order() == [((number, half),) for number in range(3) for half in (0, 1)]
    replaced = [function for _, function, _ in played.executed]
    assert replaced == [None, None, fused, fused, None, None]
    assert play(orders.TokenWeave((), fused, least_rows=10), *chain("network")).sizes == (8,)


MIXTURE = [*chain("attention", "network", "experts", "network"), ("shared", (0,)), ("", (3, 4))]
SHARED_FIRST = [
    *(("attention", ()), ("shared", (0,)), ("network", (0,)), ("experts", (2,)), ("network", (3,))),
    ("", (1, 4)),
]
"""An MoE layer in two program orders: dispatch, experts, combine beside a shared expert."""


@pytest.mark.parametrize(("policy", "operators", "took"), [
    (orders.Sequential(), MIXTURE, 6.0),
    (orders.SingleBatchOverlap(), MIXTURE, 5.0),
    (orders.DualBatchOverlap(), MIXTURE, 4.0),
    (orders.DualBatchOverlap(), SHARED_FIRST, 4.0),
    (orders.NanoFlow(), chain("", "attention", "", "attention"), 2.5),
    (orders.TokenWeave((), fused), chain("", "network", "", "network"), 2.5),
], ids=lambda each: type(each).__name__)  # fmt: skip
def test_what_the_papers_overlap_runs_side_by_side_on_two_streams(policy, operators, took):
    """Dual-batch overlap by pairs: dispatch beside shared, then experts; combine the reverse."""
    assert play(policy, *operators).took() == took


@pytest.mark.parametrize(
    ("policy", "tags"),
    [(orders.Flux, {"linear_all_reduce"}), (orders.Comet, {"dispatch_gemm", "gemm_combine"})],
)
def test_fusing_policies_replace_every_operator_of_their_tags_and_no_other(policy, tags):
    named = ("", "linear_all_reduce", "dispatch_gemm", "gemm_combine", "network")
    played = play(policy((), fused), *chain(*named))
    assert played.order() == [((number, 0),) for number in range(5)] and played.sizes == (8,)
    replaced = {named[places[0][0]] for places, function, _ in played.executed if function}
    assert replaced == tags
