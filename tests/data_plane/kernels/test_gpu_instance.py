"""An instance with a GPU's step behind its interface: real plans, samplers and prefill's pages."""

import re
import threading
import uuid
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from data_plane.graph.buckets import BucketTable
from data_plane.graph.cuda_graphs import CudaGraphs, eager
from data_plane.instance import decode
from data_plane.instance.decode import DecodeInstance
from data_plane.moe.fused.mixture import FusedMixtures
from data_plane.startup import gpu
from data_plane.startup.experimental import nixl_ep
from data_plane.startup.gpu_parts import gpu_parts as build_parts
from data_plane.step.gpu import GpuStep
from data_plane.transport.exchange import TermOver
from data_plane.transport.segments import Segments
from harness.exact import decode_cluster
from harness.exact.decode_cluster import DecodeCluster, Prompt
from harness.gpu.gpu_cluster import run_in_turn
from harness.gpu.gpu_drafts import MAX_ROWS, NUM_DRAFTS, assert_drafts_as, played
from harness.gpu_stand_ins import nixl_ep_stand_in
from harness.gpu_stand_ins.cuda_stand_in import Cuda
from harness.gpu_stand_ins.whole_instances import launched, stand_in_for_a_gpu
from harness.transports.random_tables import table_of
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.values.experts import place_experts
from nanocp.values.plan import CARRY_PAGE
from nanocp.values.sampling import SamplingParams

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


def stand_in_for_nixl_ep(monkeypatch):
    """Let instances of this process take a stand-in for NIXL-EP, with rows in fp32."""
    by_stand_in = gpu.DISPATCHES["nixl_ep"]._replace(obstacle=lambda *site: "")
    monkeypatch.setitem(gpu.DISPATCHES, "nixl_ep", by_stand_in)
    monkeypatch.setattr(nixl_ep, "import_module", lambda name: nixl_ep_stand_in)
    monkeypatch.setattr(nixl_ep_stand_in.Buffer, "dtype", torch.float32)


def counting(call, calls):
    """A function that notes each call."""

    def noting(*arguments):
        calls.append(arguments)
        return call(*arguments)

    return noting


