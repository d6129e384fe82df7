"""Requests of a benchmark: prompts, output lengths and, for a trace, times.

Random lengths and ShareGPT's filter follow vLLM (vllm/benchmarks/datasets.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import nextafter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

from nanocp.bench.names import DATASETS, GO_ON, OTHER_DATASETS, TRACES
from nanocp.config.choices import Bounds, Natural, Positive, at_least, check_fields, check_one_of
from nanocp.simulator.loads.request_logs import read_trace
from nanocp.simulator.loads.workload import SHORT_LENGTHS, draw_len, draw_output_len

if TYPE_CHECKING:
    import tokenizers

_SHAREGPT_MIN_TOKENS, _SHAREGPT_MAX_PROMPT, _SHAREGPT_MAX_TOTAL = 4, 1024, 2048
# The text of drawn ids is read back as other ids; each round makes their number more nearly right.
_ROUND_TRIPS = 10
_FACTOR = Bounds("above 0", 0, excludes_low=True)


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request of a dataset."""

    prompt: str | tuple[int, ...]
    prompt_len: int
    """Tokens."""
    output_len: int
    at_s: float | None = None
    """From the first request; None: the rate decides."""


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Requests to send; `nanocp bench serve` has an option or a setting for each field."""

    name: str = "random"
    """random, sharegpt, custom, prefix_repetition, mooncake or azure: source of the requests."""
    path: Path | None = None
    """A trace, ShareGPT's JSON, or custom's lines of JSON with a prompt each; sharegpt without it:
    random prompts of its lengths."""
    num_prompts: Positive = 1000
    """Requests; a trace may have fewer."""
    seed: int = 0
    """Seed of prompts and arrivals."""
    random_input_len: Positive = 1024
    """random: tokens of a prompt."""
    random_output_len: Positive = 128
    """random: tokens of an output."""
    input_len: Annotated[int | None, at_least(1)] = None
    """random: the same as random_input_len."""
    output_len: Annotated[int | None, at_least(1)] = None
    """Tokens to generate, of any dataset; by default 256 for custom, 128 for other generated
    prompts, else the dataset's own."""
    random_range_ratio: Annotated[float, Bounds("from 0 to below 1", 0, nextafter(1, 0))] = 0.0
    """random: lengths vary by this share, 0 to below 1."""
    random_prefix_len: Natural = 0
    """random: tokens of a common prefix, beyond the input length."""
    random_vocab_size: Annotated[int, at_least(4)] = 256
    """Prompts without a tokenizer are ids below this."""
    prefix_repetition_prefix_len: Positive = 256
    """prefix_repetition: tokens of a shared prefix."""
    prefix_repetition_suffix_len: Positive = 256
    """prefix_repetition: tokens of a prompt after the prefix."""
    prefix_repetition_num_prefixes: Positive = 10
    """prefix_repetition: prefixes, over which the prompts are spread evenly."""
    length_scale: Annotated[float, _FACTOR] = 1.0
    """Factor on the prompt lengths of traces and of sharegpt without a file."""
    time_scale: Annotated[float, _FACTOR] = 1.0
    """Factor on a trace's gaps: 0.5 is twice as fast."""

    def __post_init__(self) -> None:
        if instead := OTHER_DATASETS.get(self.name):
            raise ValueError(f"--dataset-name {self.name!r} of vLLM is not here: {instead}")
        check_one_of(DATASETS, **{"--dataset-name": self.name})
        if self.name in (*TRACES, "custom") and self.path is None:
            raise ValueError(f"--dataset-name {self.name} needs --dataset-path, its file")
        if self.name in GO_ON and self.path is not None:
            raise ValueError(
                f"--dataset-name {self.name} makes its prompts; "
                f"--dataset-path {self.path} has no meaning"
            )
        check_fields(self, lambda name: f"--{name.replace('_', '-')}")


def sample_requests(
    options: DatasetOptions, tokenizer: tokenizers.Tokenizer | None
) -> list[SampleRequest]:
    """The requests of a dataset; equal options give equal requests.

    Raises ValueError for an unusable file.
    """
    make = {
        "random": _random,
        "prefix_repetition": _repeated_prefixes,
        "custom": _custom,
        "sharegpt": _sharegpt if options.path else _sharegpt_shaped,
    }.get(options.name, _trace)
    requests = [*make(options, Random(options.seed), tokenizer)]
    if not requests:
        raise ValueError(f"{options.path} has no request that could be sent")
    return requests


def _random(options: DatasetOptions, random: Random, tokenizer: Any) -> Iterator[SampleRequest]:
    prefix = _ids(options.random_prefix_len, random, options, tokenizer)

    def length(of: int) -> int:
        ratio = options.random_range_ratio
        return max(1, random.randint(int(of * (1 - ratio)), int(of * (1 + ratio))))

    for _ in range(options.num_prompts):
        num_tokens = length(options.input_len or options.random_input_len)
        ids = (*prefix, *_ids(num_tokens, random, options, tokenizer))
        output_len = length(options.output_len or options.random_output_len)
        yield SampleRequest(ids, len(ids), output_len)


