"""Re-levelling: a gap must be worth a move, and a request is not cut into more and more runs."""

from types import SimpleNamespace

import pytest

from control_plane.scheduler.policies import relevel as module
from control_plane.scheduler.policies.relevel import MAX_RUNS, relevel
from nanocp.values.plan import PAGE_SIZE, TargetRun

NODE = range(2)


@pytest.fixture(autouse=True)
def smallest_move(monkeypatch):
    monkeypatch.setattr(module, "MIN_PAGES", 8)


def all_pages(run, first_unknown_step):
    """Every page of a run may move."""
    return range(run.first_page, run.first_page + run.num_pages)


def wishes(loads, runs, source=0):
    """What a node of two wishes whose only request has these runs."""
    pages_on = dict.fromkeys((run.instance for run in runs), 1)
    request = SimpleNamespace(
        move=None, moe_binding=1, pages_on=pages_on, runs=runs, movable_pages=all_pages
    )
    own = sorted((-run.num_pages, 7, run) for run in runs if run.instance == source)
    state = SimpleNamespace(
        linked=SimpleNamespace(runs={source: own, 1 - source: []}),
        requests={7: request},
        first_unknown_step=0,
    )
    return [(pages, to) for _, pages, to in relevel(state, dict(zip(NODE, loads, strict=True)))]


def runs_of(num, pages_each=40):
    """Runs of a request on instances 0 and 1 in turns."""
    return [TargetRun(i * pages_each, pages_each, i % 2, 0) for i in range(num)]


@pytest.mark.parametrize(
    ("mean", "gap", "is_worth_it"),
    [
        (10_000, 16 * PAGE_SIZE, True),
        (10_000, 16 * PAGE_SIZE - 1, False),  # fewer than MIN_PAGES pages
        (640_000, 640_000 // module.LEAST_SHARE, True),
        (640_000, 640_000 // module.LEAST_SHARE - 2, False),
    ],
)
def test_a_gap_is_worth_a_move_as_a_share_of_the_load(mean, gap, is_worth_it):
    loads = [mean + gap // 2 + gap % 2, mean - gap // 2]
    assert bool(wishes(loads, [TargetRun(0, 400, 0, 0)])) == is_worth_it


def test_half_of_the_gap_moves_from_the_end_of_the_longest_run():
    loads = [100_000, 100_000 - 40 * PAGE_SIZE]
    assert wishes(loads, [TargetRun(0, 50, 0, 0), TargetRun(50, 10, 1, 0)]) == [(range(30, 50), 1)]


def test_a_request_of_many_runs_is_not_cut_any_more():
    loads = [100_000, 100_000 - 40 * PAGE_SIZE]
    assert wishes(loads, runs_of(2 * MAX_RUNS - 1)) == [(range(20, 40), 1)]
    assert wishes(loads, runs_of(2 * MAX_RUNS)) == []
    # Runs of 20 pages may move as a whole: that makes no more of them.
    assert wishes(loads, runs_of(2 * MAX_RUNS, pages_each=20)) == [(range(20), 1)]
