"""Traces and workloads: what is read, what is refused, and that the histograms are the paper's."""

from itertools import islice, pairwise, takewhile
from statistics import fmean

import pytest

from harness.paths import ROOT
from nanocp.simulator.loads.request_logs import read_trace
from nanocp.simulator.loads.workload import Workload, static_scenario

SAMPLES = ROOT / "benchmarks/traces"
MAX_LEN = 1 << 20


@pytest.mark.parametrize(("line", "named"), [
    ("{", "this is no JSON"),
    ("[1]", "this is list; it must be an object"),
    ('{"input_length": 3, "output_length": 1}', "timestamp is missing"),
    ('{"timestamp": 7, "input_length": 0, "output_length": 1}', "input_length is 0"),
    ('{"timestamp": 7, "input_length": 1.5, "output_length": 1}', "input_length is 1.5"),
    ('{"timestamp": 7, "input_length": "x", "output_length": 1}', "input_length is 'x'"),
    ('{"timestamp": 7, "input_length": true, "output_length": 1}', "input_length is True"),
    ('{"timestamp": 7, "input_length": 3, "output_length": -1}', "output_length is -1"),
    ('{"timestamp": 1, "input_length": 3, "output_length": 1}', "timestamp goes back"),
    ('{"timestamp": 7, "input_length": 3, "output_length": 1, "hash_ids": [-1]}', "hash_ids is"),
    ('{"timestamp": 7, "input_length": 513, "output_length": 1, "hash_ids": [1, 2, 3]}',
     "there are 3 hash_ids"),
])  # fmt: skip
def test_a_malformed_mooncake_line_is_named(tmp_path, line, named):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 5, "input_length": 3, "output_length": 1}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=f"line 3: {named}"):
        read_trace("mooncake", path)


@pytest.mark.parametrize(("line", "named"), [
    ("yesterday,3,1", "TIMESTAMP is 'yesterday'"),
    ("2023-11-16 18:15:47.0000000,,1", "ContextTokens is ''"),
    ("2023-11-16 18:15:47.0000000,3", "GeneratedTokens is None"),
    ("2023-11-16 18:15:45.0000000,3,1", "TIMESTAMP goes back"),
])  # fmt: skip
def test_a_malformed_azure_line_is_named(tmp_path, line, named):
    path = tmp_path / "trace.csv"
    path.write_text(
        f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n{line}\n"
    )
    with pytest.raises(ValueError, match=f"line 3: {named}"):
        read_trace("azure", path)


def test_an_azure_file_without_its_header_and_a_missing_file_are_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(
        ValueError, match="line 1: the header lacks ContextTokens, GeneratedTokens, TIMESTAMP"
    ):
        read_trace("azure", path)
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read"):
        read_trace("mooncake", tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "name", ["mooncake:mooncake_conversation_200.jsonl", "azure:azure_2023_conv_200.csv"]
)
def test_samples_are_scaled_in_time_and_in_length(name):
    kind, _, file = name.partition(":")
    name = f"{kind}:{SAMPLES / file}"
    plain = list(islice(Workload(name, rate_per_s=10).requests(MAX_LEN), 200))
    longer = list(islice(Workload(name, rate_per_s=20, length_scale=8).requests(MAX_LEN), 200))
    assert plain[-1].arrival_us == pytest.approx(20e6, rel=0.001) and plain[0].arrival_us == 0
    assert longer[-1].arrival_us == pytest.approx(10e6, rel=0.001)
    assert [request.prompt_len for request in longer] == [
        8 * request.prompt_len for request in plain
    ]


def test_a_trace_repeats_with_prompts_of_its_own(tmp_path):
    line = '{"timestamp": %d, "input_length": 600, "output_length": 9, "hash_ids": [0, %d]}\n'
    (tmp_path / "t").write_text("".join(line % (7 * i, i % 5) for i in range(20)))
    workload = Workload(f"mooncake:{tmp_path / 't'}", rate_per_s=10)
    played = list(islice(workload.requests(MAX_LEN), 40))
    first, second = played[:20], played[20:]
    assert [r.prompt_len for r in first] == [r.prompt_len for r in second]
    assert second[0].arrival_us == pytest.approx(first[-1].arrival_us + 100_000, abs=2)
    ids = [{number for r in part for number in r.hash_ids} for part in (first, second)]
    assert ids[0] and len(ids[0]) == len(ids[1]) and not ids[0] & ids[1]


def test_a_trace_begins_with_what_would_be_running():
    name = f"azure:{SAMPLES / 'azure_2023_conv_200.csv'}"
    workload = Workload(name, rate_per_s=50, steady_tpot_us=20_000)
    running = list(takewhile(lambda r: r.is_running, workload.requests(MAX_LEN)))
    mean_output = fmean(r.output_len for r in islice(Workload(name, 50).requests(MAX_LEN), 200))
    assert len(running) == pytest.approx(50 * mean_output * 0.020, rel=0.15)
    assert {r.arrival_us for r in running} == {0}
    assert all(1 <= r.output_len == r.max_tokens for r in running)


