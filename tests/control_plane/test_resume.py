"""Clients of a hash service resume at another front end: every token is right, nothing is left."""

import os
import signal

import grpc
import pytest

from harness.exact.settings import configured
from harness.services.hash_members import MODEL
from harness.services.hash_service import DEFAULT, expected, hash_service, prompt
from harness.services.kit import ids_of
from harness.services.service_recovery import SLOW, num_free_frames, until
from nanocp.client import Client
from nanocp.values.members import Member
from nanocp.values.sampling import SamplingParams
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

TWO = configured(DEFAULT, front_ends=2)


@pytest.mark.parametrize("length", [64, 300])
def test_a_stream_goes_on_at_another_front_end_as_if_nothing_had_happened(length, service):
    prompt_ids = prompt(length, length)
    sampling = {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.2, "logprobs": 1}
    params = SamplingParams(max_tokens=150, **sampling)
    with Client(service.addresses) as client:
        chunks = client.generate(prompt_ids, max_tokens=150, timeout_s=200, **sampling)
        received = [next(chunks)]
        # What its front end sees when a client's connection is cut.
        chunks._call.cancel()
        token_ids = ids_of(received)
        resume = {"choices": [{"output_ids": token_ids}], "attempt": 1}
        rest = resumed(service.addresses[1], prompt_ids, resume, max_tokens=150, **sampling)
        assert len(rest.logprobs) == len(rest.token_ids)
        assert token_ids + list(rest.token_ids) == MODEL.generate(prompt_ids, params)
    until(lambda: num_free_frames(service) == 4 * DEFAULT.cluster.num_frames)


def resumed(target, prompt_ids, resume, **sampling):
    with grpc.insecure_channel(target) as channel:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt_ids),
            sampling=pb.SamplingParameters(**sampling),
            resume=pb.Resume(**resume),
        )
        answer = rpc.InferenceStub(channel).GenerateUnary(request, timeout=200)
    return answer.choices[0]


@pytest.fixture(scope="module")
def service():
    with hash_service(TWO, SLOW) as service:
        yield service


def test_a_client_resumes_by_itself_when_its_front_end_ends(service):
    prompt_ids = prompt(130, 5)
    with Client(service.addresses) as client:
        chunks = client.generate(prompt_ids, max_tokens=200, seed=1, timeout_s=200)
        token_ids = list(next(chunks).token_ids)
        os.kill(service._front_ends._launcher.pid(Member("front end", 0)), signal.SIGKILL)
        token_ids += ids_of(chunks)
    assert token_ids == expected(prompt_ids, 200)
    until(lambda: num_free_frames(service) == 4 * DEFAULT.cluster.num_frames)
    until(lambda: len(service._front_ends._port._attached) == 2)
