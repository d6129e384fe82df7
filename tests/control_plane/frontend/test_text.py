"""Texts of single tokens are together the text of all tokens, whichever these are."""

import json
from base64 import b64decode, b64encode
from pathlib import Path
from random import Random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from control_plane.frontend.client_request import ClientRequest
from control_plane.frontend.text.constraint import constraint_of
from control_plane.frontend.text.tokenizer import (
    Detokenizer,
    OutputText,
    StopStrings,
    Tokenizer,
    load_tokenizer,
)
from data_plane.instance.grammar import MaskedRow, load_grammar_masks
from harness.services.frontend_fakes import byte_level

CORPUS = [
    "the quick brown fox", "na\u00efve caf\u00e9 \u2615 \u4f60\u597d, \u4e16\u754c",
    "\U0001f642\U0001f643 family: \U0001f468\u200d\U0001f469\u200d\U0001f467", "0123456789",
    "x = y + 1\n\t" * 3,
]  # fmt: skip


LIBRARY = byte_level(CORPUS * 3, 400)
# Ordinary added tokens keep their text: one in the byte alphabet, one with a space, one with other
# characters.
LIBRARY.add_tokens([AddedToken("<think>", special=False), "two words", "\u6f22\u5b57"])
TOKENIZER = Tokenizer(LIBRARY)
IDS = st.integers(0, LIBRARY.get_vocab_size() + 20)


def streamed(chunks: list[list[int]]) -> str:
    detokenizer = Detokenizer(TOKENIZER)
    return "".join(detokenizer.feed(chunk) for chunk in chunks) + detokenizer.flush()


@given(st.lists(st.lists(IDS, max_size=5), max_size=30))
def test_streamed_text_is_the_text_of_all_ids(chunks):
    assert streamed(chunks) == LIBRARY.decode([token_id for chunk in chunks for token_id in chunk])


@given(st.text(max_size=40))
def test_streamed_text_of_an_encoded_text_is_that_text(text):
    text = text.replace("<s>", "").replace("</s>", "")
    assert streamed([[token_id] for token_id in TOKENIZER.encode(text)]) == text


def test_an_incomplete_character_stays_back_until_it_is_complete():
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
    """Ids of a repetitive text in pieces of any size, and stop strings."""
    pieces = draw(st.lists(
        st.sampled_from(["a", "b", "ab", "ba", "the quick", "\u2615", "fox", "=\n\t"]), min_size=1,
    ))  # fmt: skip
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
def test_text_ends_at_the_first_stop_string_wherever_tokens_are_cut(output, every):
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


def test_of_stop_strings_that_end_together_the_first_named_counts():
    for strings, left in ((("ab", "b"), "x"), (("b", "ab"), "xa")):
        text = OutputText(TOKENIZER, StopStrings(strings), 0)
        (*first, last) = TOKENIZER.encode("xab")
        assert [text.feed(token_id) for token_id in first] == [False] * len(first)
        assert text.feed(last) and text.take_new() == left


def test_special_tokens_are_not_text():
    assert streamed([[LIBRARY.token_to_id("<s>")], [LIBRARY.token_to_id("<think>")]]) == "<think>"


def test_a_checkpoint_without_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_a_checkpoint_with_a_tokenizer_uses_it(tmp_path):
    LIBRARY.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("the quick") == LIBRARY.encode("the quick").ids


def sentencepiece(*, strips: bool) -> tokenizers.Tokenizer:
    """A tokenizer in the manner of Llama-2's, Mixtral's (strips) and Gemma's."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["\u2581", *"theuickfx", "\u2581t", "th", "\u2581th", "\u2581the", "\u4f60"]
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "<s>", *pieces])}
    merges = [("\u2581", "t"), ("t", "h"), ("\u2581t", "h"), ("\u2581th", "e")]
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    made.add_special_tokens(["<s>"])
    made.add_tokens([AddedToken("<think>", special=False)])
    return made


@pytest.mark.parametrize("strips", [True, False])
@given(st.lists(st.integers(0, 290) | st.integers(258, 290), max_size=30))
def test_tokens_of_sentencepiece_are_pieces_of_utf8(strips, ids):
    library = sentencepiece(strips=strips)
    detokenizer = Detokenizer(Tokenizer(library))
    text = "".join(detokenizer.feed([token_id]) for token_id in ids) + detokenizer.flush()
    # Behind a word nothing is stripped.
    before = library.encode("the").ids
    whole = library.decode(before + ids)[len(library.decode(before)) :]
    # The library marks every byte of neighbours that are no text together.
    assert "\ufffd" in whole or text == whole
    assert "\ufffd" in text or text == whole


def test_a_text_of_sentencepiece_is_read_and_written(tmp_path):
    sentencepiece(strips=True).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode("the quick \u4f60 \U0001f642\n")
    assert tokenizer.decode(ids) == "the quick \u4f60 \U0001f642\n"
    assert Detokenizer(tokenizer).feed(ids) == " the quick \u4f60 \U0001f642\n"
    assert tokenizer.token_bytes(tokenizer.encode("\n")[-1]) == b"\n"


def ranked(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Ids of one piece as tiktoken makes them: the pair of the lowest rank is merged first."""
    pieces = [bytes([byte]) for byte in text.encode()]
    while pairs := {
        rank: at
        for at in reversed(range(len(pieces) - 1))
        if (rank := ranks.get(pieces[at] + pieces[at + 1])) is not None
    }:
        at = pairs[min(pairs)]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [ranks[piece] for piece in pieces]


