"""Responses that are kept: chains, references, the background, and a bound on their bytes."""

import contextlib
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.responses_api.protocol import ResponsesAnswer, ResponsesRequest
from control_plane.frontend.http.responses_api.store import MAX_BACKGROUND, TTL_S, ResponseStore
from control_plane.frontend.http.responses_api.writer import begun
from harness.services.frontend_fakes import TOKENIZER, Service, make_config, running
from harness.services.openai_service import SAID, TOOLS, WITH_TOOLS, asked, posted, refused
from harness.waits import WAIT_S, until
from nanocp.values.plan import FinishReason


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model=WITH_TOOLS) as service:
        yield service


def gone(service: Service, response_id: str, **headers: str) -> bool:
    answer = httpx.get(f"{service.url}/v1/responses/{response_id}", headers=headers)
    if answer.status_code == 200:
        return False
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        404, "previous_response_not_found",
    )  # fmt: skip
    return True


def test_a_chain_has_the_prompt_that_all_items_have(service, client):
    fields: Any = {"model": "tale", "tools": TOOLS}
    first, before = asked(service, lambda: client.responses.create(input="Go.", **fields), SAID)
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "out"}
        for one in first.output if one.type == "function_call"
    ]  # fmt: skip
    second, chained = asked(
        service,
        lambda: client.responses.create(input=outputs, previous_response_id=first.id, **fields),
    )
    items = [{"role": "user", "content": "Go."}, *(one.to_dict() for one in first.output)]
    _, whole = asked(
        service, lambda: client.responses.create(input=[*items, *outputs], store=False, **fields)
    )
    assert chained == whole and chained.startswith(before)
    assert second.previous_response_id == first.id
    references: list[Any] = [{"type": "item_reference", "id": one.id} for one in first.output]
    _, referred = asked(
        service,
        lambda: client.responses.create(
            input=[{"role": "user", "content": "Go."}, *references, *outputs], **fields
        ),
    )
    assert referred == whole


def test_a_gap_in_a_chain_is_named(service, client):
    fields: Any = {"model": "tale", "input": "x"}
    first, _ = asked(service, lambda: client.responses.create(**fields))
    fields["previous_response_id"] = first.id
    second, _ = asked(service, lambda: client.responses.create(**fields))
    client.responses.delete(first.id)
    sentence = f"previous_response_id is '{second.id}', whose earlier response '{first.id}' is not"
    with pytest.raises(openai.NotFoundError, match=sentence):
        client.responses.create(**fields | {"previous_response_id": second.id})


def test_a_kept_response_is_read_listed_and_deleted(service, client):
    given: Any = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    answer, _ = asked(service, lambda: client.responses.create(model="tale", input=given))
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    listed = client.responses.input_items.list(answer.id, limit=2, order="asc")
    assert [one.content for one in listed.data] == ["a", "b"]
    assert [one.content for one in listed] == ["a", "b", "c"]
    latest = client.responses.input_items.list(answer.id, limit=1)
    assert [one.content for one in latest.data] == ["c"]
    client.responses.delete(answer.id)
    assert gone(service, answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)


def test_a_stream_is_kept_before_its_last_event(service, client):
    def stream() -> str:
        for event in client.responses.create(model="tale", input="x", stream=True):
            if event.type == "response.completed":
                return client.responses.retrieve(event.response.id).id
        raise AssertionError

    answer, _ = asked(service, stream)
    assert answer.startswith("resp_0_")


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_not_kept_is_not_found(service, client, stream):
    answer, _ = asked(
        service, lambda: service.post("responses", {"input": "x", "store": False, "stream": stream})
    )
    name = re.search(r'"id":"(resp_[^"]*)"', answer.text)
    assert name and gone(service, name[1])


def test_a_cut_stream_leaves_nothing(service, client):
    names = []

    def stream() -> None:
        with client.responses.create(model="tale", input="x", stream=True) as events:
            names.append(next(iter(events)).response.id)

    with ThreadPoolExecutor(1) as pool:
        cut_off = pool.submit(stream)
        request = service.submitted().request_id
        service.instance.deliver(
            request, 0, TOKENIZER.encode("fox", add_special_tokens=False), None
        )
        cut_off.result(WAIT_S)
    assert service.next_abort() == request
    assert gone(service, names[0])


