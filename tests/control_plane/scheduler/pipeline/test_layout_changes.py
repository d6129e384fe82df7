"""A change of layout as a story: a wish that lasts, full pages ahead, the mark, reports."""

import pytest

from control_plane.scheduler.pipeline.layout_changes import LayoutChanges
from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineScheduler
from control_plane.scheduler.pipeline.predictor import PassTimes
from nanocp.config.cluster import ClusterConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.passes import LayerMove, LayerMoves, LayoutWanted
from nanocp.values.plan import Regrouped

LEVEL = PassTimes(1.0, 0.0)
LONG_TAIL = PassTimes(1.0, 2.0)
"""With four layers on two stages, three and one are best."""


def changes(window: int = 3, **fields) -> LayoutChanges:
    return LayoutChanges(
        PipelineConfig(
            num_stages=2, num_layers=4, layer_policy="delta", layout_window=window, **fields
        )
    )


def moves(layouts: LayoutChanges, full: int, live: int, num_rows: int = 1) -> LayerMoves | None:
    return layouts.next_moves(num_rows, lambda: (full, live))


def test_a_change_as_a_story():
    layouts = changes()
    for number in range(3):
        assert moves(layouts, 0b111, 0b1111) is None
        layouts.consider(LONG_TAIL, number, 4)
    ahead = moves(layouts, 0b111, 0b1111)
    assert ahead == LayerMoves(1, None, (LayerMove(2, 1, 0, 2, ((0, 3),)),))
    assert (layouts.layout, layouts.places.split) == (0, (2, 2)), "passes still run as before"
    layouts.reported(1)
    assert moves(layouts, 0b1111, 0b11111) is None, "stage 1 has not sent its pages"
    layouts.reported(1)
    mark = moves(layouts, 0b1111, 0b11111)
    assert mark == LayerMoves(2, (3, 1), (LayerMove(2, 1, 0, 2, ((3, 2),)),))
    assert (layouts.layout, layouts.places.split) == (2, (3, 1))
    layouts.reported(2)
    assert layouts.is_moving
    layouts.reported(2)
    assert not layouts.is_moving and layouts.num_changes == 1


def test_another_wish_in_between_begins_the_window_again():
    layouts = changes(window=3)
    for number, times in enumerate([LONG_TAIL, LONG_TAIL, LEVEL, LONG_TAIL, LONG_TAIL]):
        layouts.consider(times, number, 0)
        assert moves(layouts, 0, 0) is None
    layouts.consider(LONG_TAIL, 5, 0)
    assert moves(layouts, 0, 0) is not None


def test_a_steady_mix_changes_nothing():
    layouts = changes(window=1)
    for number in range(100):
        layouts.consider(LEVEL, number, 0)
        assert moves(layouts, 0b1, 0b1) is None
    assert layouts.num_changes == 0


def test_a_change_is_not_recalled_and_the_next_one_waits_for_every_report():
    layouts = changes(window=1, copy_ahead=False)
    layouts.consider(LONG_TAIL, 0, 0)
    layouts.consider(LEVEL, 1, 0)
    mark = moves(layouts, 0b1, 0b1)
    assert mark is not None and mark.split == (3, 1)
    for number in range(2, 9):
        layouts.consider(LEVEL, number, 0)
        assert moves(layouts, 0b1, 0b1) is None, "stages have not reported the last one"
    layouts.reported(1)
    layouts.reported(1)
    layouts.consider(LEVEL, 9, 0)
    # With nothing to sample any layout in which two and two are the longest is as good.
    back = moves(layouts, 0b1, 0b1)
    assert back is not None and back.split == (2, 2)


def test_pages_that_fill_faster_than_they_travel_do_not_keep_the_mark_away_for_ever():
    layouts = changes(window=1)
    layouts.consider(LONG_TAIL, 0, 0)
    sent = []
    full = 0
    for _ in range(9):
        full = full << 8 | 0xFF
        item = moves(layouts, full, full)
        if item is None:
            break
        sent.append(item.split)
        for _ in range(2):
            layouts.reported(item.number)
    assert sent == [None] * 4 + [(3, 1)]


