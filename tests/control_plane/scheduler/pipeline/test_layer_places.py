"""Which frames travel when layers change their stage: no page too few, and none twice."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.pipeline.layer_places import LayerPlaces, frames_in, runs_of
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import LayerMove


def places(num_layers: int = 4, max_layers: int = 0) -> LayerPlaces:
    return LayerPlaces(PipelineConfig(num_stages=2, num_layers=num_layers, max_layers=max_layers))


@given(st.integers(0, 1 << 70))
def test_runs_are_the_set_and_never_touch(frames):
    runs = runs_of(frames)
    assert frames_in(runs) == frames
    assert all(a + n < b for (a, n), (b, _) in pairwise(runs))


def test_the_mark_sends_only_what_did_not_go_ahead():
    layers = places()
    assert layers.copy((3, 1), full=0b0111) == (LayerMove(2, 1, 0, 2, ((0, 3),)),)
    assert layers.num_missing((3, 1), full=0b1111) == 1
    assert layers.change((3, 1), full=0b1111, live=0b11111) == (LayerMove(2, 1, 0, 2, ((3, 2),)),)


def test_a_frame_that_was_written_again_is_sent_again():
    layers = places()
    layers.copy((3, 1), full=0b0111)
    layers.write(1, 1)
    assert layers.change((3, 1), full=0b0101, live=0b0111)[0].frames == ((1, 1),)


def test_of_a_layer_that_returns_only_new_pages_travel():
    layers = places()
    layers.change((3, 1), full=0b011, live=0b111)
    assert layers.change((2, 2), full=0b1111, live=0b1111) == (LayerMove(2, 0, 1, 0, ((2, 2),)),)
    assert layers.change((3, 1), full=0b1111, live=0b1111)[0].frames == ()


def test_a_layer_takes_the_place_of_the_worst_copy_and_never_of_an_own_layer():
    layers = places(num_layers=6, max_layers=4)
    layers.change((4, 2), full=0b11, live=0b11)  # layer 3 leaves a copy of two frames at stage 1
    layers.change((2, 4), full=0b1, live=0b11)  # stage 1 gets 2 and 3, stage 0 keeps copies
    assert layers.places[1].keys() == {2, 3, 4, 5} and layers.good.keys() == {(0, 2), (0, 3)}
    layers.write(0, 1)
    layers.change((4, 2), full=0b111, live=0b111)
    assert layers.places[0] == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_stage_needs_room_for_what_it_has_and_what_it_gets():
    layers = places(num_layers=6, max_layers=4)
    assert layers.is_legal((4, 2)) and layers.is_legal((2, 4))
    assert not layers.is_legal((5, 1))
    three = LayerPlaces(PipelineConfig(num_stages=3, num_layers=9, max_layers=4))
    assert three.is_legal((4, 3, 2))
    assert not three.is_legal((1, 4, 4)), (
        "stage 1 has three layers, of which two stay, and gets two"
    )
