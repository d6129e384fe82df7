"""Long texts: a sound lower bound of their tokens, and nobody waits while they are tokenized."""

import asyncio
import json
import threading
import time
from contextlib import suppress

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from control_plane.frontend.text import long_texts
from control_plane.frontend.text.long_texts import LeastTokens, in_thread
from control_plane.frontend.text.tokenizer import Tokenizer, load_tokenizer
from harness.paths import ROOT
from harness.services.frontend_fakes import TOKENIZER

TALE = load_tokenizer(ROOT / "models/tale")
assert TALE is not None


def changed(**parts: object) -> Tokenizer:
    """models/tale's tokenizer with other parts."""
    description = json.loads((ROOT / "models/tale/tokenizer.json").read_text()) | parts
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(description)))


COMPOSING = changed(normalizer={"type": "NFC"})
SPLITTING = changed(
    pre_tokenizer={
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated",
             "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False},
        ],
    }
)  # fmt: skip


def sentencepiece(byte_fallback: bool = True, **parts: object) -> Tokenizer:
    """A tokenizer as Llama-2 and Mixtral have it, with some words and runs of spaces."""
    characters = [chr(number) for number in range(0x20, 0x7F)] + [*"\u2581é\u3042"]
    chosen = ["\u2581" * 2, "\u2581" * 4, "th", "the", "\u2581the", "\u2581o", "on", "ce"]
    tokens = ["<unk>", "\u2581<PRE>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*characters[1:], *chosen]
    pairs = ["\u2581 \u2581", "\u2581\u2581 \u2581\u2581", "t h", "th e", "\u2581 the", "\u2581 o",
             "o n", "c e"]  # fmt: skip
    to_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    description: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [
            {"id": 1, "content": "\u2581<PRE>", "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True},
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, to_spaces],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": byte_fallback,
            "vocab": {token: number for number, token in enumerate(tokens)}, "merges": pairs,
        },
    }  # fmt: skip
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(description | parts)))


METASPACE = sentencepiece(
    added_tokens=[],
    normalizer=None,
    pre_tokenizer={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first",
                   "split": False},
)  # fmt: skip
WORDS = st.sampled_from(
    ["a", " the", "once upon a time", "  ", "\n", "😀", "é", "e\u0301", "\u212b", "<eos>", "<bos>",
     "\ud7ff", "ﬁ", "x" * 40, "0123456789", " little",
     "    ", "\u2581", "\u2581\u2581", "\u2581<PRE>", "\u3042"]
)  # fmt: skip


@pytest.mark.parametrize(
    "tokenizer", [TALE, TOKENIZER, COMPOSING, SPLITTING, sentencepiece(), METASPACE]
)
def test_no_text_has_fewer_tokens_than_the_bound(tokenizer):
    @given(st.lists(WORDS | st.text(max_size=20), max_size=60).map("".join))
    def run(text: str) -> None:
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))

    run()
    # It is of use: within a small factor of what the text really has.
    text = (ROOT / "README.md").read_text()
    assert tokenizer.least_tokens(text) > len(tokenizer.encode(text)) / 8


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed",
                           "invert": False}},
        {"truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst",
                        "stride": 0}},
        {"added_tokens": [{"id": 0, "content": "<bos>", "single_word": False, "lstrip": True,
                           "rstrip": False, "normalized": False, "special": True}]},
    ],
)  # fmt: skip
def test_a_tokenizer_that_may_drop_text_has_no_bound(parts):
    assert changed(**parts).least_tokens("once upon a time " * 1000) == 0


@pytest.mark.parametrize("parts", [
    {"byte_fallback": False},
    {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
    {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
])  # fmt: skip
def test_one_of_sentencepiece_that_may_drop_text_has_none(parts):
    assert sentencepiece(**parts).least_tokens("once upon a time " * 1000) == 0  # type: ignore[arg-type]


def test_a_byte_that_is_no_token_weighs_nothing():
    description = {"normalizer": None, "pre_tokenizer": None, "added_tokens": [],
                   "truncation": None, "decoder": None, "model": {"type": "BPE"}}  # fmt: skip
    assert LeastTokens(description, [b"a", b"ab", b"abc"]).of("abab" * 6 + "a") == 13 // 3


def test_others_run_while_a_long_text_is_tokenized_and_back():
    text = "a " * 100_000
    TALE.encode("the library's first call is another one")
    ids = TALE.encode(text)
    for work, argument in ((TALE.encode, text), (TALE.decode, ids)):
        thread = threading.Thread(target=work, args=(argument,))
        thread.start()
        num_turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            num_turns += 1
        assert num_turns >= 5, work


def test_a_short_text_waits_for_no_long_one_and_long_ones_wait_for_each_other():
    release, running = threading.Event(), []

    def long() -> None:
        running.append(1)
        release.wait(60)

    async def run() -> None:
        size = long_texts._LONG_TEXT_CHARACTERS + 1
        tasks = [asyncio.create_task(in_thread(size, False, long)) for _ in range(8)]
        grammars = [asyncio.create_task(in_thread(1, True, release.wait, 60)) for _ in range(8)]
        while not running:
            await asyncio.sleep(0.001)
        assert [await in_thread(1, False, sum, (n, 1)) for n in range(9)] == [*range(1, 10)]
        assert len(running) == 1
        gone = tasks.pop()  # One whose client has gone is not begun.
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        release.set()
        await asyncio.gather(*tasks, *grammars)
        assert len(running) == 7

    asyncio.run(run())


def test_a_word_that_cannot_fit_is_not_tokenized(monkeypatch):
    from control_plane.frontend.client_request import ClientRequest
    from control_plane.frontend.validation import ModelLimits, validated

    monkeypatch.setattr(TALE, "encode", lambda *_, **__: pytest.fail("it is tokenized"))
    for fields, sentence in (
        ({"prompt": "a " * 9_000}, "prompt has at least 1.* tokens, and the output needs one"),
        ({"prompt": "a", "bad_words": ["a" * 90_000]}, "bad_words has at least .* at most 512"),
    ):
        request = ClientRequest(prompt_field="prompt", **fields)
        with pytest.raises(ValueError, match=sentence):
            validated(request, ModelLimits(2048, 1000, (1,)), TALE)


def test_a_checkpoint_is_opened_with_its_bound(tmp_path):
    (tmp_path / "tokenizer.json").write_text((ROOT / "models/tale/tokenizer.json").read_text())
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.least_tokens("a " * 1000) > 50
