"""Structured output on real instances: the same tokens at any degree, window, binding and attempt.

Each output parses, also on random weights, which pull the text towards nothing.
"""

from dataclasses import replace

import pytest
import tokenizers

from harness.constraints import KINDS, grammar_of
from harness.decode_cluster import DecodeCluster, Prompt
from harness.exact_runs import CLUSTER
from nanocp.config import Config, SchedulerConfig
from nanocp.sampling import SamplingParams

EOS = 1
RUNS = {
    "degree 1": ({}, {"policy": "fixed_degree:1"}),
    "degree 4, windows of 4": ({}, {"policy": "fixed_degree:4", "steps_per_window": 4}),
    "chaos": ({}, {"policy": "chaos", "chaos_period_windows": 1}),
    "preempted": ({"num_frames": 4}, {"growth_promise": "tokens:0", "steps_per_window": 4}),
}


pytestmark = pytest.mark.timeout(1800)


def prompts(each):
    """Several requests of each kind and some without one; prompts fill pages of several frames."""
    asked = {}
    for kind in (*KINDS, None):
        for number in range(each if kind else 2):
            params = SamplingParams(
                max_tokens=120,
                temperature=1.0,
                seed=number,
                stop_token_ids=(EOS,),
                constraint=grammar_of(kind) if kind else "",
            )
            asked[kind, number] = Prompt(list(range(2 + number, 252 + number)), params)
    return asked


@pytest.fixture(scope="module", params=[2, pytest.param(200, marks=pytest.mark.system)])
def outputs(request, tiny_checkpoint):
    """The prompts of each run with their outputs; as many of each kind as the parameter says."""
    found = {}
    for name, (cluster, scheduler) in RUNS.items():
        config = Config(cluster=replace(CLUSTER, **cluster), scheduler=SchedulerConfig(**scheduler))
        asked = prompts(request.param)
        with DecodeCluster(config, tiny_checkpoint) as running:
            running.run(list(asked.values()))
        found[name] = asked
    return found


def outputs_of(run, kind):
    """The outputs of a run's requests of one kind."""
    return [prompt.output for (of_kind, _), prompt in run.items() if of_kind == kind]


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_the_same_in_every_run(outputs, name):
    expected = {key: prompt.output for key, prompt in outputs["degree 1"].items()}
    assert {key: prompt.output for key, prompt in outputs[name].items()} == expected


def test_the_runs_contain_what_they_are_about(outputs):
    def constrained(name):
        return [prompt for (kind, _), prompt in outputs[name].items() if kind]

    spread = [p for one in constrained("degree 4, windows of 4") for p in one.placements]
    # When a thousand requests fill the frames, some find room on fewer instances only.
    degrees = {placement.cp_degree for placement in spread}
    assert 4 in degrees and min(degrees) > 1
    assert any(len({p.moe_binding for p in one.placements}) > 1 for one in constrained("chaos"))
    assert any(one.num_preemptions for one in constrained("preempted"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_output_is_what_its_constraint_says(outputs, tiny_checkpoint, kind):
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    judge, texts = KINDS[kind][1], set()
    for output in outputs_of(outputs["chaos"], kind):
        assert output[-1] == EOS
        texts.add(tokenizer.decode(output[:-1]))
        judge(tokenizer.decode(output[:-1]))
    assert len(texts) > 1
    assert any(len(output) == 120 for output in outputs_of(outputs["chaos"], None))
