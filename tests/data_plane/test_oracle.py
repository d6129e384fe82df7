"""The oracle: the first wrong token is pinned, near-ties are right and counted."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_plane.oracle import NEAR_TIE, Oracle, Verdict

PROMPT = list(range(2, 90))


@pytest.fixture(scope="module")
def generated(tiny_checkpoint):
    """Greedy tokens of `generate`, which the oracle itself does not call."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    return ids[0, len(PROMPT) :].tolist()


def test_what_the_reference_generates_is_exact(tiny_oracle, generated):
    assert len(set(generated)) > 5, "a story must contain what it is about"
    assert tiny_oracle.judge(PROMPT, generated) == Verdict(24, None, 0)
    assert tiny_oracle.judge(PROMPT, generated).exact


@pytest.mark.parametrize("index", [0, 1, 11, 23])
def test_the_first_wrong_token_is_pinned(tiny_oracle, generated, index):
    wrong = [*generated]
    wrong[index] = (wrong[index] + 1) % 512
    verdict = tiny_oracle.judge(PROMPT, wrong)
    assert verdict.first_wrong == index and not verdict.exact


def test_a_missing_or_doubled_token_is_wrong(tiny_oracle, generated):
    assert tiny_oracle.judge(PROMPT, generated[1:]).first_wrong == 0
    assert tiny_oracle.judge(PROMPT, [*generated[:7], generated[6], *generated[7:]]).first_wrong is not None
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

    def logits(self, prompt_ids, output_ids):
        return self._given[: len(output_ids)]


def test_a_near_tie_is_right_and_counted():
    half, beyond = 1 - NEAR_TIE / 2, 1 - NEAR_TIE * 2
    oracle = GivenLogits([[1, half, beyond], [1, 1, 0], [half, 0, 1], [0, 1, 0]])
    assert oracle.judge([0], [0, 0, 2, 1]) == Verdict(4, None, 0)
    assert oracle.judge([0], [1, 1, 0, 1]) == Verdict(4, None, 2), "equal logits are no near-tie: both are the argmax"
    assert oracle.judge([0], [2, 0, 2, 1]) == Verdict(4, 0, 0)
    assert oracle.judge([0], [1, 0, 1, 0]) == Verdict(4, 2, 1), "what follows a wrong token is not judged"


def test_a_reference_that_is_nan_says_wrong():
    assert not GivenLogits([[float("nan"), 1.0]]).judge([0], [1]).exact


def test_logits_are_those_of_the_whole_sequence(tiny_checkpoint, tiny_oracle, generated):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        whole = model(torch.tensor([PROMPT + generated])).logits[0, len(PROMPT) - 1 : -1]
    torch.testing.assert_close(tiny_oracle.logits(PROMPT, generated), whole, atol=1e-5, rtol=0)
