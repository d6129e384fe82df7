"""Equal prompts share KV within a salt only, through every door, by counts of a whole service."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from control_plane.frontend.access.api_keys import ApiKeys
from control_plane.frontend.client_request import Origin, origin_of
from control_plane.frontend.text.page_hashes import page_state
from control_plane.frontend.text.tokenizer import load_tokenizer
from control_plane.frontend.validation import ModelLimits
from harness.exact.settings import configured
from harness.services.frontend_fakes import TOKENIZER, running
from harness.services.hash_members import WORDY
from harness.services.hash_service import CONFIG, forked_service, hash_service, prompt
from harness.services.kit import started
from harness.services.openai_service import MODEL as SERVED_MODEL
from harness.services.service_recovery import SLOW, pid_of, sample, until, until_serving
from harness.waits import WAIT_S
from nanocp.client import Client, InvalidArgument
from nanocp.serve.service import Served
from nanocp.values.members import Member
from nanocp.values.offload import HASH_BYTES, next_page_hash, page_hashes, salt_of

# `kv_offload`, whose pages a model without weights has no size for.
OFFLOADING = configured(CONFIG, num_instances=1, offload_host_pages=200)
KEYS = ("first", "second")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    TOKENIZER._tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    served = Served(
        ModelLimits(WORDY.vocab_size, 2048), load_tokenizer(folder), folder,
        "harness.services.hash_members:build_wordy", "harness.services.hash_members:build_prefill",
    )  # fmt: skip
    with started(forked_service(OFFLOADING, served)) as service:
        yield service


def answer(service, salt=None, path="completions", headers=None, **body):
    """A service's answer, as JSON."""
    body = {"max_tokens": 2, "ignore_eos": True, "return_token_ids": True, **body}
    if salt is not None:
        body["cache_salt"] = salt
    url = f"http://{service.http_address}/v1/{path}"
    return httpx.post(url, json=body, headers=headers, timeout=WAIT_S).raise_for_status().json()


def cached(service, salt=None, **asked):
    """The number of a prompt's tokens that were there before."""
    return answer(service, salt, **asked)["usage"]["prompt_tokens_details"]["cached_tokens"]


def over_grpc(service, salt, **asked):
    with Client(service.address) as client:
        client.generate_unary(asked["prompt"], max_tokens=2, timeout_s=WAIT_S, cache_salt=salt)


def streamed(service, salt, **asked):
    with Client(service.address) as client:
        list(client.generate(asked["prompt"], max_tokens=2, timeout_s=WAIT_S, cache_salt=salt))


WORDS = "the life of a token, the quick brown fox; " * 20
CHAT = {"path": "chat/completions", "messages": [{"role": "user", "content": WORDS}]}
DOORS = {
    "completions": (answer, {"prompt": prompt(200, 1)}),
    "texts": (answer, {"prompt": WORDS[1:]}),
    "chats": (answer, CHAT),
    "gRPC": (over_grpc, {"prompt": prompt(200, 2)}),
    "streams of gRPC": (streamed, {"prompt": prompt(200, 3)}),
}


@pytest.mark.parametrize(("door", "asked"), DOORS.values(), ids=DOORS)
def test_equal_prompts_share_all_full_pages_within_a_salt_and_none_beyond(service, door, asked):
    salt = f"for {door} {asked}"[:128]
    door(service, salt, **asked)
    num_tokens = answer(service, salt, **asked)["usage"]["prompt_tokens"]
    full = (num_tokens - 1) // 64 * 64
    assert cached(service, salt[:-1], **asked) == 0, "another salt"
    assert cached(service, **asked) == 0, "no salt"
    assert cached(service, salt, **asked) == cached(service, **asked) == full >= 128


def test_the_output_of_a_short_prompt_is_shared_within_the_salt_only(service):
    """The row hashes the first page itself, and reports it windows before the end."""
    short = prompt(20, 4)
    (choice,) = answer(service, "mine", prompt=short, max_tokens=70)["choices"]
    whole = [*short, *choice["token_ids"]]
    assert [cached(service, salt, prompt=whole) for salt in ("other", None, "mine")] == [0, 0, 64]
    (choice,) = answer(service, prompt=short[1:], max_tokens=70)["choices"]
    assert cached(service, prompt=[*short[1:], *choice["token_ids"]]) == 64, "as without salts"