def test_the_background_goes_on_alone(service, client):
    queued = client.responses.create(model="tale", input="x", background=True)
    assert (queued.status, queued.background) == ("queued", True)
    request = service.submitted().request_id
    with pytest.raises(openai.BadRequestError, match="is queued; it must be completed"):
        client.responses.create(model="tale", input="y", previous_response_id=queued.id)
    ids = TOKENIZER.encode("fox", add_special_tokens=False)
    service.instance.deliver(request, 0, ids, None)
    until(lambda: client.responses.retrieve(queued.id).status == "in_progress")
    service.instance.deliver(request, len(ids), [1], FinishReason.STOP)
    until(lambda: client.responses.retrieve(queued.id).status == "completed")
    assert client.responses.retrieve(queued.id).output_text
    assert client.responses.cancel(queued.id).status == "completed"


def test_a_cancelled_background_aborts_its_request(service, client):
    queued = client.responses.create(model="tale", input="x", background=True)
    request = service.submitted().request_id
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert service.next_abort() == request
    assert client.responses.retrieve(queued.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.responses.create(model="tale", input="y", previous_response_id=queued.id)
    deleted = client.responses.create(model="tale", input="x", background=True)
    request = service.submitted().request_id
    client.responses.delete(deleted.id)
    assert service.next_abort() == request and gone(service, deleted.id)


@pytest.mark.parametrize("headers", [{}, {"X-Request-Id": "mine"}])
def test_a_response_has_the_name_of_its_request(service, client, headers):
    for background in (True, False):
        create = partial(client.responses.create, model="tale", input="x", background=background)
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(create, extra_headers=headers)
            arrival = service.submitted().arrival
            assert service.client.abort(arrival.client_id) == (arrival.client_id,)
            answer = coming.result(WAIT_S)
        assert answer.id == arrival.client_id
        named = answer._request_id in arrival.names
        assert named if not headers else answer._request_id == "mine" and not named


def test_a_background_that_fails_says_why(service, client):
    queued = client.responses.create(model="tale", input="x", background=True)
    ids = TOKENIZER.encode("fox", add_special_tokens=False)
    service.instance.deliver(service.submitted().request_id, 0, ids, FinishReason.INVALID)
    until(lambda: client.responses.retrieve(queued.id).status == "failed")
    failed = client.responses.retrieve(queued.id)
    assert failed.error and failed.error.code == "invalid_prompt" and failed.output == []


def test_few_run_in_the_background(service, client):
    names = [client.responses.create(model="tale", input="x", background=True).id
             for _ in range(MAX_BACKGROUND)]  # fmt: skip
    answer = service.post("responses", {"input": "x", "background": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (503, "background")
    assert answer.headers["Retry-After"]
    for name in names:
        service.submitted()
        client.responses.delete(name)
        service.next_abort()


def test_many_that_come_at_once_are_no_more_in_the_background(service, client):
    body = {"input": "x", "background": True}
    with ThreadPoolExecutor(80) as pool:
        answers = [*pool.map(lambda _: service.post("responses", body), range(80))]
    begun = [one.json()["id"] for one in answers if one.status_code == 200]
    assert len(begun) == MAX_BACKGROUND
    for name in begun:
        service.submitted()
        client.responses.delete(name)
        service.next_abort()


def test_an_item_is_referred_to_once(service, client):
    answer, _ = asked(service, lambda: client.responses.create(model="tale", input="x"))
    reference = {"type": "item_reference", "id": answer.output[0].id}
    error = refused(service, input=[reference, reference])
    assert error["param"] == "input.1.id" and "refer to it once" in error["message"]


def test_a_chain_and_references_read_what_they_need(monkeypatch):
    store = ResponseStore(1 << 20)
    names = [store.new_id() for _ in range(3)]
    for before, name in zip([None, *names], names, strict=False):
        answer = kept_answer(name, "x", before)
        answer.output.append({"type": "message", "id": f"{name.replace('resp', 'msg')}_1"})
        store.keep("a", [{"content": name}], answer)
    monkeypatch.setattr(ResponsesAnswer, "model_validate_json", None)
    assert len(store.history("a", names[-1])) == 9
    read: dict[str, Any] = {}
    first, second = (f"{names[0].replace('resp', 'msg')}_{number}" for number in range(2))
    assert store.item("a", read, first, "input.0.id")["id"] == first
    store.delete("a", names[0])
    assert store.item("a", read, second, "input.1.id")["id"] == second


def test_what_cannot_be_asked_of_a_response(service, client):
    answer, _ = asked(service, lambda: client.responses.create(model="tale", input="x"))
    with pytest.raises(openai.BadRequestError, match="has no background"):
        client.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError, match="stream is true"):
        client.responses.retrieve(answer.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="after is"):
        client.responses.input_items.list(answer.id, after="in_9")
    with pytest.raises(openai.BadRequestError, match=r"limit is '0': .* greater than"):
        client.responses.input_items.list(answer.id, limit=0)


def test_another_tenants_response_is_not_found():
    config = make_config()
    config = replace(config, service=replace(config.service, api_keys=("one", "two")))
    with running(config, model=WITH_TOOLS) as service:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        answer, _ = asked(service, lambda: service.post("responses", {"input": "x"}, headers=one))
        name, item = answer.json()["id"], answer.json()["output"][0]["id"]
        assert gone(service, name, **two) and not gone(service, name, **one)
        for fields in (
            {"previous_response_id": name},
            {"input": [{"type": "item_reference", "id": item}]},
        ):
            other = service.post("responses", {"input": "x", **fields}, headers=two)
            assert other.status_code == 404
        url = f"{service.url}/v1/responses/{name}"
        assert httpx.delete(url, headers=two).status_code == 404
        assert httpx.get(f"{url}/input_items", headers=two).status_code == 404
        assert httpx.post(f"{url}/cancel", json={}, headers=two).status_code == 404
        assert not gone(service, name, **one)


def test_a_service_may_keep_nothing():
    config = make_config()
    config = replace(config, service=replace(config.service, responses_store_mib=0))
    with running(config, model=WITH_TOOLS) as service:
        answer, _ = posted(service, {"input": "x", "store": True})
        assert answer["store"] is False and gone(service, answer["id"])
        assert refused(service, background=True)["param"] == "background"


def test_a_background_that_could_not_be_kept_is_refused():
    config = make_config()
    config = replace(config, service=replace(config.service, responses_store_mib=1))
    with running(config, model=WITH_TOOLS) as service:
        error = refused(service, background=True, metadata={"a": "y" * 2**20})
        assert error["param"] == "background" and "too large" in error["message"]
        assert service.controller.submissions.empty()


def kept_answer(name: str, text: str, before: str | None = None) -> ResponsesAnswer:
    answer = begun(ResponsesRequest(previous_response_id=before), name, "tale", True)
    answer.status = "completed"
    answer.output = [{"type": "message", "id": f"{name.replace('resp', 'msg')}_0", "text": text}]
    return answer


def used(store: ResponseStore, way: str, owner: str, name: str) -> None:
    """Use a response; raises ApiError if it is not kept."""
    item = f"{name.replace('resp', 'msg')}_0"
    match way:
        case "find":
            assert store.find(owner, name).answer.id == name
        case "chain":
            assert store.history(owner, name)[-1]["id"] == item
        case "item":
            assert store.item(owner, {}, item, "input.0.id")["id"] == item
        case "delete":
            store.delete(owner, name)
            with pytest.raises(ApiError):
                store.find(owner, name)


def test_the_store_stays_below_its_bound():
    dice, now_s, most = random.Random(56), [0.0], 100_000
    store = ResponseStore(most, 0, lambda: now_s[0])
    owners: dict[str, str] = {}
    found = {True: 0, False: 0}
    for _ in range(10_000):
        now_s[0] += dice.choice([0.1, 1.0, 30.0])
        way = dice.choice(["keep", "find", "chain", "item", "delete"])
        known = dice.choice([*owners][-40:] or ["resp_0_x"])
        owner = dice.choice(["a", "b"])
        if way == "keep":
            before = known if owners.get(known) == owner and dice.random() < 0.7 else None
            text = "ö" * int(min(dice.paretovariate(1), 400) * 300)
            name = store.new_id()
            store.keep(owner, [{"content": text}], kept_answer(name, text, before))
            owners[name] = owner
        else:
            try:
                used(store, way, owner, known)
                assert owners[known] == owner
                found[True] += 1
            except ApiError as error:
                assert error.status == 404
                found[False] += 1
        assert store.num_bytes <= most
    assert min(found.values()) > 500
    num_bytes = 0
    for name, owner in owners.items():
        with contextlib.suppress(ApiError):
            num_bytes += store.find(owner, name).num_bytes
    assert num_bytes == store.num_bytes > most / 4


def test_the_least_recently_used_one_goes_first():
    now_s = [0.0]
    store = ResponseStore(5000, 0, lambda: now_s[0])
    first, second, third = (store.new_id() for _ in range(3))
    store.keep("a", [], kept_answer(first, "x" * 1000))
    store.keep("a", [], kept_answer(second, "x" * 1000))
    assert store.num_bytes == sum(store.find("a", name).num_bytes for name in (second, first))
    store.keep("a", [], kept_answer(third, "x" * 1500))
    with pytest.raises(ApiError):
        store.find("a", second)
    store.find("a", first)
    now_s[0] += TTL_S - 1
    store.find("a", first)
    now_s[0] += 1
    with pytest.raises(ApiError):
        store.find("a", third)
    assert store.num_bytes == store.find("a", first).num_bytes
    store.keep("a", [], kept_answer(first, "x" * 10_000))
    assert store.num_bytes == 0
