"""Layer policies: the paper's rule to the letter, the exact levelling, and a seeded chaos."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.pipeline.layer_policies import (
    DeltaLayout,
    LevelLayout,
    has_room,
    longest_us,
    make_layer_policy,
    num_moved,
    stages_of,
)
from control_plane.scheduler.pipeline.predictor import (
    PassTimes,
    StageSpeeds,
    predict_pass,
    stage_times,
)
from nanocp.config.passes import PassCosts
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import Span


def config(num_stages: int, num_layers: int, **fields) -> PipelineConfig:
    return PipelineConfig(num_stages=num_stages, num_layers=num_layers, **fields)


def wish(policy, split, layer_us: float, sample_us: float, num_frames: int = 0):
    return policy.wish(tuple(split), PassTimes(layer_us, sample_us), 0, num_frames)


@pytest.mark.parametrize(("split", "moved"), [
    ((16, 16, 17, 15), 1),
    ((16, 17, 17, 14), 3),
    ((17, 17, 17, 13), 6),
    ((17, 17, 18, 12), 7),
    ((18, 18, 18, 10), 12),
])  # fmt: skip
def test_the_layers_that_the_paper_moves_shift_down_the_chain(split, moved):
    policy = DeltaLayout(config(4, 64))
    assert policy._without(16 - split[-1]) == split
    assert num_moved((16, 16, 16, 16), split) == moved


@pytest.mark.parametrize(("r", "k"), [(0, 0), (0.9, 0), (1.1, 1), (3.09, 2), (3.6, 3), (8, 6)])
def test_delta_wants_the_k_of_least_misalignment(r, k):
    """Delta is |r - k - k / min(k, 3)| in layers: at the paper's mean of 3.09 it wants k = 2."""
    assert wish(DeltaLayout(config(4, 64)), (16,) * 4, 1.0, r)[-1] == 16 - k


def test_delta_punishes_a_short_last_stage_where_level_does_not():
    split, times = (16, 16, 16, 16), PassTimes(1.0, 3.09)
    by_rule = DeltaLayout(config(4, 64)).wish(split, times, 0, 0)
    levelled = LevelLayout(config(4, 64, layout_window=1)).wish(split, times, 0, 0)
    assert longest_us(by_rule, times) == pytest.approx(17.09)
    assert longest_us(levelled, times) == pytest.approx(17.0)


def by_layers(old, new, num_places):
    """Slow reference of `has_room`: each stage's layers, before and after, one by one."""
    held = zip(stages_of(old), stages_of(new), strict=True)
    needed = [{each} | {new_stage} for each, new_stage in held]
    return all(sum(s in both for both in needed) <= num_places for s in range(len(old)))


@pytest.mark.parametrize("num_places", [3, 4, 5])
def test_room_is_counted_while_a_stage_has_what_it_gives_and_what_it_gets(num_places):
    splits = all_splits(7, 3, num_places)
    for old, new in product(splits, repeat=2):
        assert has_room(old, new, num_places) == by_layers(old, new, num_places), (old, new)


@pytest.mark.parametrize("policy", ["level", "delta"])
def test_where_room_is_short_the_best_layout_is_reached_by_legal_steps(policy):
    """Layers of three stages shift down the chain: the one in the middle has both ends' at once."""
    pipeline = config(3, 12, max_layers=6, layer_policy=policy, layout_window=1)
    heard, split, steps = make_layer_policy(pipeline), (4, 4, 4), []
    for _ in range(10):
        wished = wish(heard, split, 1.0, 5.1)
        assert has_room(split, wished, 6), (split, wished)
        if wished != split:
            steps.append(wished)
        split = wished
    assert steps == [(5, 5, 2), (5, 6, 1)]


def all_splits(num_layers, num_stages, num_places):
    counts = range(1, num_places + 1)
    return [s for s in product(counts, repeat=num_stages) if sum(s) == num_layers]