@without_gpu
@pytest.mark.parametrize(("dispatch", "lanes", "is_eager"), [
    ("exchange", "random", False),
    pytest.param("exchange", "always", True, marks=pytest.mark.system),
    pytest.param("auto", "off", True, marks=pytest.mark.system),
    pytest.param("fused", "off", True, marks=pytest.mark.system),
    pytest.param("nixl_ep", "off", True, marks=pytest.mark.system),
])  # fmt: skip
def test_greedy_and_sampled_tokens_and_their_logprobs(
    mini, monkeypatch, tmp_path, dispatch, lanes, is_eager
):
    """One instance runs on a CPU that it takes for a GPU; its graphs run steps anew.

    They outlive its term. What several do together is tested with tests/harness/gpu/gpu_cluster.py.
    """
    stand_in_for_a_gpu(monkeypatch, tmp_path)
    stand_in_for_nixl_ep(monkeypatch)
    made = []

    def gpu_parts(*arguments, **keys):
        made.append(build_parts(*arguments, **keys))
        return made[-1]

    monkeypatch.setattr(gpu, "gpu_parts", gpu_parts)
    cuda = Cuda()
    if not is_eager:
        cuda.install(monkeypatch)
        monkeypatch.setattr(CudaGraphs, "warm", lambda self, step: None)  # nothing is to be loaded
        monkeypatch.setattr(CudaGraphs, "_run", launched(cuda, CudaGraphs._run))
    path, oracle = mini
    most = 4 if dispatch == "nixl_ep" else 2
    bounds = BoundsConfig(max_rows=most, max_links=1, max_attention_rows=most, max_partials=1)
    config = Config(
        cluster=ClusterConfig(num_instances=1, num_frames=8, max_model_len=256, bounds=bounds),
        # With this seed the first two windows, and the two rows, are in different lanes.
        scheduler=SchedulerConfig(
            steps_per_window=2,
            lanes=lanes,
            chaos_seed=8,
            lane_table=((1, 0, 90, "behind_first"), (2, 0, 90, "dual_batch_overlap")),
        ),
        data_plane=DataPlaneConfig(
            device="cuda", eager=is_eager, row_buckets=(most,), dispatch_backend=dispatch
        ),
    )
    greedy = Prompt(list(range(2, 65)), SamplingParams(max_tokens=3, temperature=0.0))
    drawn = Prompt(
        list(range(9, 13)),
        SamplingParams(max_tokens=2, temperature=1.0, logit_bias=((7, 1.0),), logprobs=2),
    )
    with DecodeCluster(config, path) as cluster:
        cluster.run([greedy, drawn])
        num_graphs = len(cuda.graphs)
        cluster.regroup()
        later = Prompt(list(range(5, 75)), SamplingParams(max_tokens=2, temperature=0.0))
        cluster.run([later])
        assert len(cuda.graphs) == num_graphs, "graphs outlive a term"
    assert [parts.frames for parts in made] == [made[0].frames] * (1 if lanes == "off" else 2)
    for apart in ("pool", "exchange"):
        assert len({id(getattr(parts, apart)) for parts in made}) == len(made), apart
    assert len({id(parts.exchange.memory) for parts in made}) == len(made), "a memory each"
    assert isinstance(made[0].step.mixture, FusedMixtures) == (dispatch == "fused")
    if not is_eager:
        ways = {plan.two_lanes for each in cluster.plans for plan in each.instances}
        assert ways == {0, 1, 2}, "windows of one lane and of two, in two orders"
        num_lanes = [len(call.args[1]) for graph in cuda.graphs for call in graph.calls]
        assert num_lanes == [1] * 2 + [2] * 4, "each bucket, in one lane and in two"
        assert sum("replays" in each for each in cuda.log) >= 3
    assert oracle.judge(greedy.ids, greedy.output).exact and len(greedy.output) == 3
    assert oracle.judge(later.ids, later.output).exact and len(later.output) == 2
    expected = oracle.logits(drawn.ids, drawn.output).double().log_softmax(dim=-1)
    for logprob_V, token_id, found in zip(expected, drawn.output, drawn.logprobs, strict=True):
        assert found.logprob == pytest.approx(float(logprob_V[token_id]), abs=1e-3)


@pytest.fixture
def drafting(models):
    """(a mini checkpoint with an MTP layer, its oracle)."""
    model = models("tiny, mini, with an MTP layer")
    return model.path, model.oracle


@without_gpu
@pytest.mark.parametrize(
    ("dispatch", "is_eager"),
    [("exchange", False), pytest.param("fused", True, marks=pytest.mark.system)],
)
def test_drafts_come_from_a_graph_of_their_own(drafting, monkeypatch, tmp_path, dispatch, is_eager):
    """Those of greedy rows without the host; with a sampled row beside them, by it."""
    path, oracle = drafting
    on_cpu = played(path)
    stand_in_for_a_gpu(monkeypatch, tmp_path)
    cuda, num_alone = Cuda(), []
    monkeypatch.setattr(decode, "draft_alone", counting(decode.draft_alone, num_alone))
    if not is_eager:
        cuda.install(monkeypatch)
        monkeypatch.setattr(CudaGraphs, "warm", lambda self, step: None)
        for name in ("run", "draft"):
            monkeypatch.setattr(GpuStep, name, launched(cuda, getattr(GpuStep, name)))
    num_checked = assert_drafts_as(on_cpu, path, oracle, eager=is_eager, dispatch_backend=dispatch)
    assert 0 < len(num_alone) < num_checked, "only while no row samples"
    if not is_eager:
        widths = range(1, 2 + NUM_DRAFTS)
        buckets = BucketTable(MAX_ROWS, MAX_ROWS, (MAX_ROWS,), widths, num_instances=1).all()
        num_drafting = sum(bucket.width > 1 for bucket in buckets)
        assert len(cuda.graphs) == len(buckets) + num_drafting