def test_few_full_pages_go_with_the_mark_once_the_layer_is_there():
    layouts = changes(window=1)
    layouts.consider(LONG_TAIL, 0, 0)
    splits = []
    for times in (LONG_TAIL, LEVEL, LONG_TAIL):
        while (item := moves(layouts, 0b111, 0b1111, num_rows=3)) is not None:
            splits.append(item.split)
            for _ in range(2):
                layouts.reported(item.number)
        layouts.consider(times, 0, 0)
    assert splits == [None, (3, 1), (2, 2)], "stage 1 has kept what it gave away"


@pytest.mark.parametrize(("num_filled", "split"), [(19, (3, 1)), (20, None)])
def test_the_mark_waits_for_no_pages_that_take_less_time_than_a_pass_loses(num_filled, split):
    """With three layers and one a pass takes 3 ms where it takes 4; a frame takes 50 us."""
    layouts = changes(window=1)
    layouts.consider(PassTimes(1000.0, 2000.0), 0, 0)
    ahead = moves(layouts, 0b1, 0b1)
    assert ahead is not None and ahead.split is None, "weights are read first"
    for _ in range(2):
        layouts.reported(ahead.number)
    layouts.consider(PassTimes(1000.0, 2000.0), 1, 0)
    full = (1 << 1 + num_filled) - 1
    following = moves(layouts, full, full)
    assert following is not None and following.split == split


def test_an_operators_layout_stands_though_the_policy_wants_another():
    layouts = changes(window=1, copy_ahead=False)
    assert layouts.obstacle((1, 3)) == ""
    layouts.ask((1, 3))
    mark = moves(layouts, 0, 0)
    assert mark is not None and mark.split == (1, 3), "at once, without a window"
    assert layouts.obstacle((2, 2)) == "layers are moving already; ask again later"
    layouts.reported(1)
    layouts.reported(1)
    for number in range(5):
        layouts.consider(LONG_TAIL, number, 0)
        assert moves(layouts, 0, 0) is None
    assert layouts.places.split == (1, 3)


def test_what_an_operator_cannot_have_is_said():
    layouts = changes(max_layers=2)
    for split in ((2, 2, 0), (3, 2), (4, 0)):
        assert (
            "it must be 2 numbers of layers, each at least 1, which sum to 4"
            in layouts.obstacle(split)
        )
    assert "has room for 2 layers (max_layers)" in layouts.obstacle((3, 1))


def test_a_layout_that_takes_one_in_between_is_forgotten_with_the_term():
    pipeline = PipelineConfig(num_stages=3, num_layers=12, max_layers=5)
    layouts = LayoutChanges(pipeline)
    for split in ((5, 4, 3), (5, 5, 2)):
        assert not layouts.obstacle(split)
        layouts.ask(split)
        while layouts.places.split != split:
            mark = moves(layouts, 0, 0)
            assert mark is not None
            for _ in range(3):
                layouts.reported(mark.number)
    layouts.begin_term()
    assert layouts.asked is None and moves(layouts, 0, 0) is None
    layouts.ask((5, 4, 3))
    layouts.begin_term()
    assert layouts.asked == (5, 4, 3), "it comes back by itself"


def test_a_layout_that_was_asked_for_before_a_term_began_is_checked_again():
    cluster = ClusterConfig(num_instances=1, num_frames=8, max_model_len=512)
    pipeline = PipelineConfig(num_stages=3, num_layers=12, max_layers=5)
    scheduler = PipelineScheduler(cluster, SchedulerConfig(), pipeline)
    plan = scheduler.plan_pass([Regrouped(2, (0, 1, 2)), LayoutWanted((5, 5, 2))], 0)
    assert plan.layer_moves is None and scheduler.layouts.asked is None
