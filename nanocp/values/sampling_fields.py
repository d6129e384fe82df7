"""The table of sampling parameters: each with its type, default, bounds and help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, NamedTuple, get_type_hints

MAX_CHOICES = 128
"""Choices of one request, as in OpenAI's API."""
MAX_LOGPROBS = 20
"""Most likely tokens that are reported beside each one."""
MAX_PENALTY = 2.0
"""Bound of presence_penalty and frequency_penalty, either way."""
NUM_SEEDS = 1 << 63
"""Seeds are below this."""


class Bounds(NamedTuple):
    """The range of a number."""

    sentence: str
    """Follows "it must be"."""
    low: float
    high: float = math.inf
    excludes_low: bool = False

    def check(self, name: str, value: float) -> None:
        """Raises ValueError, naming the field, for a number out of bounds or not finite."""
        is_above = value > self.low if self.excludes_low else value >= self.low
        if not (is_above and value <= self.high and value < math.inf):
            raise ValueError(f"{name} is {value}; it must be {self.sentence}")


_PENALTY = Bounds(f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}", -MAX_PENALTY, MAX_PENALTY)
_LOGPROBS = Bounds(f"from 0 to {MAX_LOGPROBS}", 0, MAX_LOGPROBS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingControls:
    """Numbers that shape a row's distribution, the same from client to sampler."""

    temperature: Annotated[float, Bounds("a finite number, 0 (greedy) or more", 0)] = 0.0
    """Divides the logits; 0 is greedy."""
    top_k: Annotated[int, Bounds("0 (all tokens) or more", 0)] = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: Annotated[float, Bounds("above 0 and at most 1", 0, 1, True)] = 1.0
    """Sample from the smallest set of tokens whose probability reaches this, above 0 to 1."""
    min_p: Annotated[float, Bounds("from 0 (all tokens) to 1", 0, 1)] = 0.0
    """Sample from tokens at least this many times as likely as the most likely one, 0 to 1."""
    repetition_penalty: Annotated[float, Bounds("a finite number above 0", 0, math.inf, True)] = 1.0
    """Divides positive logits of tokens in the prompt or the output, multiplies negative ones."""
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    """Subtracted from the logits of tokens that the output has, -2 to 2."""
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    """Subtracted from a token's logit once for each time that the output has it, -2 to 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest(SamplingControls):
    """Sampling parameters of a client, with their defaults."""

    n: Annotated[int, Bounds(f"from 1 to {MAX_CHOICES}", 1, MAX_CHOICES)] = 1
    """Choices: outputs of one prompt. More than one needs a temperature above 0."""
    max_tokens: Annotated[int | None, Bounds("at least 1", 1)] = 16
    """Most tokens to generate."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many tokens; 0 to max_tokens."""
    seed: Annotated[int | None, Bounds("from 0 to 2**63 - 1", 0, NUM_SEEDS - 1)] = None
    """Equal seeds give equal tokens. Absent: drawn, for each choice."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the request."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence tokens."""
    stop: Sequence[str] = ()
    """Texts that end the request."""
    include_stop_str_in_output: bool = False
    """Keep the stop text at the end of the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token ids and what is added to their logits, -100 to 100."""
    bad_words: Sequence[str] = ()
    """Words that are not generated."""
    json_schema: str | None = None
    """The output is JSON of this schema, which is JSON itself."""
    regex: str | None = None
    """The output matches this regular expression, all of it."""
    choice: Sequence[str] = ()
    """The output is one of these texts."""
    grammar: str | None = None
    """The output is of this grammar: Lark, or GBNF as vLLM has it."""
    json_object: bool = False
    """The output is a JSON object."""
    structural_tag: str | None = None
    """The output is text with tags, whose insides follow schemas; vLLM's form, as JSON."""
    logprobs: Annotated[int | None, _LOGPROBS] = None
    """Report each token's log probability and those of this many most likely ones, 0 to 20."""
    prompt_logprobs: Annotated[int | None, _LOGPROBS] = None
    """Report the same for each prompt token but the first, 0 to 20."""


CONTROLS = tuple(field.name for field in fields(SamplingControls))
"""Names of the distribution's controls."""

CONSTRAINTS = ("json_schema", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Names of constraints of structured output; a request has one at most."""

BOUNDS: dict[str, Bounds] = {
    name: bounds
    for name, hint in get_type_hints(SamplingRequest, include_extras=True).items()
    for bounds in getattr(hint, "__metadata__", ())
}
"""Bounds by the parameter's name."""


def check_bounds(name: str, value: float | None) -> None:
    """Raises ValueError, naming the parameter, if its value is out of bounds; None never is."""
    if value is not None:
        BOUNDS[name].check(name, value)
