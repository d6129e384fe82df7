"""kv_transfer_params at the door: what is read, what is refused, and what is freed then."""

import json
from dataclasses import replace

import httpx
import pytest
from pydantic import ValidationError

from control_plane.frontend.http.kv_transfer import KvTransferParams
from harness.services.frontend_fakes import LIMITS, WAIT_S, running
from harness.services.openai_service import MODEL
from nanocp.values.plan import FinishReason
from nanocp.values.remote_blocks import RemoteBlocks

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "7d3c",
    "remote_request_id": "cmpl-1-0-5f3a1b2c",
    "remote_block_ids": [[4, 7, 9]],
    "remote_host": "10.1.2.3",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "remote_prefill_cached_tokens": 32,
    "transfer_mode": "pull",
}
BLOCKS = RemoteBlocks("7d3c", "cmpl-1-0-5f3a1b2c", (4, 7, 9), "10.1.2.3", 5600, 1, 40, 32)
BODIES = {
    "completions": {"prompt": [5] * 40},
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "responses": {"input": "hi"},
}
EVERYWHERE = pytest.mark.parametrize("path", BODIES)


@pytest.fixture(scope="module")
def service():
    with running(limits=replace(LIMITS, pulls_kv=True), model=MODEL) as service:
        yield service


def refused(service):
    return service.controller.refused.get(timeout=WAIT_S)


@EVERYWHERE
def test_blocks_go_with_the_submission_and_are_named_again_once_the_call_has_ended(
    service, pool, path
):
    answer = pool.submit(service.post, path, {**BODIES[path], "kv_transfer_params": PARAMS})
    submission = service.answer([5, 6])
    assert submission.remote == BLOCKS
    assert answer.result().status_code == 200
    assert refused(service) == BLOCKS and service.controller.refused.empty()


def test_tokens_that_the_engine_had_cached_are_told(service, pool):
    body = {"prompt": [5] * 40, "kv_transfer_params": PARAMS}
    answer = pool.submit(service.post, "completions", body)
    service.answer([5, 6])
    assert answer.result().json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    refused(service)


@EVERYWHERE
@pytest.mark.parametrize("given", [None, {}, {"do_remote_prefill": False}, {"other": 1}])
def test_params_that_ask_for_nothing_are_ignored(service, pool, path, given):
    answer = pool.submit(service.post, path, {**BODIES[path], "kv_transfer_params": given})
    assert service.answer([5, 6]).remote is None
    assert answer.result().status_code == 200 and service.controller.refused.empty()


MISTAKES = {
    "remote_engine_id": [None, 7, "", "x" * 600, ["a"]],
    "remote_request_id": [None, 7, ""],
    "remote_block_ids": ["4", 4, [["4"]], [[4.5]], [[-1]], [[True]], [[1 << 31]], {"a": 1}],
    "remote_host": [None, 1, "", "a b", "a\0b", "\x1b[2J", "[::1]", "a\n"],
    "remote_port": [None, "5600", 0, 65536, 5600.5, True],
    "remote_num_tokens": [None, "40", 0, -1],
    "tp_size": ["1", 0, 2000],
    "remote_prefill_cached_tokens": ["a", -1],
    "remote_registration_generation": ["a", -1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in MISTAKES.items() for value in values]
)
def test_a_wrong_type_is_named(service, name, value):
    body = {"prompt": [5] * 40, "kv_transfer_params": {**PARAMS, name: value}}
    answer = service.post("completions", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(f"kv_transfer_params.{name}")
    assert error["message"].startswith(error["param"]) and len(error["message"]) < 300
    assert service.controller.submissions.empty()


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_host", "remote_port",
                                  "remote_block_ids", "remote_num_tokens"])  # fmt: skip
def test_an_absent_field_is_named(service, name):
    params = {key: value for key, value in PARAMS.items() if key != name}
    answer = service.post("completions", {"prompt": [5] * 40, "kv_transfer_params": params})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"kv_transfer_params.{name}"