@given(st.data())
def test_level_is_the_best_of_all_layouts_and_moves_the_fewest_layers(data):
    num_stages = data.draw(st.integers(1, 4))
    num_layers = data.draw(st.integers(num_stages, 9))
    fewest = -(-num_layers // num_stages)
    num_places = data.draw(st.integers(fewest, num_layers))
    splits = all_splits(num_layers, num_stages, num_places)
    split = data.draw(st.sampled_from(splits))
    layer_us = data.draw(st.sampled_from([0.1, 1.0, 7.3]))
    dense_us, num_dense = data.draw(st.sampled_from([0.23, 5.1])), data.draw(st.integers(0, 3))
    stage_us = data.draw(st.sampled_from([0.0, 1.4]))
    times = PassTimes(layer_us, data.draw(st.floats(0, 60)), dense_us, num_dense, stage_us)
    speeds = StageSpeeds(num_stages)
    speeds.slowness = slow = tuple(
        data.draw(st.sampled_from([1.0, 1.0, 1.3, 2.0, 4.1])) for _ in range(num_stages)
    )
    pipeline = config(num_stages, num_layers, max_layers=num_places, layout_window=1)
    wished = LevelLayout(pipeline, speeds).wish(split, times, 0, 0)
    reachable = [each for each in splits if has_room(split, each, num_places)]
    least = min(longest_us(each, times, slow) for each in reachable)
    assert longest_us(wished, times, slow) == pytest.approx(least)
    if longest_us(split, times, slow) <= least * (1 + 1e-6):
        assert wished == split
    elif num_places == num_layers:
        best = (s for s in splits if longest_us(s, times, slow) <= least * (1 + 1e-9))
        assert num_moved(split, wished) == min(num_moved(split, each) for each in best)


@given(st.data())
def test_what_was_best_before_changes_nothing(data):
    """A policy that knows the best layout of another pass finds what one without any finds."""
    num_stages = data.draw(st.integers(1, 4))
    num_layers = data.draw(st.integers(num_stages, 9))
    num_places = data.draw(st.integers(-(-num_layers // num_stages), num_layers))
    pipeline = config(num_stages, num_layers, max_layers=num_places, layout_window=1)
    splits = st.sampled_from(all_splits(num_layers, num_stages, num_places))
    speeds = StageSpeeds(num_stages)
    used, num_dense = LevelLayout(pipeline, speeds), data.draw(st.integers(0, 3))
    for _ in range(3):
        times = PassTimes(
            data.draw(st.sampled_from([0.1, 1.0, 7.3])),
            data.draw(st.floats(0, 60)),
            data.draw(st.sampled_from([0.23, 5.1])),
            num_dense,
        )
        speeds.slowness = tuple(
            data.draw(st.sampled_from([1.0, 1.0, 1.3, 2.0, 4.1])) for _ in range(num_stages)
        )
        split = data.draw(splits)
        fresh = LevelLayout(pipeline, speeds)
        wished = [policy._best(split, times) for policy in (used, fresh)]
        assert wished[0] == wished[1]


def test_a_dense_layer_counts_by_its_own_time():
    times = PassTimes(5.0, 0.0, dense_us=2.0, dense_layers=3)
    assert stage_times((2, 2, 4), times) == [4.0, 7.0, 20.0]
    policy = LevelLayout(config(3, 8, layout_window=1))
    assert policy.wish((2, 2, 4), times, 0, 0) == (4, 2, 2)  # 11, 10 and 10


def test_what_a_stage_takes_besides_its_layers_is_slow_too():
    """With 8,4 the last stage, of half the speed, takes it twice."""
    speeds = StageSpeeds(2)
    speeds.slowness = (1.0, 2.0)
    layers_alone = PassTimes(4.0, 2.0)
    in_all = layers_alone._replace(stage_us=1.5)
    assert stage_times((8, 4), in_all, speeds.slowness) == [33.5, 39.0]
    assert stage_times((9, 3), in_all, speeds.slowness) == [37.5, 31.0]
    for times, wanted in ((layers_alone, (8, 4)), (in_all, (9, 3))):
        policy = LevelLayout(config(2, 12, layout_window=1), speeds)
        assert policy.wish((6, 6), times, 0, 0) == wanted


def test_a_slow_stage_may_begin_on_a_dense_layer():
    """Each stage has a layer: the first one, with both dense layers, would leave none but slow."""
    times = PassTimes(7.3, 0.0, dense_us=0.23, dense_layers=2)
    speeds = StageSpeeds(3)
    speeds.slowness = (1.0, 4.1, 1.0)
    policy = LevelLayout(config(3, 4, layout_window=1), speeds)
    assert policy.wish((2, 1, 1), times, 0, 0) == (1, 1, 2)


def ran(speeds, number, *us):
    for stage, each in enumerate(us):
        speeds.ran(stage, number, each)


def test_a_stage_that_takes_twice_as_long_is_known_after_some_passes_and_gets_fewer_layers():
    speeds = StageSpeeds(3)
    for number in range(60):
        if number == 10:
            assert speeds.slowness == (1.0, 1.0, 1.0), "too few passes"
        speeds.planned(number, [4.0, 4.0, 5.0])
        ran(speeds, number, 40.0, 80.0, 55.0)  # constants that are ten times too small
    assert speeds.slowness == (1.0, 2.0, 1.0)
    policy = LevelLayout(config(3, 12, layout_window=1), speeds)
    assert wish(policy, (4, 4, 4), 1.0, 0.0) == (5, 2, 5)
    for number in range(60, 260):
        speeds.planned(number, [4.0, 4.0, 5.0])
        ran(speeds, number, 40.0, 40.0, 55.0)
    assert speeds.slowness == (1.0, 1.0, 1.0), "it is as fast as the others again"


def test_a_stage_of_which_nothing_is_predicted_is_not_judged():
    """The last stage has one layer, which ends with its KV where nothing is sampled."""
    speeds = StageSpeeds(3)
    for number in range(60):
        speeds.planned(number, [4.0, 4.0, 0.0])
        ran(speeds, number, 40.0, 40.0, 1.0)
    assert speeds.slowness == (1.0, 1.0, 1.0)
    for number in range(60, 120):
        speeds.planned(number, [4.0, 4.0, 4.0 if number % 2 else 0.0])
        ran(speeds, number, 40.0, 40.0, 40.0)
    assert speeds.slowness == (1.0, 1.0, 1.0), "time of passes without a prediction is not counted"


def test_speeds_forget_passes_that_are_never_reported_and_begin_anew_with_a_term():
    speeds = StageSpeeds(2)
    for number in range(100):
        speeds.planned(number, [4.0, 4.0])
    assert len(speeds._predicted) == 8
    ran(speeds, 3, 1.0, 1.0)
    assert speeds._num_ran == 0
    speeds.begin_term()
    assert not speeds._predicted


def test_level_moves_a_layer_once_what_that_would_have_saved_pays_for_its_kv():
    policy = LevelLayout(config(2, 8, frame_move_us=10, layout_window=1))
    # (4, 4) takes 4 + 3, and (5, 3) takes 6: one layer saves 1 us in each pass, and costs 50.
    wished = [wish(policy, (4, 4), 1.0, 3.0, num_frames=5) for _ in range(51)]
    assert wished == [(4, 4)] * 50 + [(5, 3)]
    # Few long passes weigh as much as many short ones.
    assert wish(policy, (5, 3), 20.0, 0.0, num_frames=5) == (5, 3), "beside a short one in flight"
    assert wish(policy, (5, 3), 80.0, 0.0, num_frames=5) == (4, 4)


def test_level_does_not_follow_passes_that_take_turns_for_less_than_a_move_costs():
    policy = LevelLayout(config(2, 8, frame_move_us=10, layout_window=1))
    for _ in range(40):
        for sample_us in (3.0,) * 6 + (0.0,) * 20:
            assert wish(policy, (4, 4), 1.0, sample_us, num_frames=1) == (4, 4)


@pytest.mark.parametrize("seed", range(50))
def test_chaos_draws_layouts_that_fit_and_replay(seed):
    pipeline = config(3, 9, max_layers=5, layer_policy="chaos_layers", chaos_seed=seed)
    drawn = [
        [
            make_layer_policy(pipeline).wish((3, 3, 3), PassTimes(1, 1), number, 0)
            for number in range(40)
        ]
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 3
    assert all(sum(split) == 9 and 1 <= min(split) <= max(split) <= 5 for split in drawn[0])


def test_even_and_static_want_one_layout_for_ever():
    assert wish(make_layer_policy(config(3, 8)), (3, 3, 2), 1.0, 90.0) == (3, 3, 2)
    static = config(3, 8, layer_policy="static:5,2,1")
    assert static.first_split == (5, 2, 1)
    assert wish(make_layer_policy(static), (5, 2, 1), 1.0, 90.0) == (5, 2, 1)


@pytest.mark.parametrize("policy", ["static:5,2", "static:5,3,0", "static:a,b,c", "static:"])
def test_a_static_layout_that_does_not_fit_is_refused(policy):
    with pytest.raises(ValueError, match=r"static needs 3 numbers of layers.*sum to 8"):
        config(3, 8, layer_policy=policy)


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(ValueError, match=r"layer_policy is 'levl'.*nearest: level"):
        make_layer_policy(config(3, 8, layer_policy="levl"))


def test_a_stage_must_have_room_for_its_layers():
    with pytest.raises(ValueError, match="max_layers is 2; it must be 0, or from 3"):
        config(3, 8, max_layers=2)


def test_a_pass_is_predicted_in_the_form_of_the_paper():
    costs = PassCosts(2.0, 0.5, 10.0, 7.0, 100.0)
    spans = [Span(1, 9, 1, True), Span(2, 20, 30, False)]
    layer_us = (10 + 2 + 0.5 * 10) + (10 + 30 * (2 + 0.5 * 50))
    assert predict_pass(spans, costs) == PassTimes(layer_us, 107.0)
    assert predict_pass(spans[1:], costs).sample_us == 0
    assert stages_of((2, 1)) == [0, 0, 1]