def test_a_request_keeps_its_salt_when_an_instance_is_lost():
    config = configured(CONFIG, num_instances=2, offload_host_pages=200)
    with hash_service(config, SLOW) as service, ThreadPoolExecutor(1) as pool:
        short = prompt(40, 5)
        asked = partial(answer, service, "mine", prompt=short, max_tokens=600)
        answered = pool.submit(asked)
        until(lambda: (sample(service, "generation_tokens_total") or 0) > 100)
        os.kill(pid_of(service, Member("instance", 1)), signal.SIGKILL)
        until_serving(service, 2)
        whole = [*short, *answered.result(WAIT_S)["choices"][0]["token_ids"]]
        assert sample(service, "stream_pause_seconds_count", cause="term") == 1
        counts = [cached(service, salt, prompt=whole) for salt in ("other", None, "mine")]
        assert counts == [0, 0, 9 * 64]


def test_tenants_share_no_prompt_if_keys_are_salts():
    config = configured(OFFLOADING, api_keys=KEYS, cache_salt_by_key=True)
    with hash_service(config) as service:

        def counts(number, seed, salt=None):
            headers = {"x-api-key": KEYS[number]}
            asked = {"prompt": prompt(200, seed), "user": "one", "headers": headers}
            return cached(service, salt, **asked)

        assert [counts(0, 1), counts(1, 1), counts(0, 1), counts(1, 1)] == [0, 0, 192, 192]
        assert [counts(number, 1, "salt") for number in (0, 1, 0)] == [0, 0, 192]


def test_salts_of_other_texts_and_tenants_differ():
    salts = {
        Origin(tenant=tenant, cache_salt=salt, is_salted_by_key=by_key).salt
        for tenant in ("a", "b")
        for salt in (None, "a", "b")
        for by_key in (True, False)
    }
    assert len(salts) == 6 + 3 and Origin(tenant="a").salt == b"" in salts
    assert {len(salt) for salt in salts - {b""}} == {HASH_BYTES}
    assert salt_of("ab", "c") != salt_of("a", "bc") and salt_of(None, "a") != salt_of("a", None)
    assert salt_of("", None) != b"" and salt_of(None) == b""
    keys = ApiKeys((), salts_by_key=True)
    assert len({origin_of({}, keys, "", user, 0, None).salt for user in ("ann", "bob", "")}) == 3


@pytest.mark.parametrize("length", [1, 64, 65, 300])
@pytest.mark.parametrize("salt", [b"", salt_of("mine")])
def test_a_row_goes_on_hashing_where_its_prompt_ends(length, salt):
    ids = prompt(length, 6)
    page_hash, page_ids = page_state(ids, page_hashes(ids, salt), salt)
    following = prompt(70, 7)
    by_row = next_page_hash(page_hash, [*page_ids, *following][:64])
    assert by_row == page_hashes([*ids, *following], salt)[(length - 1) // 64]
    if length > 64:
        assert page_state(ids, (), salt) == (b"", ()), "a row without hashes"


@pytest.fixture(scope="module")
def front_end():
    with running(model=SERVED_MODEL) as service:
        yield service


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_salt_has_1_to_128_characters(front_end, path):
    body = {"prompt": [5], "messages": CHAT["messages"]}
    for wrong, sentence in (
        ("", "cache_salt has 0 characters; it must have 1 to 128"),
        ("\N{GREEK SMALL LETTER MU}" * 129, "cache_salt has 129 characters"),
        (7, "cache_salt is 7"),
        (["a"], "cache_salt is ['a']"),
    ):
        refused = front_end.post(path, {**body, "cache_salt": wrong})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "cache_salt")
        assert error["message"].startswith(sentence)
    with ThreadPoolExecutor(1) as pool:
        for right in (None, "\N{GREEK SMALL LETTER MU}" * 128):
            answered = pool.submit(front_end.post, path, {**body, "cache_salt": right})
            front_end.answer([5])
            assert answered.result(WAIT_S).status_code == 200


def test_a_salt_over_grpc_has_1_to_128_characters(front_end):
    for wrong in ("", "x" * 129):
        with pytest.raises(InvalidArgument, match=f"cache_salt has {len(wrong)} characters"):
            front_end.client.generate_unary([5], cache_salt=wrong)
    with pytest.raises(ValueError, match="cache_salt is 7, which cannot be sent"):
        front_end.client.generate([5], cache_salt=7)
    for right in (None, "x" * 128):
        chunks = front_end.client.generate([5], cache_salt=right)
        front_end.answer([5])
        assert [chunk.token_ids for chunk in chunks] == [(5,)]
