"""Logs of other systems: each maker's shape is read, what is no log is refused in a sentence."""

import csv
import gzip
import io
import json
from pathlib import Path
from random import Random

import pytest

from harness.paths import ROOT
from nanocp.simulator.loads.request_logs import STRICT, read_log, read_trace

SAMPLES = ROOT / "benchmarks/traces"
REQUESTS = [(0.0, 300, 20), (0.5, 1000, 7), (2.25, 64, 110)]
"""(seconds, prompt, output) of what every file here has."""


def dynamo(seconds, prompt, output):
    received_ms = 1_764_000_000_000 + 1000 * seconds
    return {
        "schema": "dynamo.request.trace.v1", "timestamp": received_ms + 900,
        "event": {"request": {"request_received_ms": received_ms, "output_tokens": output,
                              "replay": {"input_length": prompt, "trace_block_size": 64}}},
    }  # fmt: skip


def own(seconds, prompt, output):
    return {
        "time": f"2026-11-22T10:20:{10 + seconds:06.3f}Z", "level": "info",
        "message": "request ended", "tenant": "a", "tokens_in": prompt, "tokens_out": output,
        "total_s": 4.0,
    }  # fmt: skip


BENCH = {
    "backend": "vllm",
    "request_throughput": 1.1,
    "input_lens": [prompt for _, prompt, _ in REQUESTS],
    "output_lens": [output for *_, output in REQUESTS],
    "start_times": [5000.5 + seconds for seconds, *_ in REQUESTS],
}


def json_lines(make):
    return "".join(json.dumps(make(*request)) + "\n" for request in REQUESTS)


def azure():
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(STRICT["azure"].values())
    for seconds, prompt, output in REQUESTS:
        rows.writerow([f"2023-11-16 18:15:{46.6805900 + seconds:010.7f}", prompt, output])
    return text.getvalue()


FILES = {
    "mooncake": json_lines(
        lambda s, p, o: {"timestamp": int(1000 * s), "input_length": p, "output_length": o}
    ),
    "azure": azure(),
    "vllm bench": json.dumps(BENCH),
    "vllm bench, indented": json.dumps(BENCH, indent=2),
    "dynamo": json_lines(dynamo),
    "nanocp": "2026-11-22 a message before them\n" + json_lines(own),
    "openai usage": json_lines(
        lambda s, p, o: {
            "ts": 1.7e9 + s,
            "usage": {"prompt_tokens": p, "completion_tokens": o, "total_tokens": p + o},
        }
    ),
    "list": json.dumps([{"arrival_time": s, "isl": p, "osl": o} for s, p, o in REQUESTS]),
    "csv": "start_time_ns,input_tokens,output_tokens\n"
    + "".join(f"{int(1e18 + 1e9 * s)},{p},{o}\n" for s, p, o in REQUESTS),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_makers_log_is_read(tmp_path, name, is_packed):
    path = tmp_path / "log"
    text = FILES[name].encode()
    path.write_bytes(gzip.compress(text) if is_packed else text)
    log = read_log(path)
    assert [(r.arrival_us / 1e6, r.prompt_len, r.output_len) for r in log.requests] == REQUESTS
    assert log.num_skipped == 0 and log.rate_per_s == pytest.approx(3 / 2.25)
    assert all(log.fields)
    if name == "nanocp":
        assert {r.tenant for r in log.requests} == {"a"}


@pytest.mark.parametrize("kind", STRICT)
def test_a_trace_is_the_log_of_its_file(kind):
    (path,) = SAMPLES.glob(f"{kind}*")
    assert read_trace(kind, path) == read_log(path)


def test_lines_are_in_order_of_arrival_and_what_is_no_request_is_counted(tmp_path):
    lines = FILES["nanocp"].splitlines()
    failed = own(1, 5, 0)
    other = {"time": "2026-11-22T10:20:00Z", "message": "an instance started"}
    path = tmp_path / "log"
    path.write_text("\n".join([json.dumps(failed), json.dumps(other), *reversed(lines), '{"cut']))
    log = read_log(path)
    assert [r.prompt_len for r in log.requests] == [300, 1000, 64]
    assert log.num_skipped == 3 and log.fields == ("time (a date)", "tokens_in", "tokens_out")


@pytest.mark.parametrize(("text", "requests"), [
    ("\ufeffts,isl,osl\r\n1,5,6\r\n3,7,8\r\n", [(0, 5, 6), (2, 7, 8)]),
    ("ts; isl; osl\n1; 5; 6\n3; 7.0; 8\n", [(0, 5, 6), (2, 7, 8)]),
    ('\ufeff{"timestamp": 0.0, "isl": 5, "osl": 6}\n', [(0, 5, 6)]),
    ('{"timestamp": 0.5, "isl": 5.0, "osl": 6, "tenant": 5, "hash_ids": null}\n'
     '{"timestamp": 2.5, "isl": 7, "osl": 8, "hash_ids": [1, 2, 3, 4]}\n',
     [(0, 5, 6), (2, 7, 8)]),
    ('{"arrival_time": 1, "isl": 5, "osl": 6, "total_s": 90}\n'
     '{"arrival_time": 3, "isl": 7, "osl": 8, "total_s": 1}\n',
     [(0, 5, 6), (2, 7, 8)]),
])  # fmt: skip
def test_what_other_writers_do_to_a_file_is_no_obstacle(tmp_path, text, requests):
    path = tmp_path / "log"
    path.write_bytes(text.encode())
    found = read_log(path).requests
    assert [(r.arrival_us / 1e6, r.prompt_len, r.output_len) for r in found] == requests


def test_a_damaged_file_and_a_number_without_end_are_sentences(tmp_path):
    path = tmp_path / "log"
    packed = bytearray(gzip.compress(FILES["mooncake"].encode() * 50))
    packed[30:40] = bytes(10)
    for content in (packed, b'{"ts": 1, "isl": 1, "osl": ' + b"9" * 5000 + b"}"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)):
            read_log(path)


