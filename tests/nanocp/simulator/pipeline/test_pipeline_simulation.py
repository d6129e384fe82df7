"""The pipeline's scheduler on simulated stages: bounds that must hold, and controls."""

from dataclasses import replace
from itertools import islice

import pytest

from benchmarks.pipeline.forming import PASS_FORMS, making
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Slo
from nanocp.simulator.pipeline.pipeline_file import load_pipeline_file, shipped_pipelines
from nanocp.simulator.pipeline.simulation import SPREAD, PipelineSimulation, PipelineTrial

FILE = load_pipeline_file("a100x4-qwen2.5-14b")


def play(policy="level", num_requests=60, workload="fixed:300:60", file=FILE, rate=100, **options):
    requests = Workload(workload, rate, seed=1).requests(file.max_model_len)
    return PipelineTrial(file, policy, **options).play(islice(requests, num_requests))


def with_costs(**changes):
    return replace(FILE, costs={"fitted": replace(FILE.costs["fitted"], **changes)})


def test_a_run_is_the_same_to_the_last_bit():
    assert play() == play()


def test_levelling_is_between_even_and_the_bound():
    even, level, fluid = (play(policy) for policy in ("even", "level", "fluid"))
    assert level.split == (13, 13, 13, 9)
    # Passes differ a little, so the bound of a pass is none to the last percent of a run.
    assert fluid.e2el_ms_mean < 1.02 * level.e2el_ms_mean < 0.95 * even.e2el_ms_mean
    assert 0 < level.num_changes <= level.num_moved_layers == 6, "no layer moves twice"
    assert even.bubbles[0]["tail"] > 0.1, "stages wait for the last one"
    assert even.num_judged == level.num_judged == 60
    assert level.num_frames < even.num_frames, "room for layers that might come is no KV"


def test_nothing_moves_where_sampling_costs_nothing():
    file = with_costs(sampled_us=0.0, sampling_us=20.0)
    even, level = play("even", file=file), play(file=file)
    assert level.num_changes == 0
    assert level.e2el_ms_mean == even.e2el_ms_mean


def test_a_slow_stage_gets_fewer_layers():
    slow = ((1, 1.6),)
    equal = play()
    even, level = (play(policy, slow_stages=slow) for policy in ("even", "level"))
    assert level.split[1] == min(level.split) < equal.split[1]
    lost = even.e2el_ms_mean - equal.e2el_ms_mean
    assert even.e2el_ms_mean - level.e2el_ms_mean > 0.5 * lost > 0


def test_a_slow_stage_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"slow_stages has 4:2; it must be a stage from 0 to 3"):
        play(slow_stages=((4, 2.0),))


def test_window_1_moves_more_often():
    once, often = play("delta", rate=30), play("delta", rate=30, layout_window=1)
    assert often.num_changes > 3 * once.num_changes > 0
    assert often.moved_mb > once.moved_mb > 0


def test_one_stage_is_one_instance():
    file = replace(FILE, num_stages=1, memory=replace(FILE.memory, hbm_gb=80.0))
    even = play("even", file=file, num_requests=1, workload="fixed:100:3")
    costs = file.costs["fitted"]
    # A pass of the prompt, and two of a token each; everything in one process.
    layer_us = sum(1e3 * 550.5 / costs.weights_gb_per_s for _ in range(3))
    kv_us = sum(1e-3 * tokens * 4096 / costs.weights_gb_per_s for tokens in (100, 101, 102))
    sampling_us = 3 * (costs.sampled_us + costs.sampling_us)
    chunk_us = 100 * 50 * FILE.model.attention_mflop / costs.gemm_tflops
    hidden_us = 1e-3 * 102 * FILE.model.hidden_bytes / costs.link_gb_per_s
    expected_us = 48 * (layer_us + kv_us + chunk_us) + sampling_us + 3 * costs.hop_us + hidden_us
    assert even.e2el_ms_mean * 1e3 == pytest.approx(expected_us, abs=10)
    for policy in ("level", "fluid"):
        assert play(policy, file=file, num_requests=1, workload="fixed:100:3").e2el_ms_mean == (
            pytest.approx(even.e2el_ms_mean)
        )


