"""What a stage refuses: passes for another table or layout, layers out of order, absent KV."""

import numpy as np
import pytest

from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineScheduler
from data_plane.instance.stage_edge import StageEdge
from data_plane.transport.stage_links import HiddenRows
from harness.hash_clusters.hash_model import HashModel
from harness.hash_clusters.pipeline.hash_stage import HashStageModel, hash_stage
from harness.transports.local_pages import local_peer_rings
from harness.transports.local_stage_links import LocalStageLinks
from nanocp.config.cluster import ClusterConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.passes import LayerMove, LayerMoves, LayersMoved, PassPlan, Span
from nanocp.values.plan import Arrival
from nanocp.values.sampling import PromptLogprobs, RowInput, SamplingParams
from nanocp.wire.rows import encode_row_input

PIPELINE = PipelineConfig(num_stages=2, num_layers=4)
ROW = encode_row_input(RowInput(7, SamplingParams(max_tokens=9), "front-end:1"))


@pytest.fixture
def stages() -> list[StageEdge[HashStageModel]]:
    links, movers = LocalStageLinks.create_all(2), local_peer_rings(2)
    model = HashModel(4)
    return [hash_stage(i, PIPELINE, 8, model, links[i], movers[i]) for i in range(2)]


@pytest.fixture
def first_pass(stages) -> PassPlan:
    cluster = ClusterConfig(num_instances=1, num_frames=8, max_model_len=512)
    scheduler = PipelineScheduler(cluster, SchedulerConfig(), PIPELINE)
    plan = scheduler.plan_pass([Arrival(1, 70, 9, ROW)], 0).pass_plan
    assert plan is not None and plan.spans == (Span(1, 0, 64, False),)
    stages[0].requests.take_prompt(1, [7] * 70)
    return plan


def again(plan: PassPlan, **changes) -> PassPlan:
    """Repeat the pass without changes of the table."""
    table = plan.table._replace(
        base_digest=plan.table.result_digest, changes=type(plan.table.changes)()
    )
    return plan._replace(table=table, **changes)


def run(stage, item) -> None:
    for what in stage.run(item):
        raise AssertionError(what)


def test_a_stage_that_has_nothing_to_run_says_what_it_waits_for(stages, first_pass):
    assert next(stages[1].run(first_pass)) == "stage 1 waits for hidden rows of pass 0"
    assert stages[1].waits_for == "fill"
    run(stages[0], first_pass)
    assert next(stages[0].run(again(first_pass, after=0))) == "stage 0 waits for tokens of pass 0"
    assert stages[0].waits_for == "tail"


def test_a_stage_waits_for_kv_of_a_layer_that_it_got(stages, first_pass):
    """The layer comes with the mark, and its KV after it."""
    mark = LayerMoves(1, (1, 3), (LayerMove(1, 0, 1, 2, ((5, 1),)),))
    run(stages[1], mark)
    stages[0]._links.send_hidden(HiddenRows(0, 1, 1, [[1] * 64]))
    assert next(stages[1].run(first_pass._replace(layout=1))) == "stage 1 waits for KV of layer 1"
    assert stages[1].waits_for == "kv"


def test_a_pass_for_another_page_table_is_refused(stages, first_pass):
    run(stages[0], first_pass)
    with pytest.raises(RuntimeError, match="planned for another page table"):
        run(stages[0], first_pass)


def test_a_pass_of_another_layout_is_refused(stages, first_pass):
    with pytest.raises(RuntimeError, match="pass 0 is for layout 1, not 0"):
        run(stages[0], first_pass._replace(layout=1))


@pytest.mark.parametrize("change", [{"number": 5}, {"layout": 1}, {"next_layer": 3}])
def test_hidden_rows_of_another_pass_layout_or_layer_are_refused(stages, first_pass, change):
    rows = HiddenRows(0, 0, 2, [[1] * 64])
    stages[0]._links.send_hidden(rows._replace(**change))
    with pytest.raises(RuntimeError, match=r"got \(pass, layout, next layer\)"):
        run(stages[1], first_pass)


def test_tokens_that_a_layer_already_has_are_not_run_again(stages, first_pass):
    run(stages[0], first_pass)
    with pytest.raises(RuntimeError, match="request 1 goes on at position 0"):
        run(stages[0], again(first_pass))


