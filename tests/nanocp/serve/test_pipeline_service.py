"""A model served as a pipeline: real processes, gRPC, HTTP and shared memory, every token exact."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import openai
import pytest
import typer.testing

from harness.exact.prompt_logprobs import assert_logprobs
from harness.exact.settings import configured
from harness.services.hash_service import forked_service, shared_memory_of
from harness.services.kit import exact_answers, greedy, random_prompt, started
from harness.services.service_recovery import sample
from harness.waits import until
from nanocp.cli.main import app
from nanocp.client import Client
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.passes import PassesConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.serve.service import open_checkpoint
from nanocp.values.members import Member
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

CONFIG = Config(
    cluster=ClusterConfig(
        num_instances=2,
        layout="pipeline",
        num_frames=40,
        max_model_len=1024,
        bounds=BoundsConfig(max_rows=8, max_attention_rows=8),
    ),
    limits=LimitsConfig(tick_ms=50, start_timeout_ms=120_000, drain_timeout_ms=30_000),
    service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0, check_invariants=True),
    pipeline=PassesConfig(max_pass_tokens=128),
)
WAIT_S = 120


@contextmanager
def pipeline_service(checkpoint, config=CONFIG, **served):
    service = forked_service(config, replace(open_checkpoint(config, checkpoint), **served))
    with started(service):
        yield service
    assert shared_memory_of(service) == []


def pids(service):
    number = service._config.cluster.num_instances
    return [service.launcher.pid(Member("instance", stage)) for stage in range(number)]


def command(service, *words):
    runner = typer.testing.CliRunner()
    return runner.invoke(app, [*words, "--target", service.metrics_address])


def layout(service, *words):
    return command(service, "layout", *words)


def until_free(service):
    """Every frame is free once nothing runs."""
    num_frames = service._config.cluster.num_frames
    until(lambda: service._controller._scheduler.load.frames_free == num_frames)


def test_a_pipeline_serves_while_its_layers_move(tiny_checkpoint, tiny_oracle, tmp_path):
    """Clients of both APIs, one that goes away, an operator, and a stage that is replaced."""
    log = str(tmp_path / "log")
    config = configured(CONFIG, event_log=log)
    with pipeline_service(tiny_checkpoint, config) as service:
        ids = [random_prompt(length, length) for length in (1, 64, 150, 300)]
        with exact_answers(tiny_oracle, service.address, ids, 100) as running:
            until(lambda: service.num_open == len(ids))  # request 1 is one of these
            with Client(service.address) as client:
                stream = client.generate(random_prompt(90, 9), max_tokens=500, temperature=0.0)
                next(iter(stream))
                stream.close()  # the client goes away
            for first in (1, 3, 2):
                moved = layout(service, f"{first},{4 - first}")
                assert moved.stdout == (
                    f"stage 0 has layers 0 to {first - 1}, stage 1 has layers {first} to 3\n"
                )
        base_url = f"http://{service.http_address}/v1"
        with openai.OpenAI(base_url=base_url, api_key="EMPTY", timeout=WAIT_S) as http:
            (model,) = http.models.list().data
            extra = {"return_token_ids": True, "ignore_eos": True}
            options = {"max_tokens": 12, "temperature": 0, "logprobs": 2, "extra_body": extra}
            (answer,) = http.completions.create(model=model.id, prompt=ids[2], **options).choices
            assert answer.token_ids == running[2].result()[:12]
            assert len(answer.logprobs.token_logprobs) == 12
        with Client(service.address) as client:
            chunks = client.generate(ids[2], max_tokens=1, temperature=0.0, prompt_logprobs=1)
            reported = [one for chunk in chunks for one in chunk.prompt_logprobs]
        assert_logprobs(tiny_checkpoint, ids[2], reported, 1)
        until_free(service)
        for stage, cause in (("0", "tail"), ("1", "fill")):
            assert sample(service, "stage_wait_seconds_total", engine=stage, cause=cause) > 0
        picture = command(service, "top", "--once").output
        assert "for rows" in picture and "for tokens" in picture
        assert "numbers of layers, each at least 1, which sum to 4" in layout(service, "9,9").output
        assert layout(service, "1,3").exit_code == 0
        prompts = [*ids, random_prompt(200, 7)]
        with exact_answers(tiny_oracle, service.address, prompts, 150):
            until(lambda: service.num_open == len(prompts))
            time.sleep(0.3)
            os.kill(pids(service)[1], signal.SIGKILL)
        assert not service.failure.done()
        until_free(service)
        # What the operator asked for comes back.
        until(lambda: "stage 0 has layers 0 to 0" in layout(service).output)
        live = command(service, "why", "1", "--json").output
    runner = typer.testing.CliRunner()
    played = runner.invoke(app, ["simulate", "replay", log]).output
    assert "on 2 instances, policy even" in played and "every plan is the same" in played
    logged = runner.invoke(app, ["why", "1", "--event-log", log, "--json"]).output
    (one,), (other,) = json.loads(live), json.loads(logged)
    assert one["num_generated"] == 100 and one["reason"] == "length"
    assert one | {"arrived": ""} == other | {"arrived": ""}


@pytest.mark.system
@pytest.mark.parametrize(
    ("lost", "number"), [((0,), signal.SIGKILL), ((0, 1), signal.SIGKILL), ((1,), signal.SIGSTOP)]
)
def test_stages_that_are_lost_while_layers_move_are_replaced(
    tiny_checkpoint, tiny_oracle, lost, number
):
    """The first one, all of them, and one that hangs; KV goes by TCP."""
    config = configured(CONFIG, exchange_backend="tcp", suspect_ms=2000)
    with pipeline_service(tiny_checkpoint, config) as service, ThreadPoolExecutor(8) as pool:
        ids = [random_prompt(length, length) for length in (1, 150, 300, 600)]
        with exact_answers(tiny_oracle, service.address, ids, 200):
            until(lambda: service.num_open == len(ids))
            moving = pool.submit(layout, service, "1,3")
            time.sleep(0.2)
            for pid in [pids(service)[stage] for stage in lost]:
                os.kill(pid, number)
        assert moving.result(WAIT_S).exit_code == 0
        assert "stage 0 has layers 0 to 0" in layout(service).output
        until_free(service)


@pytest.mark.system
@pytest.mark.parametrize("copy_ahead", [True, False])
@pytest.mark.parametrize(
    ("breaks", "lost"), [("cut_connection", 0), ("dying_source", 0), ("dying_target", 1)]
)
def test_what_breaks_in_the_middle_of_a_copy_of_kv_costs_no_token(
    tiny_checkpoint, tiny_oracle, breaks, lost, copy_ahead
):
    """KV goes by TCP, ahead of the mark or with it. Of a cut connection one end is replaced."""
    config = configured(CONFIG, exchange_backend="tcp", copy_ahead=copy_ahead)
    factory = f"harness.members.cut_stages:{breaks}"
    with pipeline_service(tiny_checkpoint, config, instance_factory=factory) as service:
        ids = [random_prompt(length, length) for length in (600, 1, 150, 300)]
        before = pids(service)
        greedy(service.address, ids[0], 1)  # from now on there are pages that travel
        with exact_answers(tiny_oracle, service.address, ids, 200):
            until(lambda: service.num_open == len(ids))
            assert "stage 0 has layers 0 to 0" in layout(service, "1,3").output
        changed = [a != b for a, b in zip(before, pids(service), strict=True)]
        assert changed == [stage == lost for stage in range(2)]
        until_free(service)


@pytest.mark.system
def test_rows_that_outgrow_the_frames_are_preempted_and_right(tiny_checkpoint, tiny_oracle):
    settings = {"num_frames": 12, "growth_promise": "tokens:0", "exchange_backend": "tcp"}
    with pipeline_service(tiny_checkpoint, configured(CONFIG, **settings)) as service:
        ids = [random_prompt(60 + number, number) for number in range(8)]
        with exact_answers(tiny_oracle, service.address, ids, 120):
            pass
        until_free(service)
        assert sample(service, "num_preemptions_total"), "the story must contain what it is about"


def test_a_slow_client_loses_its_request_and_stalls_no_other(tiny_checkpoint, tiny_oracle):
    """It reads nothing, and has the smallest window of HTTP/2; its log probabilities fill it."""
    config = configured(CONFIG, max_undelivered_tokens=64)
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    with (
        pipeline_service(tiny_checkpoint, config) as service,
        grpc.insecure_channel(service.address, options=options) as channel,
    ):
        sampling = pb.SamplingParameters(max_tokens=900, logprobs=20, ignore_eos=True)
        slow = rpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling)
        )
        ids = [random_prompt(length, length) for length in (1, 64, 150)]
        with exact_answers(tiny_oracle, service.address, ids, 300):
            pass
        until_free(service)
        with pytest.raises(grpc.RpcError) as raised:
            list(slow)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_undelivered_tokens (64)" in raised.value.details()


def test_what_a_pipeline_cannot_do_is_refused_by_name(tiny_checkpoint):
    cases = {
        "prefill.engines, pull, synthetic_kv or stages is set": {
            "prefill": replace(CONFIG.prefill, synthetic_kv=True)
        },
        "scheduler.steps_per_window 4": {"scheduler": SchedulerConfig(steps_per_window=4)},
        "scheduler.policy chaos": {"scheduler": SchedulerConfig(policy="chaos")},
        "cluster.redundant_experts 2": {"cluster": replace(CONFIG.cluster, redundant_experts=2)},
    }
    for sentence, sections in cases.items():
        with pytest.raises(ValueError, match=f"cluster.layout is pipeline, and {sentence}"):
            replace(CONFIG, **sections)
    with pytest.raises(ValueError, match=r"spares is 1, and cluster\.layout is pipeline"):
        replace(CONFIG, cluster=replace(CONFIG.cluster, spares=1))
    for policy, sentence in {
        "static:3,3": "static needs 2 numbers of layers, each at least 1, which sum to 4",
        "evne": "evne",
    }.items():
        config = configured(CONFIG, layer_policy=policy)
        with pytest.raises(ValueError, match=sentence):
            forked_service(config, open_checkpoint(config, tiny_checkpoint))
    wide = configured(CONFIG, num_instances=5)
    with pytest.raises(ValueError, match="num_layers is 4; each of the 5 stages needs a layer"):
        open_checkpoint(wide, tiny_checkpoint)
