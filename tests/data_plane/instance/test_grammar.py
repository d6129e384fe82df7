"""Masks of structured output: pure, complete outputs, and never an empty mask."""

import json
import logging
from random import Random

import pytest
import tokenizers
import torch

from data_plane.instance.grammar import load_grammar_masks
from data_plane.instance.sampler import controlled_logits, sample_rows
from data_plane.model.config import ModelConfig
from harness.constraints import KINDS, grammar_of
from nanocp.sampling import SamplingParams

EOS = 1
NUM_SAMPLES = 200


@pytest.fixture(scope="module")
def vocab_size(tiny_checkpoint):
    return ModelConfig.from_folder(tiny_checkpoint).vocab_size


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


@pytest.fixture
def masks(tiny_checkpoint, vocab_size):
    return load_grammar_masks(tiny_checkpoint, vocab_size, (EOS,))


def sampled(masks, vocab_size, grammar, request_id, max_tokens=300):
    """Sample at temperature 1 from random logits until the end of sequence: the output's ids."""
    params = SamplingParams(
        temperature=1.0, seed=request_id, max_tokens=max_tokens, stop_token_ids=(EOS,)
    )
    generator = torch.Generator().manual_seed(request_id)
    output = []
    while len(output) < max_tokens and output[-1:] != [EOS]:
        logits = torch.randn((1, vocab_size), generator=generator) * 3
        mask = masks.mask(request_id, 0, grammar, output)
        output += sample_rows(logits, [params], [output], [()], [mask])
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_what_the_constraint_says(masks, vocab_size, tokenizer, kind):
    """Random logits are the hardest model: nothing pulls the text towards a valid one."""
    grammar, judge = grammar_of(kind), KINDS[kind][1]
    texts = set()
    for request_id in range(NUM_SAMPLES):
        output = sampled(masks, vocab_size, grammar, request_id)
        assert output[-1] == EOS, "every output of these constraints is finite"
        text = tokenizer.decode(output[:-1])
        judge(text)
        texts.add(text)
    assert len(texts) > 3, "the model decides, within the constraint"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_matcher_masks_as_a_new_one_that_replays(masks, tiny_checkpoint, vocab_size, kind):
    """Rows come and go between instances: histories jump, grow, and are asked about twice."""
    grammar, random = grammar_of(kind), Random(kind)
    histories = [sampled(masks, vocab_size, grammar, 1000 + number) for number in range(6)]
    for _ in range(60):
        number = random.randrange(len(histories))
        length = random.randrange(len(histories[number]))
        new = load_grammar_masks(tiny_checkpoint, vocab_size, (EOS,))
        expected = new.mask(1, 0, grammar, histories[number][:length])
        for _ in range(random.randrange(1, 3)):
            kept = masks.mask(number, 0, grammar, histories[number][:length])
            assert torch.equal(kept, expected)


def test_a_complete_output_can_only_end(masks, vocab_size, tokenizer):
    grammar = grammar_of("choice")
    ids = tokenizer.encode("yes", add_special_tokens=False).ids
    for number, output in enumerate((ids, [*ids, EOS])):
        assert masks.mask(number, 0, grammar, output).nonzero().flatten().tolist() == [EOS]
    before = masks.mask(3, 0, grammar, ids[:-1])
    assert not before[EOS] and before[ids[-1]]


def test_no_control_lifts_a_mask_and_the_grammar_wins_over_all_of_them(vocab_size):
    logits = torch.zeros(vocab_size)
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[[7, EOS]] = True
    biased = SamplingParams(logit_bias=((9, 100.0),), frequency_penalty=2.0, presence_penalty=2.0)
    controlled = controlled_logits(logits, biased, [7, 7], [], mask)
    assert torch.isfinite(controlled).nonzero().flatten().tolist() == [EOS, 7]
    # bad_words and min_tokens leave nothing that the mask allows.
    silenced = SamplingParams(bad_words=((7,),), min_tokens=5, max_tokens=9, stop_token_ids=(EOS,))
    controlled = controlled_logits(logits, silenced, [], [], mask)
    assert torch.isfinite(controlled).nonzero().flatten().tolist() == [EOS, 7]
    mask[7] = False
    controlled = controlled_logits(logits, silenced, [], [], mask)
    assert torch.isfinite(controlled).nonzero().flatten().tolist() == [EOS]


def test_a_grammar_that_is_too_costly_ends_its_row_alone(masks, vocab_size, tokenizer, caplog):
    """The library bounds the work of one mask; what is over it ends with the end of sequence."""
    costly = "(" + "|".join(f"(a|b|[a-z]{{{n}}})*x{n}" for n in range(20, 60)) + ")"
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: /{costly}/"}]})
    ids = tokenizer.encode("abcd", add_special_tokens=False).ids
    with caplog.at_level(logging.WARNING):
        mask = masks.mask(1, 0, grammar, ids * 5)
        assert mask.any()
        # Ids that the grammar never allowed: as if the row came from another version.
        other = masks.mask(2, 0, grammar_of("choice"), tokenizer.encode("zz").ids)
    assert other.nonzero().flatten().tolist() == [EOS]
    assert any("the grammar of request 2 ends its output" in one.message for one in caplog.records)


def test_matchers_that_are_not_used_are_forgotten(masks, monkeypatch):
    monkeypatch.setattr("data_plane.instance.grammar._MAX_MATCHERS", 3)
    grammar = grammar_of("choice")
    first = masks.mask(0, 0, grammar, [])
    for number in range(9):
        masks.mask(number, 0, grammar, [])
    assert list(masks._kept) == [(6, 0), (7, 0), (8, 0)]
    assert torch.equal(masks.mask(0, 0, grammar, []), first)


def test_without_a_tokenizer_or_an_end_of_sequence_there_are_none(tmp_path, tiny_checkpoint):
    assert load_grammar_masks(tmp_path, 10, (EOS,)) is None
    assert load_grammar_masks(tiny_checkpoint, 10, ()) is None


def test_a_grammar_is_compiled_once_and_its_rows_do_not_meet(masks, vocab_size):
    grammar = grammar_of("regex")
    output = sampled(masks, vocab_size, grammar, 7)
    (compiled,) = masks._compiled.values()
    for end in range(len(output)):
        masks.mask(108, 0, grammar, [])
        assert masks.mask(107, 0, grammar, output[:end])[output[end]]
    assert list(masks._compiled.values()) == [compiled]
    fresh = masks.mask(109, 0, grammar, [])
    assert torch.equal(fresh, masks.mask(108, 0, grammar, []))
