"""Several front ends of one cluster: each has clients of its own, and gets their tokens."""

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import nanocp.serve.service
from control_plane.frontend.front_end import FrontEnd
from harness.exact.settings import configured
from harness.services.frontend_fakes import LIMITS, MEMBER_SECRETS, Recorder, make_config, running
from harness.services.hash_service import CONFIG, MODEL, expected, hash_service, prompt
from harness.services.kit import ids_of
from harness.services.service_recovery import until
from nanocp.client import AsyncClient, Client, NotFound, Unavailable
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.serve.free_ports import free_ports
from nanocp.values.plan import ClusterLoad, InstanceLoad


@pytest.fixture(scope="module")
def service() -> Iterator[nanocp.serve.service.Service]:
    config = configured(CONFIG, num_instances=2, front_ends=2)
    with hash_service(config, "harness.services.hash_members:build_slow") as service:
        yield service


def test_clients_of_two_front_ends_run_at_once_and_get_their_own_tokens(service):
    """Each has a seed of its own: two requests of one number would show."""
    assert len(set(service.addresses)) == 2

    def ask(number: int) -> list[list[int]]:
        with Client(service.addresses[number % 2]) as client:
            all_chunks = [
                client.generate(prompt(200, number), max_tokens=20, seed=i, timeout_s=60)
                for i in range(4)
            ]
            return [ids_of(chunks) for chunks in all_chunks]

    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(ask, range(4)))
    for number, of_requests in enumerate(outputs):
        assert of_requests == [expected(prompt(200, number), 20, seed) for seed in range(4)]


def frames_of(instance: InstanceLoad) -> int:
    """Frames that no request holds."""
    return instance.frames_free + instance.frames_quarantined


def test_every_front_end_knows_what_is_served_and_what_is_decided(service):
    async def ask() -> None:
        async with AsyncClient(service.addresses[1]) as client:
            info = await client.server_info()
            assert (info.vocab_size, info.num_instances, info.num_frames) == (MODEL.vocab_size, 2,
                                                                              64)  # fmt: skip
            assert (info.front_ends, info.policy, info.page_size) == (
                service.addresses,
                "dual_balanced",
                64,
            )
            assert (info.has_tokenizer, info.has_prefill, info.closed_because) == (False, True, "")
            assert info.uptime_s > 0 and info.version
            with Client(service.addresses[0]) as other:
                # The controller tells it now and then.
                until(lambda: [frames_of(each) for each in other.loads().instances] == [64, 64])
            chunks = client.generate(prompt(300, 9), max_tokens=1500, timeout_s=60)
            await anext(aiter(chunks))
            assert len(set(service.http_addresses)) == 2
            for address in service.http_addresses:
                with urllib.request.urlopen(f"http://{address}/v1/models", timeout=60) as models:
                    assert info.model in ("", json.load(models)["data"][0]["id"])
            with Client(service.addresses[0]) as other:
                until(lambda: other.loads().num_running == 1)
                load = other.loads()
            assert sum(instance.num_rows for instance in load.instances) == 1
            assert sum(instance.kv_tokens for instance in load.instances) >= 300
            assert sum(instance.frames_committed for instance in load.instances) >= 300 // 64
            chunks.close()

    asyncio.run(ask())


def test_the_prefill_sends_log_probabilities_to_the_front_end_that_asked(service):
    for address in service.addresses:
        for length in (1, 2, 500):
            ids = prompt(length, 3)
            with Client(address) as client:
                answer = client.generate_unary(ids, max_tokens=1, prompt_logprobs=2, timeout_s=60)
            assert [item.logprob for item in answer.prompt_logprobs] == [-float(i) for i in ids[1:]]
            assert [item.top for item in answer.prompt_logprobs] == [
                ((i, 0.0), (i + 1, -1.0)) for i in ids[1:]
            ]


def test_a_request_is_found_at_its_own_front_end_only(service):
    with Client(service.addresses[0]) as here, Client(service.addresses[1]) as there:
        chunks = here.generate(prompt(100, 5), max_tokens=1500, request_id="here")
        next(chunks)
        with pytest.raises(NotFound, match="no request is running or waiting as 'here'"):
            there.abort("here")
        again = there.generate(prompt(100, 6), max_tokens=1, request_id="here", timeout_s=60)
        assert list(again)[-1].finish is not None
        assert here.abort("here") == ("here",)


# --- with a scripted controller ---


def test_ports_follow_each_other():
    """Other processes may take the ports at any time."""
    for _ in range(10):
        port = free_ports(3)
        config = replace(
            make_config(), service=ServiceConfig(grpc_port=port, http_port=port, front_ends=3)
        )
        front_end = FrontEnd(config, None, LIMITS, MEMBER_SECRETS, Recorder(), index=2)
        with contextlib.suppress(OSError):
            assert front_end.start() == f"127.0.0.1:{port + 2}"
            front_end.stop()
            return
    raise AssertionError("there are no three ports in a row")


@pytest.mark.parametrize(("front_ends", "port"), [(0, 0), (65, 0), (2, 65535)])
def test_impossible_front_ends_are_refused(front_ends, port):
    with pytest.raises(ValueError, match=f"front_ends is {front_ends}; it must be from 1 to 64"):
        ServiceConfig(grpc_port=port, front_ends=front_ends)


def test_loads_are_unavailable_until_the_cluster_has_started():
    config = Config(service=ServiceConfig(grpc_port=0))
    front_end = FrontEnd(config, None, LIMITS, MEMBER_SECRETS, Recorder())
    try:
        with Client(front_end.start()) as client:
            assert client.server_info().closed_because == "the cluster is starting"
            with pytest.raises(Unavailable, match="the cluster is starting"):
                client.loads()
    finally:
        front_end.stop("")


def test_loads_are_the_controllers_latest():
    with running() as service:
        load = ClusterLoad(3, 4, (InstanceLoad(1, 2, 3, 4, 5), InstanceLoad(6, 7, 8, 9, 10)))
        service.front_end.open(service.controller, lambda: load)
        assert service.client.loads() == load
        assert service.client.server_info().eos_token_ids == (1,)
