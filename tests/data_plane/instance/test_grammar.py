"""Masks of structured output: pure, complete outputs, and never an empty mask."""

import json
import logging
from random import Random
from types import SimpleNamespace

import pytest
import tokenizers
import torch

from data_plane.instance.grammar import MaskedRow, load_grammar_masks
from data_plane.instance.row_sampling import begin_masks, sample
from data_plane.instance.rows import Row
from data_plane.instance.sampler import RowMasks, controlled_logits, sample_rows
from data_plane.model.config import ModelConfig
from harness.vllm.constraints import EOS, KINDS, grammar_of, sampled_params
from nanocp.values.plan import FinishReason
from nanocp.values.sampling import SamplingParams

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


def mask_of(masks, request_id, grammar, output, drafts=()):
    """[vocabulary] bool: the mask of one row."""
    return masks.masks([MaskedRow(request_id, 0, grammar, output, drafts)])[0]


def sampled(masks, vocab_size, tokenizer, kind, request_id):
    """Sample at temperature 1 from random logits until the end of sequence: the output's ids."""
    params = sampled_params(kind, tokenizer, request_id, 300)
    generator = torch.Generator().manual_seed(request_id)
    output = []
    while len(output) < 300 and output[-1:] != [EOS]:
        logits = torch.randn((1, vocab_size), generator=generator) * 3
        mask = mask_of(masks, request_id, params.constraint, output)
        output += sample_rows(logits, [params], [output], [()], RowMasks([0], mask[None]))
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_what_the_constraint_says(masks, vocab_size, tokenizer, kind):
    """Random logits are the hardest model: nothing pulls the text towards a valid one."""
    judge, texts = KINDS[kind][1], set()
    for request_id in range(NUM_SAMPLES):
        output = sampled(masks, vocab_size, tokenizer, kind, request_id)
        assert output[-1] == EOS, "every output of these ends"
        text = tokenizer.decode(output[:-1])
        judge(text)
        texts.add(text)
    assert len(texts) > 3, "the model decides, within the constraint"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_matcher_masks_as_a_new_one_that_replays(
    masks, tiny_checkpoint, vocab_size, tokenizer, kind
):
    """Rows come and go between instances: histories jump, grow, and are asked about twice."""
    grammar, random = grammar_of(kind), Random(kind)
    histories = [sampled(masks, vocab_size, tokenizer, kind, 1000 + number) for number in range(6)]
    for _ in range(60):
        number = random.randrange(len(histories))
        length = random.randrange(len(histories[number]))
        new = load_grammar_masks(tiny_checkpoint, vocab_size, (EOS,))
        expected = mask_of(new, 1, grammar, histories[number][:length])
        for _ in range(random.randrange(1, 3)):
            kept = mask_of(masks, number, grammar, histories[number][:length])
            assert torch.equal(kept, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matcher_goes_back_behind_drafts_that_were_wrong(masks, vocab_size, tokenizer, kind):
    """Drafts differ at once, in the middle, or go on where the output ends; all may be wrong."""
    constraint = grammar_of(kind)
    ids = sampled(masks, vocab_size, tokenizer, kind, 1)
    other = sampled(masks, vocab_size, tokenizer, kind, 2)
    for number in range(len(ids)):
        mask_of(masks, 7, constraint, ids[:number], other[number : number + 2])
        kept = mask_of(masks, 7, constraint, ids[:number])
        assert torch.equal(kept, mask_of(masks, 100 + number, constraint, ids[:number]))


def test_a_draft_of_the_same_length_is_told_from_the_output(masks, tokenizer):
    constraint = grammar_of("choice")
    first = tokenizer.encode("yes").ids
    other = tokenizer.encode("no").ids
    assert first[0] != other[0]
    mask_of(masks, 1, constraint, [], first[:1])
    assert torch.equal(
        mask_of(masks, 1, constraint, other[:1]), mask_of(masks, 2, constraint, other[:1])
    )


def test_a_matcher_goes_back_from_a_complete_output_and_from_one_that_failed(
    masks, tokenizer, caplog
):
    constraint, ids = grammar_of("choice"), tokenizer.encode("yes").ids
    expected = mask_of(masks, 1, constraint, ids[:1])
    for drafts in ([*ids[1:], EOS], [*ids[1:], EOS, EOS], [300, 301]):
        mask_of(masks, 2, constraint, ids[:1], drafts)
        assert torch.equal(mask_of(masks, 2, constraint, ids[:1]), expected)
    whole = mask_of(masks, 2, constraint, ids)
    assert whole.nonzero().flatten().tolist() == [EOS]


def test_masks_of_many_rows_are_those_of_each_alone(masks, tiny_checkpoint, vocab_size, tokenizer):
    """Rows of all kinds, begun and complete, at once and from the masks' own thread."""
    alone = load_grammar_masks(tiny_checkpoint, vocab_size, (EOS,))
    rows = [
        MaskedRow(number * 10 + end, 0, grammar_of(kind), output[:end])
        for number, kind in enumerate(KINDS)
        for output in [sampled(alone, vocab_size, tokenizer, kind, 2000 + number)]
        for end in (0, 1, len(output) - 1, len(output))
    ]
    together = masks.begin(rows).result(60)
    assert together.shape == (len(rows), vocab_size) and together.any(dim=1).all()
    for row, mask in zip(rows, together, strict=True):
        assert torch.equal(mask, mask_of(alone, row.request_id, row.grammar, row.output_ids))


def test_masked_rows_are_sampled_as_if_each_were_alone(vocab_size):
    """Greedy and drawn, with controls and without, between rows that have no grammar."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn((6, vocab_size), generator=generator)
    allowed = torch.rand((4, vocab_size), generator=generator) < 0.05
    greedy, drawn = SamplingParams(), SamplingParams(temperature=1.0, seed=3)
    biased = SamplingParams(logit_bias=((9, 100.0),), presence_penalty=2.0)
    params, of_masks = [greedy, greedy, drawn, drawn, biased, greedy], [1, 2, 4, 5]
    outputs = [[3, 4]] * 6
    found = sample_rows(logits, params, outputs, [()] * 6, RowMasks(of_masks, allowed))
    for row, token_id in enumerate(found):
        one = slice(row, row + 1)
        mask = allowed[of_masks.index(row)] if row in of_masks else None
        if mask is None:
            assert [token_id] == sample_rows(logits[one], params[one], outputs[one], [()])
            continue
        assert mask[token_id]
        controlled = controlled_logits(logits[row], params[row], outputs[row], (), mask)
        assert [token_id] == sample_rows(controlled[None], params[one], outputs[one], [()])


def test_a_complete_output_can_only_end(masks, vocab_size, tokenizer):
    grammar = grammar_of("choice")
    ids = tokenizer.encode("yes", add_special_tokens=False).ids
    for number, output in enumerate((ids, [*ids, EOS])):
        assert mask_of(masks, number, grammar, output).nonzero().flatten().tolist() == [EOS]
    before = mask_of(masks, 3, grammar, ids[:-1])
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
    """The library bounds the work of one mask; what is over it leaves nothing."""
    costly = "(" + "|".join(f"(a|b|[a-z]{{{n}}})*x{n}" for n in range(20, 60)) + ")"
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: /{costly}/"}]})
    ids = tokenizer.encode("abcd", add_special_tokens=False).ids
    with caplog.at_level(logging.WARNING):
        mask = mask_of(masks, 1, grammar, ids * 5)
        assert mask.any()
        # Ids that the grammar never allowed: as if the row came from another version.
        other = mask_of(masks, 2, grammar_of("choice"), tokenizer.encode("zz").ids)
    assert not other.any()
    told = [one.message for one in caplog.records]
    assert any("the grammar of request 2 breaks off its output" in one for one in told)


def test_a_row_whose_grammar_has_failed_ends_and_is_not_complete(masks, vocab_size, tokenizer):
    """A dead end within a grammar, beside a row that goes on and one that is complete."""
    dead_end = json.dumps({"grammars": [{"lark_grammar": 'start: "b" a\na: a "x"'}]})
    ids = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in ("b", "yes", "y")}
    rows = [
        Row(number, 0, 5, SamplingParams(constraint=grammar, max_tokens=9), frozenset([EOS]), "h:1")
        for number, grammar in enumerate([dead_end, grammar_of("choice"), grammar_of("choice")])
    ]
    for row, text in zip(rows, ("b", "yes", "y"), strict=True):
        row.output_ids = ids[text]
    allowed = begin_masks(masks, rows).result(60)
    assert allowed.any(dim=1).tolist() == [False, True, True]
    sampled = sample(rows, torch.zeros((3, vocab_size)), allowed)
    reasons = [
        row.commit(token_id).finish_reason for row, (token_id, _) in zip(rows, sampled, strict=True)
    ]
    assert reasons == [FinishReason.INVALID, FinishReason.STOP, None]


def test_matchers_that_are_not_used_are_forgotten(masks, monkeypatch):
    monkeypatch.setattr("data_plane.instance.grammar._MAX_MATCHERS", 3)
    grammar = grammar_of("choice")
    first = mask_of(masks, 0, grammar, [])
    for number in range(9):
        mask_of(masks, number, grammar, [])
    assert [key[:2] for key in masks._kept] == [(6, 0), (7, 0), (8, 0)]
    assert torch.equal(mask_of(masks, 0, grammar, []), first)


def test_rows_without_a_constraint_ask_for_no_mask():
    asked = []
    recorder = SimpleNamespace(begin=asked.append)
    rows = [Row(n, 0, 5, SamplingParams(), frozenset(), "h:1") for n in range(3)]
    assert begin_masks(recorder, rows) is None and asked == []
    rows[1].params = SamplingParams(constraint=grammar_of("regex"))
    begin_masks(recorder, rows)
    assert [[row.request_id for row in wanted] for wanted in asked] == [[1]]


def test_without_a_tokenizer_or_an_end_of_sequence_there_are_none(tmp_path, tiny_checkpoint):
    assert load_grammar_masks(tmp_path, 10, (EOS,)) is None
    assert load_grammar_masks(tiny_checkpoint, 10, ()) is None


def test_a_grammar_is_compiled_once_and_its_rows_do_not_meet(masks, vocab_size, tokenizer):
    grammar = grammar_of("regex")
    output = sampled(masks, vocab_size, tokenizer, "regex", 7)
    (compiled,) = masks._compiled.values()
    for end in range(len(output)):
        mask_of(masks, 108, grammar, [])
        assert mask_of(masks, 107, grammar, output[:end])[output[end]]
    assert list(masks._compiled.values()) == [compiled]
    fresh = mask_of(masks, 109, grammar, [])
    assert torch.equal(fresh, mask_of(masks, 108, grammar, []))
