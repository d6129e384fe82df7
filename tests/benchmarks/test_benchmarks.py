"""The CPU benchmarks run from end to end on a tiny model, and their arithmetic is what they say."""

import asyncio
import contextlib
import http.server
import subprocess
import threading
import time

import pytest

from benchmarks.cpu import decode_cpu, exchange_hop, long_context_cpu, peers
from benchmarks.cpu.decode_cpu import MeasuredPoint
from benchmarks.kit import service
from benchmarks.service import apis, live_moves, soak
from nanocp.serve import process
from nanocp.serve.process import free_port


def hold(claims):
    """Whether all claims hold."""
    return all(claim.holds for claim in claims)


def result(engine, instances, threads, rate, batch=32, stored="bfloat16"):
    point = MeasuredPoint(engine, instances, threads, "float32", stored, batch)
    return point._asdict() | {"tokens_per_s": rate}


@pytest.mark.system
def test_decode_cpu_measures_every_point(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(decode_cpu, "checkpoint_of", lambda *of: tiny_checkpoint)
    shape = decode_cpu.DecodeShape("tiny", ("float32",), (1, 3), ((2, 1),), (1,), 4, 2, 2, 1)
    rates, versions = decode_cpu.measure(shape, "torch", None, print)
    assert set(rates) == {
        MeasuredPoint(engine, instances, 1, "float32", "bfloat16", batch)
        for engine, instances in (("nanocp", 2), ("transformers", 1))
        for batch in (1, 3)
    }
    assert all(
        len(values) == (2 if point.engine == "nanocp" else 1) for point, values in rates.items()
    )
    assert min(min(values) for values in rates.values()) > 0
    assert set(versions) == {"transformers"}


def test_a_peer_that_does_not_answer_is_left_out_and_the_rest_is_measured(monkeypatch, capsys):
    """Each measurement is a line."""
    monkeypatch.setattr(decode_cpu, "checkpoint_of", lambda *of: None)
    monkeypatch.setattr(decode_cpu, "random_prompts", lambda *shape, seed: [[1]])
    monkeypatch.setattr(decode_cpu, "serving", lambda *of, ray: contextlib.nullcontext())
    monkeypatch.setattr(decode_cpu, "_ours", lambda *of, warm: 12.0)
    with (
        subprocess.Popen(["sleep", "60"], stdin=-1, stdout=-1, text=True) as process,
        pytest.raises(RuntimeError, match="silent did not answer within 0 s"),
    ):
        try:
            peers.PeerEngine("silent", 1, "", process, process.stdout, 0.0).measure([[1]], 1)
        finally:
            process.kill()

    class Silent:
        engine, version, threads = "silent", "1", 1

        def measure(self, prompts, num_tokens):
            raise RuntimeError("silent did not answer within 600 s")

    monkeypatch.setattr(decode_cpu, "_peers", lambda *of: [contextlib.nullcontext(Silent())])
    shape = decode_cpu.DecodeShape("tiny", ("float32",), (1,), ((1, 1),), (1,), 4, 2, 2, 2)
    rates, _ = decode_cpu.measure(shape, "torch", None, print, beside_torch=True)
    assert {point.engine for point in rates} == {"nanocp", decode_cpu.TORCH}
    printed = capsys.readouterr().out
    assert printed.count("going on without silent: silent did not answer within 600 s") == 1
    assert "4 of 6: nanocp torch float32 batch 1, 12.0 tokens/s" in printed


def test_native_kernels_are_held_against_those_of_torch_at_8_and_32_rows():
    rates = [
        result(engine, 1, 1, rate, batch)
        for engine, rate in (("nanocp", 130.0), (decode_cpu.TORCH, 100.0))
        for batch in (1, 8, 32)
    ]
    assert [claim.sentence for claim in decode_cpu.ratios(rates)] == [
        f"float32, stored bfloat16, batch {batch}: 1 of 1 threads over torch's kernels: 1.3, "
        "at least 1.4"
        for batch in (8, 32)
    ]


def moved(moves=(), **change):
    ratios = {
        "re-binding": (1.05, 1.2),
        "extension": (0.9, 1.2),
        "re-levelling": (1.0, 1.0),
        "any move": (1.0, 1.1),
    }
    ratios |= dict(moves)
    cost = [
        {"kind": kind, "ratio_others": pair[0], "ratio_before": pair[1]}
        for kind, pair in ratios.items()
        if pair
    ]
    moving = {
        "phase": "moving", "seconds": 10.0, "tokens": 500, "wrong": 0, "near_ties": 0,
        "frames_not_back": 0,
    }  # fmt: skip
    moving |= {"pages_moved": 10, "preemptions": 0, "moves": cost} | change
    return [moving, moving | {"phase": "preempting", "preemptions": 1, "moves": []} | change]


@pytest.mark.parametrize(("change", "holds"), [
    ({}, True),
    ({"wrong": 1}, False),
    ({"frames_not_back": 1}, False),
    ({"pages_moved": 9}, False),
    ({"preemptions": 0}, False),
    ({"tokens": 1000, "near_ties": 1}, True),
    ({"near_ties": 1}, False),
    ({"moves": {"re-binding": (1.051, 1.0)}}, False),
    ({"moves": {"extension": None}}, False),
    ({"moves": {"any move": (1.0, 1.101)}}, False),
])  # fmt: skip
def test_live_moves_judges_its_claims(change, holds):
    assert hold(live_moves.claims_of(moved(**change))) == holds


@pytest.mark.system
def test_preempted_requests_of_a_real_service_go_on_with_the_tokens_of_the_reference(
    tiny_checkpoint,
):
    """Each client asks once; together they outgrow the frames."""
    outputs, service = live_moves.play(tiny_checkpoint, "preempting", 0.0)
    found = live_moves.judge(tiny_checkpoint, "preempting", outputs, service)
    assert found["requests"] == live_moves.NUM_CLIENTS and found["wrong"] == 0
    assert (
        found["preemptions"] >= 1
        and found["binding_changes"] >= 1
        and found["frames_not_back"] == 0
    )
    # Prompt and output so far went through the prefill once more.
    assert found["wait_ms_max"] >= found["wait_ms_p50"] > found["tpot_ms_p50"]


@pytest.mark.parametrize(("change", "holds"), [
    ({}, True),
    ({"errors": {"steady: Unavailable: gone": 1}}, False),
    ({"memory_end_mib": 1051}, False),
    ({"tpot_ms_p99_last": 11.1}, False),
    ({"tpot_ms_p99_last": float("nan")}, False),
    ({"frames_not_back": 1}, False),
])  # fmt: skip
def test_a_soak_judges_its_claims(change, holds):
    record = soak.Record(
        tpots=[(0.1, 10.0), (0.5, 99.0), (0.9, 11.0)],
        memory_mib=[(0.0, 5.0), (0.2, 1000.0), (0.9, 1050.0)],
    )
    assert hold(soak.claims_of(soak.summary(record, 60.0, 0) | change)) == holds


@pytest.mark.parametrize(
    ("http_rates", "holds"), [((1.0, 80.0, 99.0), True), ((1.0, 79.9, 99.0), False)]
)
def test_apis_compares_the_median_rounds(http_rates, holds):
    keys = (
        "request_throughput", "median_ttft_ms", "median_tpot_ms", "cpu_ms_per_token", "completed",
    )  # fmt: skip
    rounds = {
        api: [dict.fromkeys(keys, 1.0) | {"output_throughput": rate} for rate in rates]
        for api, rates in (("grpc", (100.0, 100.0, 9.0)), ("http", http_rates))
    }
    results = [apis.summary(api, rounds[api]) for api in apis.APIS]
    assert apis.claim_of(results).holds == holds


@pytest.mark.parametrize(("added_s", "holds"), [((0.0, 0.3), True), ((0.31, 0.0), False)])
def test_apis_judges_the_request_that_adds_most(added_s, holds):
    measured = [apis.AddedPause("a", 200, 1.0, 0.1, 0.1 + each, each, 1) for each in added_s]
    assert apis.claim_of_pauses(measured).holds == holds


def test_pauses_are_the_longest_times_between_events(monkeypatch):
    """A service whose stream stands still while any other request is answered."""
    monkeypatch.setattr(apis, "WINDOW_S", 0.3)
    monkeypatch.setattr(apis, "INPUTS", {"one": ("/tokenize", {"prompt": "a"})})
    with standing_still() as url:
        (measured,) = apis.measure_pauses(url, 1)
    assert (measured.request, measured.status, measured.num_pairs) == ("one", 200, 1)
    assert measured.beside_s >= 1.0 and measured.answered_s >= 1.0
    assert measured.added_s == pytest.approx(measured.beside_s - measured.idle_s, abs=0.002)


@contextlib.contextmanager
def standing_still():
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            if self.path == "/tokenize":
                with lock:
                    time.sleep(1.0)
                return
            with contextlib.suppress(OSError):
                while True:
                    with lock:
                        self.wfile.write(b"data: {}\n\n")
                    time.sleep(0.005)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


@pytest.mark.system
def test_long_context_cpu_measures_both_degrees(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(long_context_cpu, "checkpoint_of", lambda preset: tiny_checkpoint)
    shape = long_context_cpu.ContextShape("tiny", 4_000, 3, 1)
    steps = long_context_cpu.measure(shape, (1, 2))
    assert set(steps) == {1, 2}
    for (step,) in steps.values():
        assert step["step_ms"] > 0 and step["tpot_ms"] > 0 and 0 < step["exchange_share"] < 1


def test_ratios_say_which_claim_does_not_hold():
    results = [
        result("nanocp", 1, 1, 100.0),
        result("nanocp", 4, 1, 79.0),
        result("transformers", 1, 1, 50.0),
    ]
    over_transformers, over_one = decode_cpu.ratios(results)
    assert over_transformers.holds and "over transformers: 2," in str(over_transformers)
    assert not over_one.holds and "over one instance: 0.79, at least 0.85" in str(over_one)
    assert hold(decode_cpu.ratios([results[0], result("nanocp", 4, 1, 85.0), results[2]]))


def test_ratios_look_at_the_claimed_batch_but_at_every_batch_of_vllm():
    rates = [
        result("nanocp", 1, 1, 100.0, 8),
        result("transformers", 1, 1, 10.0, 8),
        result("vllm", 1, 1, 125.0, 8),
    ]
    (claim,) = decode_cpu.ratios(rates)
    assert not claim.holds and "batch 8: 1 of 1 threads over vLLM: 0.8" in claim.sentence


def test_ratios_compare_engines_on_one_folder_only():
    results = [
        result("nanocp", 1, 1, 100.0),
        result("transformers", 1, 1, 25.0, stored="float32"),
        result("nanocp", 1, 1, 60.0, stored="float32"),
    ]
    (claim,) = decode_cpu.ratios(results)
    assert "stored float32" in claim.sentence and "transformers: 2.4" in claim.sentence


def test_rate_counts_whole_steps_inside_the_steady_state():
    # Two streams at 10 and 5 tokens/s; what lies outside and what the edges cut off does not change
    # that.
    arrivals = [[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 3.0], [0.05, 0.25, 0.45]]
    assert service.SteadyState(0.04, 0.52, arrivals).tokens_per_s == pytest.approx(15.0)


def test_settings_reach_the_service_and_the_shell_does_not(monkeypatch):
    monkeypatch.setenv("NANOCP_DATA_PLANE__DTYPE", "float64")
    environment = process._environment({"cluster.num_frames": 7, "scheduler.policy": "chaos"})
    ours = {name: value for name, value in environment.items() if name.startswith("NANOCP_")}
    assert ours == {"NANOCP_CLUSTER__NUM_FRAMES": "7", "NANOCP_SCHEDULER__POLICY": "chaos"}
    assert "PATH" in environment


def test_service_that_cannot_start_says_why(tiny_checkpoint):
    with (
        pytest.raises(RuntimeError, match="experts"),
        process.serving(tiny_checkpoint, 17, {}, ray=False),
    ):
        pass


def test_refused_stream_is_one_error(tiny_checkpoint):
    from nanocp.client import Unavailable

    with pytest.raises(Unavailable):
        asyncio.run(service.decode(f"127.0.0.1:{free_port()}", [[5], [6]], 4))


def test_prompts_are_distinct_and_the_same_each_time(tiny_checkpoint):
    prompts = service.random_prompts(tiny_checkpoint, 4, 50, seed=1)
    assert prompts == service.random_prompts(tiny_checkpoint, 4, 50, seed=1)
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert min(map(min, prompts)) >= 2 and max(map(max, prompts)) < 512


def test_peer_that_ends_is_an_error(tmp_path):
    with (
        pytest.raises(RuntimeError, match="transformers ended"),
        peers.peer("transformers", tmp_path, "float32", 1),
    ):
        pass


def test_vllm_environment_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHON", "no-such-python")
    with pytest.raises(RuntimeError, match="no-such-python"):
        peers.vllm_python(tmp_path / "env")
    assert not (tmp_path / "env" / ".installed").exists()


def test_a_hop_whose_processes_fail_ends():
    with pytest.raises(EOFError):
        exchange_hop._turn("shm", num_bytes=0, num_hops=1)
