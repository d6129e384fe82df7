"""Structured output on real instances: the same tokens at any degree, window, binding and attempt.

Each output parses, also on random weights, which pull the text towards nothing.
"""

import pytest
import tokenizers

from control_plane.scheduler.policies.fixed_degree import FixedDegree
from harness.exact.decode_cluster import Prompt
from harness.exact.exact_runs import cluster_of
from harness.vllm.constraints import EOS, KINDS, sampled_params
from nanocp.values.sampling import SamplingParams

K4 = {"steps_per_window": 4}
RUNS = {
    "degree 1": {"policy": "fixed_degree:1"},
    # However many rows run, each has room on every instance, and pages of its own there.
    "degree 4, windows of 4": K4 | {
        "policy": "fixed_degree:4", "prefix_sharing": False, "max_attention_rows": 64,
    },
    "chaos, windows of 4": K4 | {"policy": "chaos", "chaos_period_windows": 1},
    "preempted, windows of 4": K4 | {"num_frames": 4, "growth_promise": "tokens:0"},
    "each preempted once": {"policy": "fixed_degree:1", "growth_promise": "tokens:0"},
}  # fmt: skip
PROMPT_LEN = 256
"""Fills its pages: the second token that is generated needs another."""


pytestmark = pytest.mark.timeout(3600)


def prompts(each, tokenizer):
    """Several requests of each kind and some without one."""
    asked = {}
    for kind in (*KINDS, None):
        for number in range(each if kind else 2):
            free = SamplingParams(
                max_tokens=70, temperature=1.0, seed=number, stop_token_ids=(EOS,)
            )
            params = sampled_params(kind, tokenizer, number, 120) if kind else free
            asked[kind, number] = Prompt(list(range(2 + number, 2 + number + PROMPT_LEN)), params)
    return asked


def played(name, asked, checkpoint):
    """Play the prompts as one of RUNS."""
    with pytest.MonkeyPatch.context() as patched:
        if name == "each preempted once":
            # No row gets a page beyond the prompt's, until it comes back with all it may need.
            patched.setattr(FixedDegree, "holder", lambda *_: None)
        with cluster_of(checkpoint, max_queued_requests=2000, **RUNS[name]) as running:
            running.run(list(asked.values()))


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module", params=[2, pytest.param(200, marks=pytest.mark.system)])
def outputs(request, tiny_checkpoint, tokenizer):
    """The prompts of each run with their outputs; as many of each kind as the parameter says."""
    found = {}
    for name in RUNS:
        found[name] = prompts(request.param, tokenizer)
        played(name, found[name], tiny_checkpoint)
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
    assert {placement.cp_degree for placement in spread} == {4}
    assert any(
        len({p.moe_binding for p in one.placements}) > 1
        for one in constrained("chaos, windows of 4")
    )
    assert any(one.num_preemptions for one in constrained("preempted, windows of 4"))
    assert {one.num_preemptions for one in constrained("each preempted once")} == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_every_output_is_what_its_constraint_says(outputs, tokenizer, kind):
    judge, texts = KINDS[kind][1], set()
    for output in outputs_of(outputs["degree 1"], kind):
        assert output[-1] == EOS
        texts.add(tokenizer.decode(output[:-1]))
        judge(tokenizer.decode(output[:-1]))
    assert len(texts) > 1
    if kind == "structural_tag" and len(texts) > 2:
        assert sum("<" in text for text in texts) * 2 > len(texts), "most have tags"
    assert any(len(output) == 70 for output in outputs_of(outputs["degree 1"], None))
