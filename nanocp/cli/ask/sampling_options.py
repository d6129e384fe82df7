"""Options of the sampling parameters, for every command that sends requests.

Enters: nanocp.values.sampling_fields. Leaves: an option for each parameter. Does not know:
commands.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nanocp.cli.options.typed import FieldOptions, field_option
from nanocp.values.sampling_fields import CONTROLS, SamplingRequest

_ONE_OF_SEVERAL = {"stop_token_ids": "stop_token_id", "bad_words": "bad_word"}
"""Options that may be given again are in the singular."""

ALL = FieldOptions(
    field_option(
        SamplingRequest,
        field.name,
        name=_ONE_OF_SEVERAL.get(field.name, ""),
        metavar="ID:BIAS" if field.name == "logit_bias" else None,
    )
    for field in fields(SamplingRequest)
)
CONTROLS_ONLY = FieldOptions(
    field_option(SamplingRequest, name, shows_default=False) for name in CONTROLS
)
"""The options of `vllm bench serve`; their defaults are the measured service's."""


def read_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """The options as nanocp.client takes them.

    Raises ValueError for a --logit-bias that is not ID:BIAS.
    """
    if "logit_bias" not in given:
        return given
    return given | {"logit_bias": dict(map(_read_bias, given["logit_bias"]))}


def _read_bias(option: str) -> tuple[int, float]:
    token_id, _, bias = option.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"--logit-bias is {option!r}; it must be ID:BIAS, as in 42:-1.5") from None
