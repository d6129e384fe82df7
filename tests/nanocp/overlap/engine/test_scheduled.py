"""A searched schedule, written and read, orders a model's operators, and the result is the same."""

import pytest
import torch
from torch import nn

from nanocp.overlap import paper, schedule
from nanocp.overlap.engine.backend import overlap
from nanocp.overlap.interference import COMPUTE, MEMORY
from nanocp.overlap.operations import NanoOperation, Operation
from nanocp.overlap.ops import SplitModule
from nanocp.overlap.policies.scheduled import Scheduled
from nanocp.overlap.schedule import Schedule, Slot

pytestmark = pytest.mark.usefixtures("fresh")

UP = Operation("up", COMPUTE, 10.0, 0.0, needs_before=("down",))
DOWN = Operation("down", MEMORY, 10.0, 0.0, needs=("up",))
WIDTH, LAYERS = 8, 3


class Up(nn.Linear):
    pass


class Down(nn.Linear):
    pass


RULES = (SplitModule(Up, "up"), SplitModule(Down, "down"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList(Up(WIDTH, WIDTH) for _ in range(LAYERS))
        self.downs = nn.ModuleList(Down(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, rows):
        for up, down in zip(self.ups, self.downs, strict=True):
            rows = rows + down(torch.relu(up(rows)))
        return rows


class Noted(Scheduled):
    """Remembers what was executed together."""

    def begin(self, ops):
        self.executed = []
        execute = ops.execute
        ops.execute = lambda group, **how: (self.executed.append(group), execute(group, **how))
        super().begin(ops)

    def order(self):
        """(tag, micro-batches) of the operators with a tag."""
        return [
            (group[0].tag, tuple(op.micro_batch for op in group))
            for group in self.executed
            if group[0].tag
        ]


def slot(operation, begin, end, start_us):
    return Slot(NanoOperation(operation, begin, end), start_us, 0.5)


HALVES = [slot(UP, 0, 0.5, 0), slot(UP, 0.5, 1, 10), slot(DOWN, 0, 0.5, 12), slot(DOWN, 0.5, 1, 22)]


@pytest.mark.parametrize(("slots", "layer"), [
    (HALVES, [("up", (0,)), ("up", (1,)), ("down", (0,)), ("down", (1,))]),
    ([slot(UP, 0, 1, 0), slot(DOWN, 0.25, 1, 11), slot(DOWN, 0, 0.25, 15)],
     [("up", (0, 1)), ("down", (1,)), ("down", (0,))]),
])  # fmt: skip
def test_operators_run_as_the_schedule_starts_them(slots, layer):
    model, policy = Model().eval(), Noted(RULES, Schedule(24.0, tuple(slots)))
    run, rows = overlap(model, policy), torch.randn(16, WIDTH)
    for _ in range(2):
        torch.testing.assert_close(run(rows), model(rows), rtol=1e-5, atol=1e-6)
    assert policy.order() == layer * LAYERS


def test_a_layer_begins_before_the_one_before_has_ended():
    """If all of the second half is a period late, the first half's next layer is first."""
    late = [
        each._replace(start_us=each.start_us + 24 * (each.nano.begin == 0.5)) for each in HALVES
    ]
    policy = Noted(RULES, Schedule(24.0, tuple(late)))
    model, rows = Model().eval(), torch.randn(4, WIDTH)
    torch.testing.assert_close(overlap(model, policy)(rows), model(rows), rtol=1e-5, atol=1e-6)
    assert policy.order()[:4] == [("up", (0,)), ("down", (0,)), ("up", (0,)), ("up", (1,))]


def test_a_small_batch_runs_in_program_order():
    policy = Noted(RULES, Schedule(24.0, tuple(HALVES)))
    model, rows = Model().eval(), torch.randn(1, WIDTH)
    torch.testing.assert_close(overlap(model, policy)(rows), model(rows))


def test_a_file_of_a_schedule_is_a_policy(tmp_path):
    path, operations = tmp_path / "schedule.yaml", (UP, DOWN)
    schedule.write(path, Schedule(20.0, (slot(UP, 0, 1, 0)._replace(share=1.0),
                                         slot(DOWN, 0, 1, 10)._replace(share=1.0))),
                   operations, paper.TABLE_3)  # fmt: skip
    policy = Noted(RULES, schedule.read(path, operations, paper.TABLE_3))
    model, rows = Model().eval(), torch.randn(4, WIDTH)
    torch.testing.assert_close(overlap(model, policy)(rows), model(rows))


@pytest.mark.parametrize(("rules", "slots", "sentence"), [
    ((SplitModule(Up, "upp"),), HALVES, "rules cut out upp; the schedule's operations are"),
    (RULES, HALVES[1:], "has not all rows of the batch"),
    (RULES, [*HALVES, slot(UP, 0, 1, 30)], "has rows of up twice"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(rules, slots, sentence):
    with pytest.raises(ValueError, match=sentence):
        Scheduled(rules, Schedule(24.0, tuple(slots)))
