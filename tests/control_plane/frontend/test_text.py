"""Texts of single tokens are together the text of all tokens, whichever these are."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from control_plane.frontend.tokenizer import (
    Detokenizer,
    OutputText,
    StopStrings,
    Tokenizer,
    load_tokenizer,
)

CORPUS = [
    "the quick brown fox",
    "na\u00efve caf\u00e9 \u2615 \u4f60\u597d, \u4e16\u754c",
    "\U0001f642\U0001f643 family: \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "0123456789",
    "x = y + 1\n\t" * 3,
]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
        ),
    )
    # Ordinary added tokens keep their text: one in the byte alphabet, one with a space, one with
    # other characters.
    tokenizer.add_tokens([AddedToken("<think>", special=False), "two words", "\u6f22\u5b57"])
    return tokenizer


LIBRARY = byte_level()
TOKENIZER = Tokenizer(LIBRARY)
IDS = st.integers(0, LIBRARY.get_vocab_size() + 20)


def streamed(chunks: list[list[int]]) -> str:
    detokenizer = Detokenizer(TOKENIZER)
    return "".join(detokenizer.feed(chunk) for chunk in chunks) + detokenizer.flush()


@given(st.lists(st.lists(IDS, max_size=5), max_size=30))
def test_streamed_text_is_the_text_of_all_ids(chunks: list[list[int]]) -> None:
    assert streamed(chunks) == LIBRARY.decode([token_id for chunk in chunks for token_id in chunk])


@given(st.text(max_size=40))
def test_streamed_text_of_an_encoded_text_is_that_text(text: str) -> None:
    text = text.replace("<s>", "").replace("</s>", "")
    assert streamed([[token_id] for token_id in TOKENIZER.encode(text)]) == text


def test_an_incomplete_character_stays_back_until_it_is_complete() -> None:
    ids = [
        LIBRARY.token_to_id(character) for character in "\u00f0\u0141\u013b\u0124"
    ]  # The four bytes of one character.
    single = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate("\u00f0\u0141\u013b\u0124!")}, merges=[])
    )
    single.decoder = decoders.ByteLevel()
    detokenizer = Detokenizer(Tokenizer(single))
    assert all(token_id is not None for token_id in ids)
    assert [detokenizer.feed([i]) for i in (0, 1, 2, 3, 4)] == ["", "", "", "\U0001f642", "!"]
    assert [detokenizer.feed([0, 1]), detokenizer.flush()] == ["", "\ufffd"]


@st.composite
def stopped_outputs(draw: st.DrawFn) -> tuple[list[int], StopStrings, int]:
    """Ids of a repetitive text in pieces of any size, and stop strings.

    Some stop strings are in the text and some are not.
    """
    pieces = draw(
        st.lists(
            st.sampled_from(["a", "b", "ab", "ba", "the quick", "\u2615", "fox", "=\n\t"]),
            min_size=1,
        )
    )
    ids = [token_id for piece in pieces for token_id in TOKENIZER.encode(piece)] + draw(
        st.lists(IDS, max_size=3)
    )
    text = streamed([ids])
    slices = st.tuples(st.integers(0, len(text)), st.integers(1, 7)).map(
        lambda s: text[s[0] : s[0] + s[1]]
    )
    strings = draw(
        st.lists(slices.filter(bool) | st.text("ab\n", min_size=1, max_size=4), max_size=4)
    )
    return ids, StopStrings(tuple(strings), draw(st.booleans())), draw(st.integers(0, 6))


def first_stop(ids: list[int], stop: StopStrings, min_tokens: int) -> tuple[int, str] | None:
    """(tokens up to the stop, text up to it), by looking at the whole text after every token."""
    for num_tokens in range(min_tokens + 1, len(ids) + 1):
        before, text = (
            Detokenizer(TOKENIZER).feed(ids[:count]) for count in (num_tokens - 1, num_tokens)
        )
        for end in range(len(before) + 1, len(text) + 1):
            for string in stop.strings:
                if text[:end].endswith(string):
                    return num_tokens, text[: end if stop.is_included else end - len(string)]
    return None


@settings(max_examples=300)
@given(stopped_outputs(), st.integers(1, 4))
def test_text_ends_at_the_first_stop_string_wherever_tokens_are_cut(
    output: tuple[list[int], StopStrings, int], every: int
) -> None:
    ids, stop, min_tokens = output
    expected = first_stop(ids, stop, min_tokens)
    text, taken = OutputText(TOKENIZER, stop, min_tokens), ""
    for num_tokens, token_id in enumerate(ids, 1):
        is_stopped = text.feed(token_id)
        assert is_stopped == (expected is not None and num_tokens == expected[0])
        if num_tokens % every == 0:
            taken += text.take_new()
        if is_stopped:
            break
        so_far = Detokenizer(TOKENIZER).feed(ids[:num_tokens])
        if num_tokens % every == 0:
            held = so_far[len(taken) :]
            assert so_far.startswith(taken)
            assert not held or any(string.startswith(held) for string in stop.strings), (
                "it is held back for a reason"
            )
    taken += text.take_new() + text.flush()
    assert taken == (streamed([ids]) if expected is None else expected[1])
    assert text.take_new() == text.flush() == "" or expected is None


def test_of_stop_strings_that_end_together_the_first_named_counts() -> None:
    for strings, left in ((("ab", "b"), "x"), (("b", "ab"), "xa")):
        text = OutputText(TOKENIZER, StopStrings(strings), 0)
        (*first, last) = TOKENIZER.encode("xab")
        assert [text.feed(token_id) for token_id in first] == [False] * len(first)
        assert text.feed(last) and text.take_new() == left


def test_special_tokens_are_not_text() -> None:
    assert streamed([[LIBRARY.token_to_id("<s>")], [LIBRARY.token_to_id("<think>")]]) == "<think>"


def test_a_checkpoint_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_a_checkpoint_with_a_tokenizer_uses_it(tmp_path: Path) -> None:
    LIBRARY.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("the quick") == LIBRARY.encode("the quick").ids


def test_a_tokenizer_that_cannot_stream_exactly_is_refused(tmp_path: Path) -> None:
    other = json.loads(LIBRARY.to_str())
    other["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(
        ValueError, match=r"tokenizer.json cannot be used: the tokenizer's decoder is Fuse"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be used"):
        load_tokenizer(tmp_path)