@without_gpu
def test_two_instances_draft_together(drafting, two_instances, monkeypatch):
    """One drafts alone while the other samples on its host, and both while none does."""
    (path, oracle), (config, _) = drafting, two_instances
    alone, by_host = [], []
    monkeypatch.setattr(decode, "draft_alone", counting(decode.draft_alone, alone))
    monkeypatch.setattr(decode, "draft", counting(decode.draft, by_host))
    config = replace(
        config,
        cluster=replace(
            config.cluster,
            bounds=BoundsConfig(max_rows=4, max_links=4, max_attention_rows=8, max_partials=8),
            num_frames=8,
        ),
        scheduler=replace(
            config.scheduler, num_drafts=1, drafting="always", policy="fixed_degree:2"
        ),
        data_plane=replace(config.data_plane, row_buckets=(4,)),
    )
    prompts = [greedy_prompt(2, 7), greedy_prompt(90, 4), greedy_prompt(40, 4)]
    prompts[2].params = replace(prompts[2].params, temperature=1.0, seed=1)
    with DecodeCluster(config, path) as cluster:
        cluster.run(prompts)
    places = [place for each in prompts for place in each.placements]
    assert any(len({holder for _, holder in place.holders}) == 2 for place in places)
    checked, accepted = (sum(each) for each in zip(*cluster.checked_drafts(), strict=True))
    assert 0 < accepted <= checked
    assert alone and by_host
    windows = [{arguments[0].plan.window for arguments in calls} for calls in (alone, by_host)]
    assert windows[0] & windows[1], "in the same window"
    for prompt in prompts[:2]:
        assert oracle.judge(prompt.ids, prompt.output).exact
    assert [len(prompt.output) for prompt in prompts] == [7, 4, 4]


def greedy_prompt(first, max_tokens=3):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Prompt(list(range(first, first + 70)), params)


@without_gpu
def test_two_instances_meet_in_one_term_after_the_other(mini, two_instances):
    """Waits poll in threads; in the second term all experts are at one seat, then anywhere."""
    (path, oracle), (config, library) = mini, two_instances
    prompts = [greedy_prompt(2), greedy_prompt(90), greedy_prompt(170)]
    with DecodeCluster(config, path) as cluster:
        cluster.run(prompts[:1])
        cluster.regroup(place_experts(8, 2, 4, [1]))
        cluster.run(prompts[1:2])
        cluster.regroup(table_of(cluster._model, config.cluster, seed=2))
        cluster.run(prompts[2:])
        names = library.names()
    assert names.count("cudaMalloc") == 8, "memory to be alone, and for each term"
    assert names.count("cudaFree") >= 4, "what nobody has mapped is free"
    for prompt in prompts:
        assert oracle.judge(prompt.ids, prompt.output).exact and len(prompt.output) == 3


@without_gpu
def test_mixtures_by_nixl_ep_meet_in_one_term_after_the_other(mini, two_instances, monkeypatch):
    """Instances run steps alone first, as before a capture; in the end some are at both."""
    (path, oracle), (config, _) = mini, two_instances
    stand_in_for_nixl_ep(monkeypatch)
    data_plane = replace(config.data_plane, dispatch_backend="nixl_ep")
    prompts = [greedy_prompt(2), greedy_prompt(90)]
    with DecodeCluster(replace(config, data_plane=data_plane), path) as cluster:
        cluster.run(prompts[:1])
        cluster.regroup(table_of(cluster._model, config.cluster, seed=2))
        cluster.run(prompts[1:])
        selected = cluster.instances[0].selected
    assert "dispatch: nixl_ep, as configured" in selected
    for prompt in prompts:
        assert oracle.judge(prompt.ids, prompt.output).exact and len(prompt.output) == 3


@without_gpu
@pytest.mark.parametrize("dispatch", ["exchange", "nixl_ep"])
def test_experts_move_while_rows_go_on(mini, two_instances, monkeypatch, dispatch):
    """Slots are written from a thread beside the steps, and rows come once all are filled."""
    (path, oracle), (config, _) = mini, two_instances
    stand_in_for_nixl_ep(monkeypatch)
    data_plane = replace(config.data_plane, dispatch_backend=dispatch)
    cluster = replace(config.cluster, expert_load_mb_per_s=1000)
    config = replace(config, data_plane=data_plane, cluster=cluster)
    prompts = []
    with DecodeCluster(config, path) as cluster:
        while cluster.moved.counts["moves_done"] < 3:
            assert len(prompts) < 10, cluster.moved.counts
            prompts += cluster.run([greedy_prompt(2 + 8 * len(prompts), 12)])
    for prompt in prompts:
        assert oracle.judge(prompt.ids, prompt.output).exact and len(prompt.output) == 12