def test_fields_may_be_named(tmp_path):
    path = tmp_path / "log"
    lines = [{"when_ms": 1000 * s, "in": p, "made": o, "prompt_tokens": 9} for s, p, o in REQUESTS]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=r"name the fields: --fields arrival=T"):
        read_log(path)
    log = read_log(path, {"arrival": "when_ms", " prompt": "in ", "output": "made"})
    assert [r.prompt_len for r in log.requests] == [300, 1000, 64]
    assert log.fields[0] == "when_ms (ms)" and log.requests[-1].arrival_us == 2_250_000
    with pytest.raises(ValueError, match=r"no line has an arrival.*; its first has when_ms, in"):
        read_log(path, {"arrival": "wen_ms", "prompt": "in", "output": "made"})
    with pytest.raises(ValueError, match="--fields has no name for prompt; write prompt=NAME"):
        read_log(path, {"arrival": "when_ms", "prompt": ""})
    with pytest.raises(ValueError, match="a log has no begin; it has arrival, prompt, output"):
        read_log(path, {"begin": "x"})


@pytest.mark.parametrize(("text", "named"), [
    ("", "no line has an arrival.*; it is empty"),
    ("when,in\n1,2\n", r"; it begins with 'when,in\\n1,2\\n'"),
    (b"PAR1\xdd\x01", "must be text in UTF-8, as it is or packed by gzip"),
    ('10.0.0.1 - - [22/Nov/2026:10:00:00] "POST /v1/completions" 200 512\n', "An access log"),
    ('{"input_lens": [1, 2], "request_throughput": 3}', "no output_lens and start_times"),
    ('{"ts": 1, "isl": 1.5, "osl": 3}', "line 1: isl is 1.5; it must be a whole number"),
    ('{"ts": "noon", "isl": 1, "osl": 3}', "line 1: ts is 'noon'; it must be a number, or"),
    ('{"ts": -1, "isl": 1, "osl": 3}', "line 1: ts is -1"),
    ('{"ts": 1, "isl": 1, "osl": 3, "total_s": "x"}', "total_s is 'x'"),
    ('{"ts": 1, "isl": 1, "osl": 1e400}', "osl is inf"),
])  # fmt: skip
def test_what_is_no_log_is_answered_in_a_sentence(tmp_path, text, named):
    path = tmp_path / "log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=named):
        read_log(path)


def test_a_url_is_not_fetched():
    with pytest.raises(ValueError, match="from its URL: fetch it, or pipe it into --log /dev/std"):
        read_log(Path("https://example.org/log.jsonl"))


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_columns_may_be_parted_by_any_usual_sign(tmp_path, delimiter):
    rows = [("arrival_time", "prompt_tokens", "completion_tokens"), (0.5, 10, 3), (2.5, 20, 4)]
    (tmp_path / "log").write_text("".join(f"{delimiter.join(map(str, row))}\n" for row in rows))
    assert [one.prompt_len for one in read_log(tmp_path / "log").requests] == [10, 20]


def test_a_cut_or_a_changed_file_is_read_or_refused_and_nothing_else(tmp_path):
    random, path = Random(7), tmp_path / "log"
    for text in map(str.encode, FILES.values()):
        for _ in range(60):
            changed = bytearray(text[: random.randrange(len(text) + 1)])
            for _ in range(random.choice([0, 0, 1, 5])):
                if changed:
                    changed[random.randrange(len(changed))] = random.randrange(256)
            path.write_bytes(bytes(changed) if random.random() < 0.8 else b"\x1f\x8b" + changed)
            try:
                assert read_log(path).requests
            except ValueError as error:
                assert str(path) in str(error)


