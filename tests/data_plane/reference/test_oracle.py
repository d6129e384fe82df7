"""The oracle: the first wrong token is pinned, near-ties are right and counted."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.gates import GATE_NEAR_TIE, ReferenceGates
from data_plane.reference.oracle import NEAR_TIE, Oracle, Verdict
from harness.exact.fp8_twin import make_twin

PROMPT = list(range(2, 90))


@pytest.fixture(scope="module")
def generated(tiny_checkpoint):
    """Greedy tokens of `generate`, which the oracle itself does not call."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    ids = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return ids[0, len(PROMPT) :].tolist()


def test_what_the_reference_generates_is_exact(tiny_oracle, generated):
    assert len(set(generated)) > 5, "a story must contain what it is about"
    assert tiny_oracle.judge(PROMPT, generated) == Verdict(24, None, 0)
    assert tiny_oracle.judge(PROMPT, generated).exact


def test_it_has_one_thread(tiny_checkpoint):
    """Threads wait for each other at every operation, and on a busy machine for cores."""
    torch.set_num_threads(2)
    Oracle(tiny_checkpoint)
    assert torch.get_num_threads() == 1


def test_its_attention_is_the_one_that_keeps_all_scores(tiny_checkpoint, tiny_oracle):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT * 3])).logits[0, -len(PROMPT) :]
    found = tiny_oracle.logits(PROMPT * 2, [*PROMPT, 0])[1:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("index", [0, 1, 11, 23])
def test_the_first_wrong_token_is_pinned(tiny_oracle, generated, index):
    wrong = [*generated]
    wrong[index] = (wrong[index] + 1) % 512
    verdict = tiny_oracle.judge(PROMPT, wrong)
    assert verdict.first_wrong == index and not verdict.exact


def test_a_missing_or_doubled_token_is_wrong(tiny_oracle, generated):
    assert tiny_oracle.judge(PROMPT, generated[1:]).first_wrong == 0
    assert (
        tiny_oracle.judge(PROMPT, [*generated[:7], generated[6], *generated[7:]]).first_wrong
        is not None
    )
    assert tiny_oracle.judge(PROMPT[1:], generated).first_wrong is not None


def test_no_output_is_not_exact(tiny_oracle):
    assert tiny_oracle.judge(PROMPT, []) == Verdict(0, None, 0)
    assert not tiny_oracle.judge(PROMPT, []).exact


def test_a_prompt_of_one_token(tiny_oracle):
    first = int(tiny_oracle.logits([7], [0]).argmax())
    assert tiny_oracle.judge([7], [first]).exact
    assert tiny_oracle.judge([7], [first + 1]).first_wrong == 0


class GivenLogits(Oracle):
    """An oracle whose reference is a table."""

    def __init__(self, logits):
        self._given = torch.tensor(logits, dtype=torch.float32)
        self._gates = ReferenceGates(torch.nn.Identity())

    def logits(self, prompt_ids, output_ids):
        return self._given[: len(output_ids)]


def test_a_near_tie_is_right_and_counted():
    half, beyond = 1 - NEAR_TIE / 2, 1 - NEAR_TIE * 2
    oracle = GivenLogits([[1, half, beyond], [1, 1, 0], [half, 0, 1], [0, 1, 0]])
    assert oracle.judge([0], [0, 0, 2, 1]) == Verdict(4, None, 0)
    assert oracle.judge([0], [1, 1, 0, 1]) == Verdict(4, None, 2), (
        "equal logits are no near-tie: both are the argmax"
    )
    assert oracle.judge([0], [2, 0, 2, 1]) == Verdict(4, 0, 0)
    assert oracle.judge([0], [1, 0, 1, 0]) == Verdict(4, 2, 1), (
        "what follows a wrong token is not judged"
    )


def test_a_reference_that_is_nan_says_wrong():
    assert not GivenLogits([[float("nan"), 1.0]]).judge([0], [1]).exact


def test_logits_are_those_of_the_whole_sequence(tiny_checkpoint, tiny_oracle, generated):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        whole = model(torch.tensor([PROMPT + generated])).logits[0, len(PROMPT) - 1 : -1]
    torch.testing.assert_close(tiny_oracle.logits(PROMPT, generated), whole, atol=1e-4, rtol=0)


# --- near-ties of the gates ---


@pytest.fixture(scope="module")
def tied_checkpoint(tiny_checkpoint, tmp_path_factory):
    """Exact ties: in the last layer, experts 8 and 9 have equal gates, and so do groups 0 and 1."""
    path = tmp_path_factory.mktemp("checkpoints") / "tied"
    shutil.copytree(tiny_checkpoint, path)
    rewrite_gate(
        path,
        lambda weight: torch.cat((weight[:4], weight[:4], weight[8:9], weight[8:9], weight[10:])),
    )
    return path


def rewrite_gate(path, change, nudge=0.0):
    tensors = load_file(path / "model.safetensors")
    gate = "model.layers.3.mlp.gate."
    for name in (gate + "weight", gate + "e_score_correction_bias"):
        tensors[name] = change(tensors[name]).contiguous()
    # Decides every tie the other way: at a tie the reference takes what it takes, so either sign is
    # tried.
    tensors[gate + "e_score_correction_bias"][[4, 5, 6, 7, 9]] += nudge
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def greedy(oracle, prompt, num_tokens):
    output = []
    for _ in range(num_tokens):
        output.append(int(oracle.logits(prompt, [*output, 0])[-1].argmax()))
    return output


def test_an_output_that_decides_ties_of_the_gate_otherwise_is_right_and_counted(
    tied_checkpoint, tmp_path
):
    oracle, counted = Oracle(tied_checkpoint), 0
    for sign in (1, -1):
        path = Path(shutil.copytree(tied_checkpoint, tmp_path / str(sign)))
        rewrite_gate(path, lambda tensor: tensor, nudge=sign * GATE_NEAR_TIE / 10)
        other = Oracle(path)
        for first in range(5, 89, 7):
            output = greedy(other, [first], 4)
            verdict = oracle.judge([first], output)
            assert verdict.exact, (sign, first, verdict)
            counted += verdict.near_ties
            wrong = [*output[:3], (output[3] + 1) % 512]
            assert oracle.judge([first], wrong).first_wrong == 3, "a tie does not excuse any token"
    assert counted >= 3, "the story must contain what it is about"


@pytest.mark.parametrize(
    "rules", [{}, {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}]
)
def test_ties_of_a_softmax_gate_are_counted_too(tmp_path, rules):
    """Experts 8 and 9 tie; with their weights exchanged, every such tie is decided otherwise."""
    make_checkpoint(
        tmp_path / "tied",
        "tiny-v2",
        overrides=rules | {"num_experts_per_tok": 3, "routed_scaling_factor": 16.0},
    )
    tensors = load_file(tmp_path / "tied" / "model.safetensors")
    mlp = "model.layers.3.mlp."
    tensors[mlp + "gate.weight"][9] = tensors[mlp + "gate.weight"][8]
    save_file(tensors, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(tmp_path / "tied", tmp_path / "other")
    for part in ("gate_proj", "up_proj", "down_proj"):
        eight, nine = (f"{mlp}experts.{expert}.{part}.weight" for expert in (8, 9))
        tensors[eight], tensors[nine] = tensors[nine], tensors[eight]
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    oracle, other = Oracle(tmp_path / "tied"), Oracle(tmp_path / "other")
    verdicts = [oracle.judge([first], greedy(other, [first], 3)) for first in range(5, 89, 3)]
    assert all(verdict.exact for verdict in verdicts)
    assert sum(verdict.near_ties for verdict in verdicts) >= 1, (
        "the story must contain what it is about"
    )


def test_gates_that_differ_by_more_than_a_near_tie_are_wrong(tied_checkpoint, tmp_path):
    path = Path(shutil.copytree(tied_checkpoint, tmp_path / "far"))
    rewrite_gate(path, lambda tensor: tensor, nudge=-0.2)
    other, oracle = Oracle(path), Oracle(tied_checkpoint)
    verdicts = [
        oracle.judge(prompt, greedy(other, prompt, 4)) for prompt in ([5], [77, 3], [200, 100, 50])
    ]
    assert not all(verdict.exact for verdict in verdicts)


def test_without_near_ties_nothing_is_decided_otherwise(tiny_oracle, generated):
    """A wrong output of a model without ties costs one forward."""
    wrong = [*generated[:5], (generated[5] + 1) % 512]
    assert tiny_oracle.judge(PROMPT, wrong) == Verdict(6, 5, 0)
    assert tiny_oracle._gates.near_ties == []


@pytest.mark.parametrize("widths", [(64, 32), (128, 64)], ids=["whole", "192 rows"])
def test_fp8_folders_are_judged_by_their_own_blocks(tmp_path, widths):
    """kv_a of 192 rows has two rows of blocks of 128, which transformers 5.24.0 cuts at 96."""
    overrides = dict(zip(("kv_lora_rank", "qk_rope_head_dim"), widths, strict=True))
    make_checkpoint(tmp_path / "fp8", "tiny", dtype=torch.float8_e4m3fn, overrides=overrides)
    make_twin(tmp_path / "fp8", tmp_path / "twin")
    found, right = (Oracle(tmp_path / name).logits(PROMPT, [3, 4]) for name in ("fp8", "twin"))
    torch.testing.assert_close(found, right, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("tiny-ling", {"kda_lower_bound": -5}), ("tiny", {"model_type": "kimi_k2"})],
)
def test_what_transformers_does_not_read_as_published(tmp_path, preset, changes):
    make_checkpoint(tmp_path, preset)
    right = Oracle(tmp_path).logits(PROMPT, [3, 4])
    fields = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    torch.testing.assert_close(Oracle(tmp_path).logits(PROMPT, [3, 4]), right, atol=0, rtol=0)