def test_each_system_forms_passes_its_way():
    """(rows that decode, tokens of chunks) of the passes of each."""

    class Noted(PipelineSimulation):
        def _send_pass(self, plan):
            decoding = sum(span.num_tokens == 1 for span in plan.spans)
            passes.append((decoding, sum(span.num_tokens for span in plan.spans) - decoding))
            super()._send_pass(plan)

    formed = {}
    for form in PASS_FORMS:
        passes = formed[form] = []
        requests = Workload("fixed:700:9", 100, seed=1).requests(FILE.max_model_len)
        trial = PipelineTrial(FILE, "even", make_rows=making(form))
        outcome = Noted(trial).run(islice(requests, 30))
        assert outcome.num_judged == 30, form
    most = {form: max(map(sum, passes)) for form, passes in formed.items()}
    assert most["sarathi"] <= 512 < most["ours"]
    assert most["vllm"] == most["no_mixing"] == 2048, "nothing throttles a prompt"
    assert most["gllm"] < 2048
    is_mixed = {form: any(min(one) for one in passes) for form, passes in formed.items()}
    assert is_mixed == {form: form != "no_mixing" for form in PASS_FORMS}
    most_rows = {form: max(rows for rows, _ in passes) for form, passes in formed.items()}
    assert max(most_rows["ours"], most_rows["gllm"]) < most_rows["vllm"]


def test_spread_sampling_replicates_what_it_samples_with():
    even = play("even")
    for policy in SPREAD:
        spread = play(policy)
        assert spread.num_frames < even.num_frames
        assert spread.num_judged == 60
        # Each stage reads all of lm_head for its share of the rows: that is dearer than it saves.
        is_better = spread.e2el_ms_mean < even.e2el_ms_mean
        assert is_better == (policy != "spread_sampling"), policy


def test_rows_that_stop_by_themselves_end_and_few_frames_make_rows_wait():
    def requests():
        return (WorkloadRequest(0, 100, 20 + n, 200) for n in range(20))

    simulation = PipelineSimulation(PipelineTrial(FILE, "level"))
    outcome = simulation.run(requests())
    assert outcome.num_judged == 20
    assert simulation.scheduler.load.num_rows == 0
    small = replace(FILE, memory=replace(FILE.memory, hbm_gb=10.3))
    outcome = PipelineTrial(small, "even").play(requests())
    assert outcome.num_frames < 60
    assert outcome.num_judged == 20


def test_a_late_request_misses_the_slo():
    assert play(slo=Slo(1_000_000, 10_000_000)).attainment == 1.0
    assert play(slo=Slo(1, 10_000_000)).attainment == 0.0


@pytest.mark.parametrize("name", shipped_pipelines())
@pytest.mark.parametrize("constants", ["peak", "fitted"])
def test_shipped_pipelines_run(name, constants):
    outcome = play(file=load_pipeline_file(name), constants=constants, num_requests=4)
    assert outcome.num_judged == 4
    assert outcome.sampling_error < 1e-9


def test_what_cannot_be_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cluster is 'a100x4'; it must be a100x4-qwen2\.5-14b, "):
        load_pipeline_file("a100x4")
    path = tmp_path / "mine.yaml"
    path.write_text("model: 3\n")
    with pytest.raises(ValueError, match=r"mine\.yaml: model is 3; it must be a section of keys"):
        load_pipeline_file(str(path))
    with pytest.raises(ValueError, match="passes is 'orca'; it must be ours, vllm, "):
        making("orca")
    with pytest.raises(ValueError, match="predictor is 'none'; it must be paper or ours"):
        play(predictor="none")
    with pytest.raises(ValueError, match="constants is 'x'; it must be peak or fitted"):
        play(constants="x")
    with pytest.raises(ValueError, match=r"layer_policy is 'lvel'.*nearest: level"):
        play("lvel")
    with pytest.raises(ValueError, match=r"stage 0 does not fit: 12 layers .* GB too many"):
        play("even", file=replace(FILE, memory=replace(FILE.memory, hbm_gb=8.0)))
