"""A service whose prompts are computed by engines: fake ones, in processes that tests kill."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from control_plane.coordinator.members.start import StartError
from harness.exact.settings import configured
from harness.services.hash_service import CONFIG, expected, generate, hash_service, prompt
from harness.services.service_recovery import sample
from harness.vllm.engines import EngineProcess
from harness.waits import until
from nanocp.client import ServiceError
from nanocp.serve.process import free_port
from nanocp.values.members import PREFILL, Member

LENGTHS = [1, 2, 64, 65, 66, 129, 300, 513, 1000]


def config_for(*urls, **settings):
    impatient = {"exchange_timeout_ms": 3000, "plan_timeout_ms": 2500, "retry_ms": 200}
    return configured(CONFIG, engines=urls, ring_pages=2, **impatient, **settings)


@contextlib.contextmanager
def served_by(*engines, **options):
    with hash_service(config_for(*(engine.url for engine in engines), **options)) as service:
        yield service


def generate_all(service, lengths, seed=0, max_tokens=6):
    """Requests of these lengths, all at once; each must be exact."""
    prompts = [prompt(length, seed + index) for index, length in enumerate(lengths)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        tokens = list(pool.map(lambda ids: generate(service.address, ids, max_tokens), prompts))
    for ids, found in zip(prompts, tokens, strict=True):
        assert found == expected(ids, max_tokens), f"a prompt of {len(ids)} tokens"


@pytest.mark.parametrize(("backend", "block_size"), [
    ("auto", 16),
    ("tcp", 128),
    pytest.param("auto", 128, marks=pytest.mark.system),
    pytest.param("tcp", 16, marks=pytest.mark.system),
])  # fmt: skip
def test_every_token_is_right_whatever_the_blocks_and_the_way(backend, block_size):
    with (
        EngineProcess(block_size=block_size) as engine,
        served_by(engine, exchange_backend=backend) as service,
    ):
        for _ in range(2):  # Prefixes are shared here and cached there.
            generate_all(service, LENGTHS)


@pytest.mark.parametrize("fault", ["", "mtp"], ids=["model alone", "with MTP layer"])
def test_engines_with_the_mtp_layer_and_without_prefill_for_instances_that_draft(fault):
    """Prompts' KV of the MTP layer is zero, or the engine's; tokens do not depend on it."""
    with EngineProcess(fault=fault) as engine, served_by(engine, num_drafts=2) as service:
        generate_all(service, LENGTHS, max_tokens=20)
        name = "spec_decode_num_drafts_total"
        # How many, a loss decides: an instance that starves is replaced, and forgets drafts.
        until(lambda: sum(sample(service, name, engine=each) for each in "0123") > 0)


def test_two_engines_and_one_is_killed_and_comes_back():
    with (
        EngineProcess(fault="slow") as a,
        EngineProcess(fault="slow") as b,
        served_by(a, b) as service,
        ThreadPoolExecutor(1) as pool,
    ):
        for killed, other in ((a, b), (b, a)):
            under_way = pool.submit(generate_all, service, LENGTHS * 2, seed=killed.port)
            time.sleep(0.4)
            killed.kill()
            under_way.result(60)
            generate_all(service, [70, 200])
            killed.start()
            until_up(service, killed.url)
            assert other.process.poll() is None


def until_up(service, url):
    until(lambda: is_up(service, url), limit_s=20)


def is_up(service, url):
    return sample(service, "prefill_engine_up", url=url) == 1


@pytest.mark.system
def test_a_sentence_where_no_engine_lives_and_service_goes_on():
    with EngineProcess() as engine, served_by(engine) as service:
        generate_all(service, [100])
        engine.kill()
        with pytest.raises(ServiceError, match=rf"no engine for prefill is up: {engine.url}: "):
            generate(service.address, prompt(100, 9), 4)
        assert generate(service.address, [5], 4) == expected([5], 4), "one token needs no prefill"
        engine.start()
        until_up(service, engine.url)
        generate_all(service, [100, 300])


def test_an_answer_is_no_arrival():
    """The first engine answers and sends nothing; each of its prompts goes to the second."""
    with (
        EngineProcess(fault="probed") as mute,
        EngineProcess() as good,
        served_by(mute, good) as service,
    ):
        generate_all(service, [100, 200, 300])


def test_an_engine_that_hangs_loses_its_prompts_at_their_deadline():
    with (
        EngineProcess() as a,
        EngineProcess() as b,
        served_by(a, b, timeout_ms=1500, timeout_us_per_token=0) as service,
    ):
        a.kill()
        a.start(fault="hang")
        # Its probe hangs too, so that it never comes back.
        generate_all(service, [100, 200, 300, 400])


def test_an_engine_that_fails_its_prompts_costs_attempts_and_then_a_sentence():
    with (
        EngineProcess(fault="deaf") as deaf,
        served_by(deaf, max_attempts=2) as service,
        pytest.raises(ServiceError, match=r"prefill failed in 2 attempts: .*HTTP 500"),
    ):
        generate(service.address, prompt(100, 1), 4)


@pytest.mark.parametrize(("fault", "sentence"), [
    ("garbage", "page 0 of the probe differs"),
    ("plain", "it computes prompts but sends no pages: start vLLM with the flags"),
])  # fmt: skip
def test_an_engine_with_other_kv_never_serves(fault, sentence):
    with (
        EngineProcess(fault=fault) as engine,
        pytest.raises(StartError, match=sentence),
        served_by(engine),
    ):
        raise AssertionError("it must not start")


@pytest.mark.system
def test_an_engine_with_an_api_key_serves_those_who_have_it():
    sentence = "HTTP 401: it asks for its API key: set NANOCP_PREFILL__API_KEY"
    with EngineProcess(api_key="sk-7f3a") as engine:
        with served_by(engine, api_key="sk-7f3a") as service:
            generate_all(service, [100])
        for key in ("", "sk-other"):
            with pytest.raises(StartError, match=sentence) as error, served_by(engine, api_key=key):
                raise AssertionError("it must not start")
            assert "sk-" not in str(error.value)


def test_an_engine_that_comes_back_with_other_kv_does_not_serve_again():
    with EngineProcess() as engine, EngineProcess() as other, served_by(engine, other) as service:
        engine.kill()
        engine.start(fault="garbage")
        deadline = time.monotonic() + 20
        while is_up(service, engine.url):
            generate_all(service, LENGTHS)
            assert time.monotonic() < deadline


@pytest.mark.system
def test_no_engine_at_all_is_a_sentence_at_the_start():
    url = f"http://127.0.0.1:{free_port()}"
    config = config_for(url, start_timeout_ms=40_000)
    sentence = f"no engine for prefill is up: {url}: ConnectionRefused"
    with pytest.raises(StartError, match=sentence), hash_service(config):
        raise AssertionError("it must not start")


def test_an_abort_reaches_the_engine_and_frees_everything():
    with EngineProcess(fault="slow") as engine, served_by(engine) as service:
        for _ in range(3):
            with pytest.raises(ServiceError):
                generate(service.address, prompt(900, 4), 4, timeout_s=0.2)
        generate_all(service, LENGTHS)
        loads = lambda: service.metrics.scheduling.load.instances  # noqa: E731
        until(lambda: not any(load.frames_quarantined for load in loads()), limit_s=20)


@pytest.mark.system
def test_a_new_service_finds_the_engine_that_served_the_last():
    """The engine has the dead service's rings open still."""
    with EngineProcess() as engine:
        for _ in range(2):
            with served_by(engine) as service:
                generate_all(service, [100, 200])


@pytest.mark.system
def test_the_second_service_at_an_engine_is_served_too():
    with EngineProcess() as engine, served_by(engine) as one, served_by(engine) as two:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(generate_all, (one, two), (LENGTHS, LENGTHS)))
        generate_all(one, [100])
        generate_all(two, [100])


@pytest.mark.parametrize(
    "member", [Member("instance", 1), pytest.param(PREFILL, marks=pytest.mark.system)], ids=str
)
def test_a_member_that_is_lost_while_engines_compute_costs_no_request(member):
    """A lost instance ends the term with its tickets; a new prefill begins with those in force."""
    with EngineProcess(fault="slow") as a, EngineProcess() as b, served_by(a, b) as service:
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(generate_all, service, LENGTHS)
            time.sleep(0.3)
            service.launcher.kill(member)
            under_way.result(60)
        generate_all(service, LENGTHS, seed=50)
