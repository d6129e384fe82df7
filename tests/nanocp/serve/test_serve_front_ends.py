"""`nanocp serve` of a real model loses a front end and the controller by `kill -9`."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanocp.client import Client
from nanocp.serve.process import serving

pytestmark = pytest.mark.system

SETTINGS = {
    "service.front_ends": 2, "service.controller_process": True, "cluster.num_frames": 64,
    "cluster.max_model_len": 1024,
}  # fmt: skip
LONG = {"max_tokens": 300, "ignore_eos": True, "timeout_s": 240}
KINDS = {
    "greedy": LONG,
    "sampled": LONG | {"temperature": 0.9, "seed": 5, "logprobs": 2},
    "penalised": LONG | {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.2},
    "three": LONG | {"temperature": 1.0, "seed": 3, "n": 3},
    "counted": LONG | {"temperature": 1.0, "seed": 8, "frequency_penalty": 0.5},
}
PROMPT = [7 + 3 * number % 400 for number in range(150)]


def answer(targets, options, prompt_ids=PROMPT):
    """The tokens of each choice, with their log probabilities."""
    outputs, logprobs = {}, {}
    with Client(targets) as client:
        for chunk in client.generate(prompt_ids, **options):
            outputs.setdefault(chunk.index, []).extend(chunk.token_ids)
            logprobs.setdefault(chunk.index, []).extend(chunk.logprobs)
    return outputs, logprobs


def test_answers_are_as_if_nothing_had_been_killed(tiny_checkpoint, tiny_oracle):
    with (
        serving(tiny_checkpoint, 2, SETTINGS, ray=False, synthetic_kv=False) as service,
        ThreadPoolExecutor(8) as pool,
    ):
        with Client(service.target) as client:
            targets = client.server_info().front_ends
        assert len(targets) == 2
        undisturbed = {kind: answer(targets, options) for kind, options in KINDS.items()}
        for lost in ("front end 0", "controller"):
            before = service.metrics()["nanocp:generation_tokens_total", ""]
            running = {
                kind: pool.submit(answer, targets, options) for kind, options in KINDS.items()
            }
            while service.metrics()["nanocp:generation_tokens_total", ""] < before + 300:
                time.sleep(0.1)
            pid = service.member_pids()[lost]
            os.kill(pid, signal.SIGKILL)
            for kind, one in running.items():
                outputs, logprobs = one.result()
                expected, expected_logprobs = undisturbed[kind]
                assert outputs == expected, kind
                for index, of_choice in expected_logprobs.items():
                    given = [token.logprob for token in logprobs[index]]
                    told = [token.logprob for token in of_choice]
                    assert given == pytest.approx(told, abs=1e-3)
            while service.member_pids().get(lost) in (None, pid):
                time.sleep(0.1)
            while service.metrics()["nanocp:num_requests_running", ""]:
                time.sleep(0.1)
        verdict = tiny_oracle.judge(PROMPT, undisturbed["greedy"][0][0])
        assert verdict.exact, verdict
        assert service.frames_not_back() == 0
        log = service.log.read_text()
        assert "front end 0: its process was ended by SIGKILL; another process takes" in log
        assert "requests run on for 10 s" in log
        assert "the controller was ended by SIGKILL; another one takes its place" in log
        assert service.stop() == 0


def test_conversations_go_on_over_slots_when_the_controller_is_killed(tiny_checkpoint, tiny_oracle):
    """Pages leave the frames between two rounds; the next controller knows no slot of the last."""
    settings = SETTINGS | {"cluster.num_frames": 12, "kv_offload.host_gib": 0.05}
    histories = [[(31 * number + 7 * each) % 500 for each in range(200)] for number in range(4)]
    options = LONG | {"max_tokens": 40}
    with (
        serving(tiny_checkpoint, 2, settings, ray=False, synthetic_kv=False) as service,
        ThreadPoolExecutor(2) as pool,
    ):
        with Client(service.target) as client:
            targets = client.server_info().front_ends
        controller = service.member_pids()["controller"]
        for number in range(6):
            prompts = [[*history, *range(20, 53 + number)] for history in histories]
            answers = [pool.submit(answer, targets, options, prompt) for prompt in prompts]
            if number == 3:
                assert service.metrics()["nanocp:kv_offload_hits_total", ""]
                answers[0].result()
                os.kill(controller, signal.SIGKILL)
            for index, prompt in enumerate(prompts):
                output_ids = answers[index].result()[0][0]
                assert tiny_oracle.judge(prompt, output_ids).exact, (number, index)
                histories[index] = [*prompt, *output_ids]
        assert service.member_pids()["controller"] != controller
        assert service.metrics()["nanocp:kv_offload_hits_total", ""], "of the second controller"
        assert service.frames_not_back() == 0
        assert service.stop() == 0
