"""Requests of a benchmark: lengths, texts and times of each data set, equal for equal options."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from harness.paths import ROOT
from nanocp.bench.dataset import DatasetOptions, SampleRequest, sample_requests
from nanocp.bench.load import due_times

TRACES = ROOT / "benchmarks" / "traces"


def test_random_lengths_are_in_their_range_and_repeat_with_the_seed():
    options = DatasetOptions(
        num_prompts=200,
        input_len=100,
        output_len=20,
        random_range_ratio=0.5,
        random_prefix_len=7,
        seed=3,
    )
    requests = sample_requests(options, None)
    assert (
        requests
        == sample_requests(options, None)
        != sample_requests(replace(options, seed=4), None)
    )
    assert {request.prompt[:7] for request in requests} == {requests[0].prompt[:7]}
    lengths = [request.prompt_len - 7 for request in requests]
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    assert {request.output_len for request in requests} == set(range(10, 31))
    assert all(len(request.prompt) == request.prompt_len for request in requests)


def test_a_trace_is_replayed_at_its_own_times_scaled():
    options = DatasetOptions(
        "mooncake", TRACES / "mooncake_conversation_200.jsonl", 20, length_scale=0.01,
        time_scale=0.5,
    )  # fmt: skip
    requests = sample_requests(options, None)
    lines = [
        json.loads(line)
        for line in (TRACES / "mooncake_conversation_200.jsonl").read_text().splitlines()[:20]
    ]
    assert [request.at_s for request in requests] == [line["timestamp"] / 2000 for line in lines]
    assert [request.output_len for request in requests] == [line["output_length"] for line in lines]
    assert requests[0].prompt_len == round(lines[0]["input_length"] / 100)
    assert due_times(requests, math.inf, 1.0, 0, is_self_timed=True) == [
        request.at_s for request in requests
    ]


def test_sharegpt_takes_short_talks_of_its_file_and_has_a_shape_without(tmp_path):
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    talks = [
        ["a " * 6, "a " * 5],
        ["a " * 3, "a " * 9],
        ["a " * 1100, "a " * 9],
        ["only a question to nobody"],
    ]
    path = tmp_path / "talks.json"
    path.write_text(
        json.dumps([{"conversations": [{"value": turn} for turn in talk]} for talk in talks])
    )
    assert sample_requests(DatasetOptions("sharegpt", path), tokenizer) == [
        SampleRequest("a " * 6, 6, 5)
    ]
    lengths = [
        request.prompt_len
        for request in sample_requests(DatasetOptions("sharegpt", num_prompts=300), None)
    ]
    assert sum(length < 1000 for length in lengths) / 300 == pytest.approx(0.857, abs=0.06)


def test_prefixes_are_repeated_evenly():
    options = DatasetOptions(
        "prefix_repetition", num_prompts=12, prefix_repetition_prefix_len=5,
        prefix_repetition_suffix_len=3, prefix_repetition_num_prefixes=4,
    )  # fmt: skip
    requests = sample_requests(options, None)
    counts = Counter(request.prompt[:5] for request in requests)
    assert sorted(counts.values()) == [3, 3, 3, 3]
    assert len({request.prompt for request in requests}) == 12
    assert {(request.prompt_len, request.output_len) for request in requests} == {(8, 128)}


@pytest.mark.parametrize("name", ["random", "prefix_repetition"])
def test_the_text_of_drawn_ids_is_as_long_as_was_asked(tiny_checkpoint, name):
    """A chat sends texts. vLLM 0.32 makes them as long too; the ids as drawn became 1.7 times."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    options = DatasetOptions(
        name, num_prompts=20, input_len=60, prefix_repetition_prefix_len=40,
        prefix_repetition_suffix_len=20, prefix_repetition_num_prefixes=2,
    )  # fmt: skip
    requests = sample_requests(options, tokenizer)
    texts = [tokenizer.decode(request.prompt) for request in requests]
    lengths = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    assert sum(lengths) == pytest.approx(20 * 60, rel=0.02) and min(lengths) >= 58
    assert all(request.prompt_len == 60 for request in requests) and len({*texts}) == 20


def test_a_file_of_prompts_is_sent_line_by_line(tmp_path, tiny_checkpoint):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b"}\n\n{"prompt": "c", "output_tokens": 7}\n[1]\n')
    options = DatasetOptions("custom", path, num_prompts=2)
    first, second = sample_requests(options, tokenizer)
    assert (first.prompt, first.output_len, second.output_len) == ("a b", 256, 7)
    assert first.prompt_len == len(tokenizer.encode("a b").ids)
    with pytest.raises(ValueError, match="line 3 must be a JSON object with"):
        sample_requests(replace(options, num_prompts=3), tokenizer)
