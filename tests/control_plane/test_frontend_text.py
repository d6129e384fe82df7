"""Texts that come token by token together are the text of all the tokens, whatever the tokens are."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from control_plane.frontend.tokenizer import Detokenizer, Tokenizer, load_tokenizer

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
        CORPUS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    # Ordinary added tokens keep their text: one in the byte alphabet, one with a space, one with other characters.
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
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be used: the tokenizer's decoder is Fuse"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be used"):
        load_tokenizer(tmp_path)