@EVERYWHERE
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("transfer_mode", "push", "must be pull"),
        ("pp_size", 2, "must be 1"),
        ("dcp_size", 4, "must be 1"),
        ("remote_block_ids", [[1], [2]], "groups of remote_block_ids is 2; it must be 1"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused_by_name_and_its_blocks_are_freed(
    service, path, name, value, words
):
    params = {**PARAMS, name: value}
    answer = service.post(path, {**BODIES[path], "kv_transfer_params": params})
    assert answer.status_code == 400
    sentence = answer.json()["error"]["message"]
    assert sentence.startswith("kv_transfer_params.") and words in sentence
    assert refused(service).key == BLOCKS.key


@pytest.mark.parametrize(
    "more",
    [{"temperature": "hot"}, {"max_tokens": 0}, {"n": 0}, {"prompt": [7] * 300_000},
     {"prompt": [[5], [6]]}, {"model": "another"}, {"stop": ["a"] * 99}],
    ids=str,
)  # fmt: skip
def test_blocks_of_a_request_with_another_mistake_are_freed(service, more):
    body = {"prompt": [5] * 40, "kv_transfer_params": PARAMS, **more}
    assert service.post("completions", body).status_code in (400, 404)
    assert refused(service) == BLOCKS and service.controller.submissions.empty()


@pytest.mark.parametrize(
    ("does_prefill", "name"), [(False, "do_remote_prefill"), (True, "do_remote_decode")]
)
def test_this_service_computes_no_prompts_for_others(service, does_prefill, name):
    params = {**PARAMS, "do_remote_decode": True, "do_remote_prefill": does_prefill}
    answer = service.post("completions", {"prompt": [5], "kv_transfer_params": params})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"kv_transfer_params.{name}"
    assert answer.json()["error"]["message"].startswith(f"kv_transfer_params.{name} is ")


def test_a_flat_list_of_blocks_is_one_group(service, pool):
    body = {"prompt": [5] * 40, "kv_transfer_params": {**PARAMS, "remote_block_ids": [4, 7, 9]}}
    answer = pool.submit(service.post, "completions", body)
    assert service.answer([5, 6]).remote == BLOCKS
    assert answer.result().status_code == 200
    refused(service)


def test_megabytes_of_blocks_are_refused_by_name(service):
    ids = list(range(1_000_000, 2_000_000))
    body = {"prompt": [5] * 40, "kv_transfer_params": {**PARAMS, "remote_block_ids": [ids]}}
    raw = json.dumps(body).encode()
    too_large = json.dumps({**body, "filler": "x" * (4 << 20)}).encode()
    assert len(raw) > 8 << 20
    headers = {"Content-Type": "application/json"}
    with running(limits=replace(LIMITS, pulls_kv=True, max_model_len=900_000), model=MODEL) as big:
        answer = httpx.post(f"{big.url}/v1/completions", content=raw, headers=headers, timeout=60)
        assert answer.status_code == 400
        assert "remote_block_ids has 1000000 ids" in answer.json()["error"]["message"]
        answer = httpx.post(
            f"{big.url}/v1/completions", content=too_large, headers=headers, timeout=60
        )
        assert answer.status_code == 400


@pytest.mark.parametrize("ids", [["x"] * 10_000, [["x"] * 10_000], [[]] + ["x"] * 10_000],
                         ids=["flat", "one group", "groups"])  # fmt: skip
def test_of_many_wrong_ids_one_is_looked_for(ids):
    params = {**PARAMS, "remote_block_ids": ids}
    with pytest.raises(ValidationError) as found:
        KvTransferParams.model_validate(params)
    assert found.value.error_count() == 1, "all would stop the event loop for seconds"


def test_a_resumed_answer_pulls_nothing(service, pool):
    body = {
        "prompt": [5] * 40, "kv_transfer_params": PARAMS, "stream": True,
        "resume": {"choices": [{"output_ids": [7]}]},
    }  # fmt: skip
    answer = pool.submit(service.post, "completions", body)
    submission = service.submitted()
    service.instance.deliver(submission.request_id, 1, [5] * 15, FinishReason.LENGTH, 1)
    assert submission.remote is None and answer.result().status_code == 200
    refused(service)


def test_a_background_response_pulls_nothing(service):
    body = {"input": "hi", "background": True, "kv_transfer_params": PARAMS}
    answer = service.post("responses", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "background"
    refused(service)


def test_without_allowed_networks_the_field_is_refused():
    with running(model=MODEL) as service:
        body = {"prompt": [5] * 40, "kv_transfer_params": PARAMS}
        answer = service.post("completions", body)
        assert answer.status_code == 400
        assert "prefill.pull.allowed is empty" in answer.json()["error"]["message"]
        assert service.controller.refused.empty()


def test_without_a_prefill_a_prompt_needs_blocks(pool):
    limits = replace(LIMITS, pulls_kv=True, computes_prompts=False)
    with running(limits=limits, model=MODEL) as service:
        answer = service.post("completions", {"prompt": [5, 6]})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("kv_transfer_params is absent")
        one = pool.submit(service.post, "completions", {"prompt": [5]})
        service.answer([7, 8])
        assert one.result().status_code == 200
