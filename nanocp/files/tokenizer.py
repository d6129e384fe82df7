"""A checkpoint's tokenizer as the text of a tokenizer.json, also from Kimi's tiktoken.model."""

from __future__ import annotations

import json
from base64 import b64decode
from functools import cache
from pathlib import Path
from typing import Any

_ROLES = [f"{role}_token" for role in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")]
_KIMI_CLASS = "TikTokenTokenizer"
# As in the code that Kimi's folders bring, and in vLLM's tiktoken.rs.
_UPPER, _LOWER = (
    rf"[{cases}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for cases in (r"\p{Lu}\p{Lt}", r"\p{Ll}")
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@cache
def character_of_byte() -> dict[int, str]:
    """The byte-level alphabet: the character of each byte in a vocabulary.

    Printable bytes stand for themselves, the others for the characters from U+0100 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


def tokenizer_json(checkpoint: Path) -> str | None:
    """The text; None if the folder has no tokenizer. Raises ValueError, naming the file.

    Takes seconds for a tiktoken.model.
    """
    path = checkpoint / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    path = checkpoint / "tiktoken.model"
    if not path.is_file():
        return None
    try:
        config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
        if config.get("tokenizer_class") != _KIMI_CLASS:
            raise ValueError(f"tokenizer_class must be {_KIMI_CLASS}, which is Kimi's")
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {b64decode(piece): int(rank) for piece, rank in lines}
        return json.dumps(_byte_pairs(ranks, config.get("added_tokens_decoder", {})))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read with tokenizer_config.json: {error}") from error


def special_tokens(checkpoint: Path) -> dict[str, str]:
    """Texts of the tokens that have a role, such as eos_token. Raises ValueError.

    special_tokens_map.json precedes tokenizer_config.json, unless the latter lists the added tokens
    itself, as in transformers 5.
    """
    named: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = checkpoint / name
        try:
            told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if "added_tokens_decoder" not in named and isinstance(told, dict):
            named |= told
    tokens = ((name, named.get(name)) for name in _ROLES)
    texts = ((name, one["content"] if isinstance(one, dict) else one) for name, one in tokens)
    return {name: text for name, text in texts if text}


def _byte_pairs(ranks: dict[bytes, int], added: dict[str, Any]) -> dict[str, Any]:
    """An equivalent tokenizer.json: a pair is merged in the order of its result."""
    spelled = {piece: "".join(map(character_of_byte().__getitem__, piece)) for piece in ranks}
    pairs = sorted(
        (rank, ranks[left], ranks[right], spelled[left], spelled[right])
        for piece, rank in ranks.items()
        for at in range(1, len(piece))
        if (left := piece[:at]) in ranks and (right := piece[at:]) in ranks
    )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": _KIMI_PATTERN}, "behavior": "Isolated"}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": int(token_id), **plain, "content": one["content"],
             "special": one.get("special", True)}
            for token_id, one in sorted(added.items(), key=lambda item: int(item[0]))
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, byte_level | {"use_regex": False}],
        },
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {spelled[piece]: rank for piece, rank in ranks.items()},
            "merges": [[left, right] for *_, left, right in pairs],
        },
    }  # fmt: skip
