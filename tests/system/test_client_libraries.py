"""Client libraries that know OpenAI's API, unmodified, against `nanocp serve`.

Needs a Python that has them, whose path is in NANOCP_CLIENTS_PYTHON; `make test-system` makes it.
"""

import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from harness.paths import ROOT, TESTS
from harness.services.frontend_fakes import TOKENIZER, running
from harness.services.tale_models import TEMPLATES
from nanocp.serve.process import serving
from nanocp.values.plan import Ended, FinishReason

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


NUM_FOUND = {
    "anthropic": 10, "litellm": 3, "langchain": 5, "pydantic-ai": 2, "openai": 9,
    "litellm-responses": 2, "langchain-responses": 5, "pydantic-ai-responses": 4,
    "openai-agents": 4,
}  # fmt: skip
"""What each client of the Messages API, and of the Responses API, finds."""


@pytest.mark.parametrize("client", NUM_FOUND)
def test_a_client_of_messages_or_responses(client, clients_python, service):
    found = found_by(client, clients_python, service, "agent_clients")
    assert len(found) == NUM_FOUND[client]
    if client == "anthropic":
        assert found.pop("text, final") == found["text"] and found.pop("reason") == "max_tokens"
        assert found.pop("runner") and found.pop("models") == ["tale"]
        assert re.match(r"prompt is too long: \d+ tokens > 8192 maximum", found.pop("too long"))
    elif client == "openai":
        assert found.pop("chain") and found.pop("kept")
        assert found.pop("too long") == ["context_length_exceeded", "input"]
    assert found.pop("count", 6) > 5
    assert_found({"text": "-"} | found)


NUM_STREAMS = 1000
LOST = "the cluster lost this request"


def parts_of(dice):
    """Parts of a random answer, and its text as the model writes it."""
    parts, texts = [], []
    if dice.random() < 0.5:
        parts.append(["thinking", "So it is. " * dice.randrange(1, 4) + "Yes."])
        texts.append(f"<think>{parts[-1][1]}</think>")
    if dice.random() < 0.7 or not parts:
        parts.append(["text", "It rains ä. " * dice.randrange(1, 5) + "There."])
        texts.append(parts[-1][1])
    for _ in range(dice.randrange(3)):
        city = {"city": "Ulm" * dice.randrange(1, 20)}
        parts.append(["tool_use", city])
        call = json.dumps({"name": "weather", "arguments": city})
        texts.append(f"<tool_call>\n{call}\n</tool_call>")
    return parts, "".join(texts)


def play(service, dice):
    """Answer the next request; return its parts, or None if it is lost for good."""
    submission = service.submitted()
    number, attempt, num_prompt = submission.request_id, 0, len(submission.prompt_ids)
    parts, text = parts_of(dice)
    ids = [*TOKENIZER.encode(text, add_special_tokens=False), 1]
    fate, at = dice.choice(["whole", "again", "lost"]), dice.randrange(1, len(ids))
    first = 0
    while first < len(ids):
        end = min(first + dice.randrange(1, 30), len(ids))
        if fate != "whole" and first < at <= end:
            end = at
        finish = FinishReason.STOP if end == len(ids) else None
        service.instance.deliver(number, first, ids[first:end], finish, attempt)
        first = end
        if first == at and fate == "again":
            service.front_end.interrupted()
            submission = service.submitted()
            # What had not come in order is generated again.
            first, attempt = len(submission.prompt_ids) - num_prompt, submission.arrival.attempt
            fate = "whole"
        elif first == at and fate == "lost":
            service.front_end.ended(Ended(number, FinishReason.FAILED, LOST))
            return None
    return parts


@pytest.mark.parametrize("client", ["anthropic", "openai"])
def test_only_the_error_that_was_sent_is_raised(client, clients_python):
    template = ChatTemplate((TEMPLATES / "late_kept.jinja").read_text(), {"bos_token": "<s>"})
    model = ServedModel("tale", "tale", template, call_form="hermes", has_reasoning=True)
    dice = random.Random(7)
    with running(model=model) as service, ThreadPoolExecutor(1) as pool:
        program = str(TESTS / "harness/programs/agent_streams.py")
        command = [clients_python, program, client, service.url, "tale", str(NUM_STREAMS)]
        ran = pool.submit(subprocess.run, command, stdout=subprocess.PIPE, text=True, check=True)
        played = [play(service, dice) for _ in range(NUM_STREAMS)]
        found = [json.loads(line) for line in ran.result().stdout.splitlines()]
    assert len(found) == NUM_STREAMS
    wrong = [
        (number, expected, got)
        for number, (expected, got) in enumerate(zip(played, found, strict=True))
        if (LOST not in got.get("error", "") if expected is None else got != {"parts": expected})
    ]
    print(len([one for one in played if one is None]), "were lost", file=sys.stderr)
    assert not wrong, wrong[:3]