@pytest.mark.parametrize("name", ["issue-1", "issue-100", "fixed:100:900"])
@pytest.mark.parametrize("burstiness", [0.3, 1.0])
def test_requests_of_a_mix_are_the_same_whatever_runs_as_they_come(name, burstiness):
    """So policies whose time per token differs are compared under equal load."""

    def requests(steady_tpot_us):
        workload = Workload(name, 5, 7, burstiness, steady_tpot_us=steady_tpot_us)
        drawn = list(islice(workload.requests(MAX_LEN), 900))
        running = list(takewhile(lambda request: request.is_running, drawn))
        return running, [
            (request.arrival_us, request.prompt_len, request.output_len)
            for request in drawn[len(running) :]
        ]

    (none, of_none), (few, of_few), (many, of_many) = map(requests, (0, 10_000, 30_000))
    assert not none and 0 < len(few) < len(many)
    num = min(map(len, (of_none, of_few, of_many)))
    assert of_none[:num] == of_few[:num] == of_many[:num]
    mean_output = fmean(output_len for _, _, output_len in of_none)
    assert len(many) == pytest.approx(5 * mean_output * 0.030, rel=0.5)


@pytest.mark.parametrize(
    ("name", "share"), [("issue-0", 0.0), ("issue-1", 0.01), ("issue-5", 0.05), ("issue-100", 1.0)]
)
def test_mixes_have_their_share_of_long_requests_and_the_histogram(name, share):
    requests = list(islice(Workload(name, rate_per_s=40, seed=3).requests(MAX_LEN), 20_000))
    long = [request for request in requests if request.prompt_len >= 100_000]
    assert len(long) / 20_000 == pytest.approx(share, abs=0.005)
    if long:
        halves = fmean(request.prompt_len >= 500_000 for request in long)
        assert halves == pytest.approx(0.3494, abs=0.08)
    short = [request for request in requests if request.prompt_len < 100_000]
    if short:
        assert fmean(request.prompt_len < 1000 for request in short) == pytest.approx(
            0.857, abs=0.02
        )
    assert requests[-1].arrival_us / 1e6 == pytest.approx(20_000 / 40, rel=0.05)
    assert all(before.arrival_us <= after.arrival_us for before, after in pairwise(requests))


def test_same_seed_same_requests_and_bursty_gaps_vary_more():
    def gaps(**options):
        requests = islice(Workload("issue-0", rate_per_s=10, **options).requests(MAX_LEN), 5000)
        times = [request.arrival_us for request in requests]
        return [after - before for before, after in pairwise(times)]

    def variation(values):
        mean = fmean(values)
        return fmean((value - mean) ** 2 for value in values) / mean**2

    assert gaps(seed=1) == gaps(seed=1) != gaps(seed=2)
    assert variation(gaps(seed=1)) == pytest.approx(1, abs=0.15)
    assert variation(gaps(seed=1, burstiness=0.25)) == pytest.approx(4, abs=0.8)


def test_prompts_are_cut_to_the_models_length():
    request = next(Workload("issue-100", rate_per_s=1, seed=1).requests(max_model_len=8192))
    assert request.prompt_len + request.max_tokens == 8192
    with pytest.raises(
        ValueError, match=r"request \d+ of issue-100 has \d+ output tokens, which leave no room"
    ):
        list(islice(Workload("issue-100", rate_per_s=1, seed=1).requests(max_model_len=100), 50))


@pytest.mark.parametrize(("options", "named"), [
    ({"name": "isue-1", "rate_per_s": 1}, "nearest: issue-1"),
    ({"name": "mooncake:", "rate_per_s": 1}, "nearest: mooncake:PATH"),
    ({"name": "issue-1", "rate_per_s": -1}, "rate_per_s is -1"),
    ({"name": "issue-1", "rate_per_s": float("nan")}, "rate_per_s is nan"),
    ({"name": "issue-1", "rate_per_s": 1, "length_scale": 0}, "length_scale is 0"),
    ({"name": "issue-1", "rate_per_s": 1, "burstiness": 0}, "burstiness is 0"),
    ({"name": "issue-1", "rate_per_s": 1, "burstiness": 1e-9},
     "burstiness is 1e-09; it must be at least"),
    ({"name": "issue-1", "rate_per_s": float("inf")},
     "rate_per_s is inf; it must be positive, at most"),
    ({"name": "issue-1", "rate_per_s": 1, "length_scale": 1e300}, "length_scale is 1e"),
    ({"name": "static-2", "rate_per_s": 1}, "nearest: static-"),
])  # fmt: skip
def test_impossible_workloads_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        Workload(**options)


def test_the_static_scenario_is_the_papers():
    requests = static_scenario(
        num_instances=32, instances_per_node=8, long_per_node=3, output_len=5
    )
    assert sum(request.prompt_len == 512 * 1024 for request in requests) == 12
    assert sum(request.prompt_len == 2048 for request in requests) == 64 * 32
    assert [request.prompt_len for request in Workload("static-3", 1).requests(MAX_LEN)] == [
        request.prompt_len for request in requests
    ]


def test_the_static_scenario_fits_its_cluster():
    workload = Workload("static-7", 1, num_instances=4, instances_per_node=2)
    requests = list(workload.requests(max_model_len=8192))
    assert (
        sum(request.prompt_len == 4096 for request in requests) == 7 * 2
        and len(requests) == 14 + 64 * 4
    )
    assert {request.arrival_us for request in requests} == {0}