def test_a_token_after_a_gap_is_not_run(stages, first_pass):
    run(stages[0], first_pass)
    with pytest.raises(
        RuntimeError, match=r"position 66, and its frames are filled with \[64, 0\]"
    ):
        run(stages[0], again(first_pass, spans=(Span(1, 66, 2, False),)))


def test_what_an_attempt_asked_for_ends_with_it(stages, first_pass):
    """The next attempt of a request, which goes on in the same pass, may ask for nothing."""
    last, prompt = stages[1], [7] * 70
    last.requests.ask_logprobs(1, prompt, first := PromptLogprobs(2, list))
    next(last.run(first_pass))
    assert last.requests.asked == {1: (prompt, first)}
    table = first_pass.table._replace(ends=(1,))
    for asks in (True, False):
        last.leave()
        last.enter(last._links, last._mover)
        last.requests.ask_logprobs(1, prompt, first)
        next(last.run(first_pass))
        if asks:
            last.requests.ask_logprobs(1, prompt, other := PromptLogprobs(5, list))
            assert last.requests.asked == {1: (prompt, first)}, "the earlier attempt still runs"
        next(last.run(again(first_pass._replace(table=table), number=1)))
        assert last.requests.asked == ({1: (prompt, other)} if asks else {})


AHEAD = LayerMoves(1, None, (LayerMove(1, 0, 1, 2, ((0, 1),)),))


def test_kv_that_comes_before_its_moves_are_known_stays_in_the_ring(stages):
    stages[0]._mover.send(1, ticket=1, page=1 * 8, num_tokens=64, payload=np.ones(64, np.uint64))
    stages[1].progress()
    run(stages[1], AHEAD)
    assert stages[1].layers.filled[2, 0] == 64
    assert stages[1].poll().events == (LayersMoved(1, 1),)


def test_kv_of_a_frame_that_holds_another_page_meanwhile_is_dropped(stages, first_pass):
    """The frame was given to request 1 while the KV that another request had in it traveled."""
    run(stages[1], AHEAD)
    assert stages[1].poll().events == (), "the KV has not come"
    next(stages[1].run(first_pass))
    stages[0]._mover.send(1, ticket=1, page=1 * 8, num_tokens=64, payload=np.ones(64, np.uint64))
    stages[1].progress()
    assert stages[1].layers.filled[2, 0] == 0
    assert stages[1].poll().events == (LayersMoved(1, 1),)


def test_a_stage_that_waits_takes_kv_meanwhile(stages, first_pass):
    """Else two stages could wait for each other, each before a full ring."""
    run(stages[1], AHEAD)
    waiting = stages[1].run(first_pass)
    next(waiting)
    stages[0]._mover.send(1, ticket=1, page=1 * 8, num_tokens=64, payload=np.ones(64, np.uint64))
    assert next(waiting) == "stage 1 waits for hidden rows of pass 0"
    assert stages[1].poll().events == (LayersMoved(1, 1),)


def test_a_stage_that_computes_sends_and_takes_kv_between_layers(stages, first_pass, monkeypatch):
    """It has no cause to wait. Else a ring's worth would go each pass, however long a pass is."""
    moves = LayerMoves(
        1, None, (LayerMove(1, 0, 1, 2, ((2, 6),)), LayerMove(2, 1, 0, 2, ((2, 6),)))
    )
    for stage in stages:
        run(stage, moves)
    run_layer, left = HashStageModel.run_layer, []

    def meanwhile(self, *arguments):
        layers = stages[0].layers
        left.append((len(layers.to_send), len(layers.coming)))
        if self is stages[0].model:
            stages[1].progress()
        return run_layer(self, *arguments)

    monkeypatch.setattr(HashStageModel, "run_layer", meanwhile)
    run(stages[0], first_pass)
    assert left == [(4, 6), (2, 4)]


def test_a_place_of_an_own_layer_is_not_given_away(stages):
    with pytest.raises(RuntimeError, match="layer 1 would take the place of layer 2"):
        run(stages[1], LayerMoves(1, None, (LayerMove(1, 0, 1, 0, ()),)))


def test_a_layer_without_a_place_is_not_run(stages):
    with pytest.raises(RuntimeError, match=r"stage 1 has no place for layers \[1\]"):
        run(stages[1], LayerMoves(1, (1, 3), ()))


def test_moves_out_of_order_are_refused(stages):
    with pytest.raises(RuntimeError, match="layer moves 2 came after 0"):
        run(stages[0], AHEAD._replace(number=2))