@without_gpu
def test_states_of_rows_travel_between_instances(two_instances, models):
    """They come from the prefill as pages, and move with their rows."""
    (config, _), model = two_instances, models("tiny-kimi-linear, mini")
    prompts = [greedy_prompt(2, 5), greedy_prompt(90, 5)]
    del prompts[1].ids[5:]
    scheduler = replace(config.scheduler, policy="chaos", chaos_seed=25, steps_per_window=1)
    with DecodeCluster(replace(config, scheduler=scheduler), model.path) as cluster:
        cluster.run(prompts)
    sources = [
        transfer.source
        for plan in cluster.plans
        for transfer in plan.transfers
        if transfer.targets[-1].first_page == CARRY_PAGE
    ]
    assert None in sources and {*sources} & {0, 1}, "of the prefill, and between instances"
    for prompt in prompts:
        assert model.oracle.judge(prompt.ids, prompt.output).exact and len(prompt.output) == 5


@without_gpu
def test_an_instance_that_has_just_prepared_its_graphs_meets_one_that_has_none(
    mini, two_instances, monkeypatch
):
    """Instance 1 runs steps of a fused mixture at start-up, as before a capture; 0 does not."""
    path, config = mini[0], two_instances[0]
    data_plane = replace(config.data_plane, dispatch_backend="fused")
    config, made, cluster_id = replace(config, data_plane=data_plane), [], uuid.uuid4().hex[:8]

    def warm(*lanes, draft):
        capture = eager(*lanes, draft=draft)

        def run_once(*contexts):
            contexts[0].live[:] = True
            made[-1].contexts.append(contexts[0])
            step = capture(*contexts)
            if len(made) == 2:
                step()
            return step

        return run_once

    def gpu_parts(*arguments, **keys):
        made.append(SimpleNamespace(parts=build_parts(*arguments, **keys), contexts=[]))
        return made[-1].parts

    monkeypatch.setattr(gpu, "eager", warm)
    monkeypatch.setattr(gpu, "gpu_parts", gpu_parts)
    instances = [
        gpu.build_gpu_instance(config, seat, Segments(cluster_id), path, print) for seat in (0, 1)
    ]
    threads = [threading.Thread(target=instance.connect) for instance in instances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run_in_turn([(each.parts, each.contexts[0]) for each in made])
    for each in made:
        each.parts.step.check()
        assert int(each.parts.step.mixture.fused.epoch) > 0
    for instance in instances:
        instance.close()


@without_gpu
def test_a_step_whose_peer_stops_ends_with_its_term(mini, two_instances, monkeypatch):
    """Instance 1 stops before its second step; its peer's wait would go on for 30 s or more."""
    (path, _), (config, _) = mini, two_instances
    terms, ended, is_over = {}, {}, threading.Event()
    build, run_step = decode_cluster.build_instance, DecodeInstance.run_step

    def noting(config, index, segments, checkpoint):
        terms[index] = segments.term
        return build(config, index, segments, checkpoint)

    def stopping(instance):
        number = instance._instance
        if number == 1 and instance._window.steps_done == 1:
            threading.Timer(0.2, terms[0].end, [1]).start()
            is_over.wait(60)
            raise TermOver("stopped")
        try:
            run_step(instance)
        except TermOver as over:
            ended[number] = str(over)
            is_over.set()
            raise

    monkeypatch.setattr(decode_cluster, "build_instance", noting)
    monkeypatch.setattr(DecodeInstance, "run_step", stopping)
    with DecodeCluster(config, path) as cluster, pytest.raises(TermOver):
        cluster.run([greedy_prompt(2)])
    assert list(ended) == [0]
    assert re.match(r"term 1 is over: instance 0 awaits \w+ of instance 1", ended[0])