def guidellm(requests, **more):
    done = [
        {"request_start_time": 1.8e9 + s, "prompt_tokens": p, "output_tokens": o}
        for s, p, o in requests
    ]
    failed = {"request_start_time": 1.8e9, "prompt_tokens": 64, "output_tokens": None}
    of = {"successful": done, "errored": [failed], "incomplete": [], "total": []}
    return {"requests": of, **more}


def aiperf(s, p, o, phase="profiling", error=None):
    return {
        "metadata": {"request_start_ns": round(1e9 * (1.8e9 + s)), "benchmark_phase": phase},
        "metrics": {
            "input_sequence_length": {"value": p, "unit": "tokens"},
            "output_sequence_length": {"value": o, "unit": "tokens"},
        },
        "error": error,
    }


def test_a_report_of_guidellm_has_its_requests_without_warm_up_and_failures(tmp_path):
    path = tmp_path / "benchmarks.json"
    early = [(-9.0, 5, 5), (-8.0, 5, 5)]
    path.write_text(
        json.dumps({"benchmarks": [guidellm([*early, *REQUESTS], start_time=1.8e9)]}, indent=1)
    )
    log = read_log(path)
    assert [(r.arrival_us / 1e6, r.prompt_len, r.output_len) for r in log.requests] == REQUESTS
    assert (log.num_warm_up, log.num_failed, log.num_skipped, log.notes) == (2, 1, 0, ())
    made = {"scheduler_metrics": {"requests_made": {"successful": 90}}}
    path.write_text(json.dumps({"benchmarks": [guidellm(REQUESTS, **made)] * 2}))
    assert read_log(path).notes == (
        "It has 2 benchmarks, which are played one after the other.",
        *("It keeps 3 of 90 requests: give the rate (--rate).",) * 2,
    )


def test_records_of_aiperf_count_if_they_were_measured_and_did_not_fail(tmp_path):
    path = tmp_path / "profile_export.jsonl"
    records = [aiperf(-5.0, 5, 5, "warmup"), *(aiperf(*each) for each in REQUESTS)]
    records += [aiperf(1.0, 5, 5, error={"code": 500, "message": "x"})]
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    log = read_log(path)
    assert [(r.arrival_us / 1e6, r.prompt_len, r.output_len) for r in log.requests] == REQUESTS
    assert (log.num_warm_up, log.num_failed, log.num_skipped) == (1, 1, 0)
    assert log.fields[0] == "metadata.request_start_ns (ns)"


def test_failures_of_vllms_benchmark_are_left_out(tmp_path):
    path = tmp_path / "log"
    lens = {name: [5, *BENCH[name]] for name in ("input_lens", "output_lens")}
    times = {"start_times": [5000.0, *BENCH["start_times"]], "errors": ["Bad Request", "", "", ""]}
    path.write_text(json.dumps(BENCH | lens | times))
    log = read_log(path)
    assert len(log.requests) == 3 and log.num_failed == 1


def test_a_json_that_is_cut_is_read_as_far_as_it_is_complete(tmp_path):
    path = tmp_path / "log"
    many = [(0.25 * at, 5 + at, 6) for at in range(40)]
    for whole in (
        {"benchmarks": [guidellm(many)]},
        {
            "input_lens": [5] * 40,
            "output_lens": [6] * 40,
            "start_times": [0.25 * i for i in range(40)],
        },
        [{"arrival_time": s, "isl": p, "osl": o} for s, p, o in many],
    ):
        text = json.dumps(whole)
        for end in range(len(text) // 2, len(text) - 3, 31):
            path.write_text(text[:end])
            try:
                log = read_log(path)
            except ValueError as error:
                assert "start_times" in text and "if it is cut" in str(error)
                continue
            assert log.notes == ("Its JSON ends early: what is complete was read.",)
            assert [r.arrival_us for r in log.requests] == [
                250_000 * at for at in range(len(log.requests))
            ]
    records = (json.dumps(aiperf(*each)) + "\n" for each in many * 50)
    path.write_bytes(gzip.compress("".join(records).encode())[:-20])
    log = read_log(path)
    assert log.requests and log.notes == ("Its packed data ends early: what is there was read.",)


def test_a_csv_that_is_cut_in_its_last_row_lacks_this_row(tmp_path):
    path = tmp_path / "log"
    path.write_text(FILES["azure"].rstrip()[:-16])
    log = read_log(path)
    assert len(log.requests) == 2 and log.num_skipped == 1
