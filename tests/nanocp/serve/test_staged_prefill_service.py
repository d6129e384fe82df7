"""A cluster whose prompts are computed by two stages: real processes, every token exact."""

import os
import signal
import time
from contextlib import contextmanager

import psutil
import pytest

from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.exact.prompt_logprobs import assert_logprobs
from harness.exact.settings import configured
from harness.services.hash_service import process_launcher, shared_memory_of
from harness.services.kit import exact_answers, random_prompt, started
from harness.waits import until
from nanocp.client import Client
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.serve.process import serving as serve
from nanocp.serve.service import Service, open_checkpoint
from nanocp.values.members import PREFILL

CONFIG = Config(
    cluster=ClusterConfig(
        num_instances=2,
        num_frames=40,
        max_model_len=1024,
        bounds=BoundsConfig(max_rows=8, max_attention_rows=16),
    ),
    scheduler=SchedulerConfig(
        policy="dual_balanced", cp_degree_buckets=((128, 1),), cp_degree_max=2
    ),
    prefill=PrefillConfig(stages=2, chunk_tokens=128),
    limits=LimitsConfig(tick_ms=50, start_timeout_ms=120_000, drain_timeout_ms=30_000),
    service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0, check_invariants=True),
)


@contextmanager
def serving(checkpoint, config=CONFIG):
    service = Service(config, open_checkpoint(config, checkpoint), process_launcher())
    with started(service):
        yield service
    assert shared_memory_of(service) == []


@contextmanager
def long_prompts_under_way(oracle, service, max_tokens):
    """Four prompts are with the prefill; at the end each answer is exact."""
    prompts = [random_prompt(900, seed) for seed in range(4)]
    with exact_answers(oracle, service.address, prompts, max_tokens):
        until(lambda: service.num_open == 4)
        yield


def stages_of(service):
    """The processes of the stages, in order."""
    children = psutil.Process(service.launcher.pid(PREFILL)).children()
    return sorted(children, key=lambda process: process.cmdline()[-1])


@pytest.mark.system
def test_prompts_through_two_stages_are_exact_also_after_a_stage_is_lost(
    tiny_checkpoint, tiny_oracle
):
    with serving(tiny_checkpoint) as service:
        lengths = (2, 64, 65, 150, 300, 700, 31, 129)
        ids = [random_prompt(length, length) for length in lengths]
        with exact_answers(tiny_oracle, service.address, ids, 12):
            pass
        with Client(service.address) as client:
            chunks = client.generate(ids[4], max_tokens=1, temperature=0.0, prompt_logprobs=1)
            reported = [one for chunk in chunks for one in chunk.prompt_logprobs]
        assert_logprobs(tiny_checkpoint, ids[4], reported, 1)
        lost = stages_of(service)
        assert [each.cmdline()[-1] for each in lost] == ["prefill stage 0", "prefill stage 1"]
        with long_prompts_under_way(tiny_oracle, service, 8):
            os.kill(lost[1].pid, signal.SIGKILL)
        assert not any(each.is_running() for each in lost), "a lost stage ends the others"
        assert not service.failure.done()


@pytest.mark.system
@pytest.mark.parametrize("preset", ["tiny-qwen3-next", "tiny-kimi-linear"])
def test_states_through_stages_are_exact_also_after_a_stage_is_lost(preset, tmp_path):
    """The first of two stages has linear attention layers alone."""
    make_checkpoint(tmp_path, preset)
    oracle = Oracle(tmp_path)
    with serving(tmp_path) as service:
        ids = [random_prompt(length, length) for length in (2, 65, 150, 700)]
        with exact_answers(oracle, service.address, ids, 12):
            pass
        with long_prompts_under_way(oracle, service, 8):
            os.kill(stages_of(service)[0].pid, signal.SIGKILL)


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_instance_that_is_lost_does_not_keep_the_stages(tiny_checkpoint, tiny_oracle, number):
    """The next term has new rings; KV goes by TCP."""
    scheduler = SchedulerConfig()
    config = configured(CONFIG, exchange_backend="tcp", suspect_ms=2000, scheduler=scheduler)
    with serving(tiny_checkpoint, config) as service:
        stages = stages_of(service)
        with long_prompts_under_way(tiny_oracle, service, 30):
            time.sleep(0.2)
            os.kill(service.launcher.pid(service._controller.members.expected[1]), number)
        assert stages_of(service) == stages


def test_more_stages_than_layers_are_refused(tiny_checkpoint):
    config = Config(prefill=PrefillConfig(stages=5))
    with pytest.raises(ValueError, match=r"prefill\.stages is 5, and the model has 4 layers"):
        open_checkpoint(config, tiny_checkpoint)


@pytest.mark.system
def test_the_controller_is_lost_while_stages_compute(tiny_checkpoint, tiny_oracle):
    """Stages may still run passes of prompts that the next controller knows by other tickets."""
    settings = {
        "service.controller_process": True, "prefill.stages": 2, "prefill.chunk_tokens": 64,
        "cluster.num_frames": 64, "cluster.max_model_len": 1024,
    }  # fmt: skip
    with serve(tiny_checkpoint, 2, settings, ray=False, synthetic_kv=False) as service:
        for also_lost in (None, "prefill stage 1"):
            prompts = [random_prompt(900, seed) for seed in range(6)]
            before = num_tokens(service)
            with exact_answers(tiny_oracle, service.target, prompts, 20):
                until(lambda before=before: num_tokens(service) > before)
                processes = descendants_of(service)
                os.kill(processes["controller"], signal.SIGKILL)
                if also_lost:
                    os.kill(processes[also_lost], signal.SIGKILL)
            stages = [f"prefill stage {stage}" for stage in range(2)]
            now = descendants_of(service)
            goes_on = [processes[stage] == now[stage] for stage in stages]
            assert goes_on == [also_lost is None] * 2
        assert service.frames_not_back() == 0


def num_tokens(service):
    return service.metrics()["nanocp:generation_tokens_total", ""]


def descendants_of(service):
    """Processes by the last word of their command line."""
    found = psutil.Process(service.pid).children(recursive=True)
    return {process.cmdline()[-1]: process.pid for process in found}
