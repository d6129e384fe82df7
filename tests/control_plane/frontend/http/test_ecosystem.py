"""What clients and platforms around OpenAI's API rely on beside the endpoints themselves."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from control_plane.frontend.http.served_model import ServedModel
from harness.exact.settings import configured
from harness.services.frontend_fakes import LIMITS, Service, make_config, running
from harness.services.hash_service import CONFIG, hash_service, prompt

MODEL = ServedModel("tiny", "checkpoints/tiny")
ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    limits = replace(LIMITS, max_model_len=100)
    config = configured(make_config(), cors_origins=(ORIGIN,))
    with running(config, limits, model=MODEL) as service:
        yield service


@pytest.mark.parametrize(("body", "sentence", "param"), [
    ({"prompt": [5] * 100}, "prompt has 100 tokens, and the output needs one", "prompt"),
    ({"prompt": [5] * 90, "max_tokens": 101}, "max_tokens is 101; it must be at most 100",
     "max_tokens"),
])  # fmt: skip
def test_a_prompt_that_is_too_long_is_said_in_openais_words(service, body, sentence, param):
    """LiteLLM looks for the words, LangChain for the code."""
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", **body)  # type: ignore[call-overload]
    error = caught.value
    assert f"{sentence}. This model's maximum context length is 100 tokens" in str(error)
    assert (error.code, error.param) == ("context_length_exceeded", param)


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", -1),
    ("top_p", 2),
    ("min_p", -0.5),
    ("max_tokens", 0),
    ("n", 200),
    ("logit_bias", {"7000": 1}),
    ("stop_token_ids", [7000]),
    ("priority", 101),
    ("bad_words", [""]),
    ("seed", 1 << 80),
])  # fmt: skip
def test_a_value_out_of_range_names_its_field(service, field, value):
    answer = httpx.post(f"{service.url}/v1/completions", json={"prompt": "a", field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, 400), error


def test_pages_for_people_need_nothing_from_elsewhere(service):
    links = httpx.get(f"{service.url}/").text
    for path in re.findall(r'href="(?!data:)([^"]+)"', links):
        assert httpx.get(f"{service.url}/{path}").status_code != 404, path
    page = httpx.get(f"{service.url}/docs").text
    assert "url: 'openapi.json'" in page
    assert not re.search(r"(src|href)=.?(https?:)?//", page)
    assets = re.findall(r'(?:src|href)="(docs/[^"]+)"', page)
    assert [path.rpartition("/")[2] for path in assets] == [
        "swagger-ui.css",
        "swagger-ui-bundle.js",
    ]
    for path in assets:
        assert len(httpx.get(f"{service.url}/{path}").content) > 100_000, path
    schemes = httpx.get(f"{service.url}/openapi.json").json()["components"]["securitySchemes"]
    assert schemes == {"HTTPBearer": {"type": "http", "scheme": "bearer"}}


def test_head_is_get_without_a_body_and_ping_is_health(service):
    for path in ("/health", "/v1/models", "/ping", "/version"):
        got, head = httpx.get(service.url + path), httpx.head(service.url + path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers["content-length"] == got.headers["content-length"]
        assert got.status_code == 200
    assert httpx.post(f"{service.url}/ping").status_code == 200


def test_only_pages_of_the_origins_may_call(service):
    def asked(origin: str) -> httpx.Response:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST",
                   "Access-Control-Request-Headers": "authorization,x-api-key"}  # fmt: skip
        return httpx.options(f"{service.url}/v1/completions", headers=headers)

    allowed = asked(ORIGIN)
    assert (allowed.status_code, allowed.headers["Access-Control-Allow-Origin"]) == (200, ORIGIN)
    assert {"authorization", "x-api-key"} <= {
        *allowed.headers["Access-Control-Allow-Headers"].replace(" ", "").split(",")
    }
    assert "Access-Control-Allow-Origin" not in asked("https://elsewhere.example").headers
    got = httpx.get(f"{service.url}/health", headers={"Origin": ORIGIN})
    assert got.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "x-request-id" in got.headers["Access-Control-Expose-Headers"].lower()


def test_cached_tokens_are_those_whose_pages_were_in_the_cluster():
    with hash_service(configured(CONFIG, num_instances=1)) as service:
        url = f"http://{service.http_address}/v1/completions"

        def usage(ids: list[int], **fields: object) -> dict[str, object]:
            body = {"prompt": ids, "max_tokens": 2, **fields}
            return dict(httpx.post(url, json=body, timeout=60).json()["usage"])

        first = prompt(200, 1)
        assert usage(first)["prompt_tokens_details"] == {"cached_tokens": 0}
        # Three full pages of 64 tokens are shared.
        assert usage(first)["prompt_tokens_details"] == {"cached_tokens": 192}
        other = [*first[:150], *prompt(100, 2)]
        both = usage([first, other])  # type: ignore[list-item]
        assert both["prompt_tokens"] == 450
        assert both["prompt_tokens_details"] == {"cached_tokens": 192 + 128}
        choices = usage(first, n=3, temperature=1, seed=1)
        assert (choices["prompt_tokens"], choices["prompt_tokens_details"]) == (
            200,
            {"cached_tokens": 192},
        )


def test_the_wheel_has_the_page():
    text = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    assert '"frontend/http/*.html"' in text