def _repeated_prefixes(
    options: DatasetOptions, random: Random, tokenizer: Any
) -> list[SampleRequest]:
    prefixes = [
        _ids(options.prefix_repetition_prefix_len, random, options, tokenizer)
        for _ in range(options.prefix_repetition_num_prefixes)
    ]
    requests = []
    for number in range(options.num_prompts):
        suffix = _ids(options.prefix_repetition_suffix_len, random, options, tokenizer)
        ids = (*prefixes[number % len(prefixes)], *suffix)
        requests.append(SampleRequest(ids, len(ids), options.output_len or 128))
    random.shuffle(requests)
    return requests


def _custom(options: DatasetOptions, random: Random, tokenizer: Any) -> Iterator[SampleRequest]:
    """The first lines of a file: {"prompt": text}, and "output_tokens" if lengths differ."""
    assert options.path is not None
    if tokenizer is None:
        raise ValueError("--dataset-name custom needs --tokenizer, to count its tokens")
    try:
        lines = options.path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{options.path} cannot be read: {error}") from error
    for number, line in enumerate(filter(str.strip, lines), start=1):
        if number > options.num_prompts:
            return
        try:
            entry = json.loads(line)
            prompt, output_len = str(entry["prompt"]), int(entry.get("output_tokens", 256))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f'{options.path}: line {number} must be a JSON object with "prompt": {error!r}'
            ) from error
        prompt_len = len(tokenizer.encode(prompt).ids)
        yield SampleRequest(prompt, prompt_len, options.output_len or output_len)


def _sharegpt_shaped(
    options: DatasetOptions, random: Random, tokenizer: Any
) -> Iterator[SampleRequest]:
    """Lengths of ShareGPT-4o (Table 1 of the paper)."""
    for _ in range(options.num_prompts):
        num_tokens = max(1, round(draw_len(random, SHORT_LENGTHS) * options.length_scale))
        output_len = options.output_len or draw_output_len(random)
        yield SampleRequest(_ids(num_tokens, random, options, tokenizer), num_tokens, output_len)


def _sharegpt(options: DatasetOptions, random: Random, tokenizer: Any) -> list[SampleRequest]:
    """The first two turns of each conversation of ShareGPT's own JSON."""
    assert options.path is not None
    if tokenizer is None:
        raise ValueError(
            "--dataset-name sharegpt with a file needs --tokenizer, to count its tokens"
        )
    try:
        entries = json.loads(options.path.read_text(encoding="utf-8"))
        talks = [[turn["value"] for turn in entry["conversations"]] for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{options.path} is not ShareGPT's JSON, a list of objects with conversations: {error}"
        ) from error
    random.shuffle(talks)
    requests: list[SampleRequest] = []
    for prompt, answer, *_ in (talk for talk in talks if len(talk) >= 2):
        if len(requests) == options.num_prompts:
            break
        prompt_len, answer_len = (len(tokenizer.encode(text).ids) for text in (prompt, answer))
        output_len = options.output_len or answer_len
        is_short = prompt_len < _SHAREGPT_MIN_TOKENS or answer_len < _SHAREGPT_MIN_TOKENS
        if (
            not is_short
            and prompt_len <= _SHAREGPT_MAX_PROMPT
            and prompt_len + output_len <= _SHAREGPT_MAX_TOTAL
        ):
            requests.append(SampleRequest(prompt, prompt_len, output_len))
    return requests


def _trace(options: DatasetOptions, random: Random, tokenizer: Any) -> Iterator[SampleRequest]:
    assert options.path is not None
    for request in read_trace(options.name, options.path).requests[: options.num_prompts]:
        num_tokens = max(1, round(request.prompt_len * options.length_scale))
        yield SampleRequest(
            _ids(num_tokens, random, options, tokenizer),
            num_tokens,
            options.output_len or request.output_len,
            request.arrival_us / 1e6 * options.time_scale,
        )


def _ids(count: int, random: Random, options: DatasetOptions, tokenizer: Any) -> tuple[int, ...]:
    """`count` random ids that survive decoding and encoding, or nearly so."""
    # The first ids of a vocabulary are its special tokens, the last ones often have no text.
    high = options.random_vocab_size if tokenizer is None else int(tokenizer.get_vocab_size() * 0.9)
    ids = random.choices(range(min(3, high - 1), high), k=count)
    for _ in range(0 if tokenizer is None else _ROUND_TRIPS):
        ids = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False).ids
        if len(ids) == count:
            break
        missing = max(0, count - len(ids))
        ids = ids[:count] + random.choices(range(min(3, high - 1), high), k=missing)
    return tuple(ids)