KIMI_WORDS = ["abcde", "bcd", "cab", " abc", "\u4f60\u597d", "na\u00efve", "12", "\n\n", "It", "'s"]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a vocabulary in Kimi's form: every byte, and some beginnings of words."""
    folder = tmp_path_factory.mktemp("kimi")
    longer = {word.encode()[:end] for word in KIMI_WORDS for end in range(2, 12)}
    longer = {piece for piece in longer if len(piece) > 1}
    pieces = [bytes([byte]) for byte in range(256)] + sorted(
        longer, key=lambda p: (len(p), p[::-1])
    )
    lines = (f"{b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces))
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {str(len(pieces)): {"content": "[BOS]", "special": True},
             str(len(pieces) + 1): {"content": "<think>", "special": False}}  # fmt: skip
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_kimis_vocabulary_makes_the_tokens_that_tiktoken_makes(kimi):
    tokenizer = load_tokenizer(kimi)
    assert tokenizer is not None and "<think>" in tokenizer.added_tokens
    lines = (kimi / "tiktoken.model").read_text().splitlines()
    ranks = {b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
    random = Random(5)
    for _ in range(300):
        word = "".join(random.choices("abcde", k=random.randint(1, 9)))
        assert tokenizer.encode(word) == ranked(word, ranks), word
    split = [
        "It's", " abc", " \u4e16", "\u754c\u4f60", "na\u00efve", "123", "45", " !", "\n\n", "  ",
        " x",
    ]  # fmt: skip
    # Han characters stand for themselves, also behind a space.
    split[2:4] = [" ", "\u4e16\u754c\u4f60"]
    assert tokenizer.encode("".join(split)) == [i for one in split for i in ranked(one, ranks)]
    assert tokenizer.decode(tokenizer.encode("[BOS]<think>x")) == "[BOS]<think>x"


def test_a_vocabulary_of_ranks_that_is_not_kimis_is_refused(kimi, tmp_path):
    (tmp_path / "tiktoken.model").write_bytes((kimi / "tiktoken.model").read_bytes())
    with pytest.raises(ValueError, match=r"tiktoken.model cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "QWenTokenizer"}')
    with pytest.raises(ValueError, match="must be TikTokenTokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("make", ["sentencepiece", "kimi"])
def test_a_form_holds_with_each_kind_of_tokenizer(make, kimi, tmp_path):
    """The masks of a digit, of bytes that stand for themselves and of a whole word."""
    if make == "sentencepiece":
        sentencepiece(strips=True).save(str(tmp_path / "tokenizer.json"))
    folder = kimi if make == "kimi" else tmp_path
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    masks = load_grammar_masks(folder, 300 if make == "sentencepiece" else 330, [1])
    assert masks is not None
    grammar = constraint_of(ClientRequest("x", "prompt", regex="the \u4f60\n"), 9999, True)
    output: list[int] = []
    while 1 not in output:
        (allowed,) = masks.masks([MaskedRow(1, 0, grammar, output)]).nonzero(as_tuple=True)[1:]
        output.append(int(allowed[-1]))
    assert Detokenizer(tokenizer).feed(output[:-1]) == "the \u4f60\n"


def test_a_tokenizer_that_cannot_stream_exactly_is_refused(tmp_path):
    other = json.loads(LIBRARY.to_str())
    other["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(
        ValueError, match=r"tokenizer.json cannot be used: the tokenizer's decoder is Fuse of Fuse"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be used"):
        load_tokenizer(tmp_path)
