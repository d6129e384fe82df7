"""Client libraries that know OpenAI's API, unmodified, against `nanocp serve`.

Needs a Python that has them, whose path is in NANOCP_CLIENTS_PYTHON; `make test-system` makes it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT, TESTS
from nanocp.serve.process import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def clients_python():
    path = os.environ.get("NANOCP_CLIENTS_PYTHON", str(ROOT / ".venv-clients/bin/python"))
    if not Path(path).exists():
        pytest.skip("no Python with the client libraries; `make .venv-clients/.installed` makes it")
    return path


@pytest.fixture(scope="module")
def service():
    flags = ("--tool-call-parser", "hermes", "--served-model-name", "tale")
    with serving(
        ROOT / "models/tale", 2, {}, *flags, ray=False, synthetic_kv=False, http=True
    ) as service:
        yield service


def found_by(library, python, service, program="client_libraries"):
    """What the library made of the service's answers."""
    command = [python, str(TESTS / f"harness/programs/{program}.py"), library]
    command += [f"http://127.0.0.1:{service.http_port}", "tale"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Else litellm asks for prices from elsewhere while it is imported, and may fail at that.
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, env=environment
    )
    print(answer.stdout[-4000:], answer.stderr[-8000:], file=sys.stderr)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads(answer.stdout.splitlines()[-1])


def is_city(value):
    return len(value["name"]) <= 12 and 0 <= value["people"] <= 9_999_999


def is_call(value):
    name, arguments = value
    return name == "weather" and len(arguments.pop("city")) <= 12 and not arguments


def test_instructor(clients_python, service):
    found = found_by("instructor", clients_python, service)
    assert len(found) == 4 and all(map(is_city, found.values()))


def test_pydantic_ai(clients_python, service):
    found = found_by("pydantic-ai", clients_python, service)
    # It lets the model call a tool several times at once, and takes the first call.
    assert 5 < found.pop("tool, tokens") < 16 * 100 and 5 < found.pop("schema, tokens") < 100
    assert len(found) == 4 and all(map(is_city, found.values()))


def test_litellm(clients_python, service):
    found = found_by("litellm", clients_python, service)
    assert is_city(found["schema"]) and 5 < found["tokens"] < 100
    assert is_call(found["tool"]) and is_call(found["tool, streamed"])
    assert "maximum context length is" in found["too long"]


def test_langchain_openai(clients_python, service):
    found = found_by("langchain-openai", clients_python, service)
    assert is_city(found["json_schema"]) and is_city(found["function_calling"])
    assert is_call(found["tool"]) and is_call(found["tool, streamed"])
    assert found["text"]
    assert "maximum context length is" in found["too long"]


def assert_found(found):
    """Texts, calls of the tool, and classes, each whole and streamed."""
    assert found["text"]
    for name, value in found.items():
        if name.startswith("tool"):
            tool, arguments = value
            assert tool == "weather" and arguments.keys() == {"city"}
            assert arguments["city"] in ("Rome", "Ulm")
        elif name.startswith(("schema", "class")):
            assert value["name"] in ("Rome", "Ulm") and value["people"] in (1, 2)


MESSAGES_CLIENTS = ["anthropic", "litellm", "langchain", "pydantic-ai"]


@pytest.mark.parametrize("client", MESSAGES_CLIENTS)
def test_a_client_of_messages(client, clients_python, service):
    found = found_by(client, clients_python, service, "agent_clients")
    assert len(found) == {"anthropic": 10, "litellm": 3, "langchain": 5, "pydantic-ai": 2}[client]
    if client == "anthropic":
        assert found.pop("text, final") == found["text"] and found.pop("reason") == "max_tokens"
        assert found.pop("runner") and found.pop("count") > 5 and found.pop("models") == ["tale"]
        assert re.match(r"prompt is too long: \d+ tokens > 8192 maximum", found.pop("too long"))
    assert_found({"text": "-"} | found)
