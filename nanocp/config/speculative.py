"""Speculative decoding in vLLM's form, --speculative-config."""

from __future__ import annotations

import json

from nanocp.config.choices import one_of, require

EXAMPLE = '{"method": "mtp", "num_speculative_tokens": 1}'
METHODS = ("mtp", "deepseek_mtp", "glm4_moe_mtp")
"""vLLM's names for the MTP layer of models that run here, the last two older (MTPModelTypes in
vllm/config/speculative.py)."""
_KEYS = ("method", "num_speculative_tokens")


def num_drafts_of(text: str) -> int:
    """Drafts of a row in a step, by default one, for the one MTP layer.

    Raises ValueError naming what the option says and what would be right.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is no JSON ({error}); give '{EXAMPLE}'") from None
    require(
        isinstance(values, dict),
        f"--speculative-config is {text}; it must be an object such as '{EXAMPLE}'",
    )
    for key in values:
        require(
            key in _KEYS,
            f"--speculative-config has {key!r}; it may have {' and '.join(_KEYS)}: the model's own "
            "MTP layer drafts, and each draft is compared with the token that is sampled",
        )
    method, number = values.get("method"), values.get("num_speculative_tokens", 1)
    require(
        method in METHODS,
        f"--speculative-config: method is {json.dumps(method)}; it must be {one_of(METHODS)}, the "
        "MTP layer of the model: nothing else drafts here",
    )
    require(
        type(number) is int and number >= 1,
        f"--speculative-config: num_speculative_tokens is {json.dumps(number)}; it must be a "
        "number from 1 on, and without the option there are no drafts",
    )
    assert isinstance(number, int)
    return number
