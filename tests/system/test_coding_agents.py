"""Two coding agents for the command line, unmodified, end tasks with scripted answers.

Needs a folder whose node_modules has them, in NANOCP_AGENTS or here: `npm install
@anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0`. They use no network but loopback.
"""

import base64
import contextlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from harness.paths import ROOT
from harness.services.frontend_fakes import TOKENIZER, running
from harness.services.tale_models import TEMPLATES
from nanocp.values.plan import FinishReason

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
PAGE_OF_AGENTS = ROOT / "docs/use/coding-agents.md"
LATE = ["late_kept", "late_refused", "late_lost", "late_hoisted"]
"""Templates by what they do with a system message behind a user's."""
TASK = "Read note.txt and write its number to out.txt."
PAGE = 64
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""One point."""


def program(name):
    path = Path(os.environ.get("NANOCP_AGENTS", ROOT)) / "node_modules/.bin" / name
    if not path.exists():
        pytest.skip(f"no program {path}; npm installs it, and NANOCP_AGENTS names another folder")
    return path


@pytest.fixture
def claude():
    return program("claude")


@pytest.fixture
def codex():
    return program("codex")


def call(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    return f"\n<tool_call>\n{text}\n</tool_call>"


def text_of(ids):
    return TOKENIZER._tokenizer.decode(ids, skip_special_tokens=False)


@contextlib.contextmanager
def playing(template, answers, name="tale"):
    """A service whose model says these answers, one for each request; their prompts' tokens.

    An answer may be a function of the prompt's text.
    """
    source = (TEMPLATES / f"{template}.jinja").read_text()
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    model = ServedModel(
        name, name, ChatTemplate(source, tokens), call_form="hermes", has_reasoning=True
    )
    prompts = []

    def play():
        for answer in answers:
            if (submission := service.submitted()) is None:
                return
            prompts.append(list(submission.prompt_ids))
            if callable(answer):
                answer = answer(text_of(prompts[-1]))
            ids = [*TOKENIZER.encode(answer, add_special_tokens=False), 1]
            for first in range(0, len(ids), 5):
                finish = FinishReason.STOP if first + 5 >= len(ids) else None
                batch = ids[first : first + 5]
                service.instance.deliver(submission.request_id, first, batch, finish)

    with running(model=model) as service, ThreadPoolExecutor(1) as pool:
        played = pool.submit(play)
        try:
            yield service.url, prompts
        finally:
            service.controller.submissions.put(None)
        played.result(5)
        assert len(prompts) == len(answers)


def ran(command, folder, **environment):
    """What the agent printed, who worked in a folder with a note."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    (work / "note.txt").write_text("The number is seven.\n")
    own = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    ended = subprocess.run(
        list(map(str, command)),
        cwd=work,
        env=own | {"HOME": str(home)} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    print(ended.stdout[-4000:], ended.stderr[-4000:], file=sys.stderr)
    assert ended.returncode == 0
    assert (work / "out.txt").read_text() == "seven\n"
    return ended.stdout


def shared(prompts):
    """The parts of the full pages of each prompt that the next one has too, in percent."""
    found = []
    for before, after in pairwise(prompts):
        pages = len(before) // PAGE
        same = [before[: (n + 1) * PAGE] == after[: (n + 1) * PAGE] for n in range(pages)]
        found.append(100 * sum(same) / pages)
    return found


def claude_code(claude, url, folder):
    command = [claude, "-p", TASK, "--allowedTools", "Read,Bash"]
    return ran(
        command,
        folder,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="x",
        ANTHROPIC_MODEL="tale",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        ENABLE_TOOL_SEARCH="true",
    )


def as_printed(kind, begin):
    """The block of the page that has a line which begins so, for the service of these tests."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", PAGE_OF_AGENTS.read_text(), re.M | re.S)
    (block,) = (block for block in blocks if re.search(f"^{begin}", block, re.M))
    # Their tokenizer makes more tokens than a real model's.
    return re.sub(r"\bNAME\b", "tale", block).replace("TOKENS=65536", "TOKENS=200000")


@pytest.mark.parametrize(("agent", "call_to_write"), [
    ("claude", call("Write", file_path="work/out.txt", content="seven\n")),
    ("codex", call("exec_command", cmd="echo seven > out.txt")),
])  # fmt: skip
def test_the_page_runs_as_printed(agent, call_to_write, tmp_path):
    path = f"{program(agent).parent}:{os.environ['PATH']}"
    answers = [
        call_to_write.replace("work/out.txt", str(tmp_path / "work/out.txt")),
        "It is seven.",
    ]
    with playing("late_kept", answers) as (url, _):
        command, config = (
            text.replace("http://127.0.0.1:8000", url)
            for text in (as_printed("bash", f"{agent} "), as_printed("toml", "model = "))
        )
        begin = 'git init -q . && mkdir ~/.codex && echo "$CONFIG" > ~/.codex/config.toml\n'
        said = ran(
            ["bash", "-c", begin + command], tmp_path, PATH=path, CONFIG=config, HERE_KEY="x"
        )
    assert "It is seven." in said


@pytest.mark.parametrize("template", LATE)
def test_claude_code_loads_a_tool_reads_and_writes(claude, template, tmp_path):
    answers = [
        "<think>A tool first.</think>" + call("ToolSearch", query="select:WebFetch", max_results=5),
        "Now the note." + call("Read", file_path=str(tmp_path / "work/note.txt")),
        call("Bash", command="echo seven > out.txt", description="Write the number"),
        "It is seven.",
    ]
    with playing(template, answers) as (url, prompts):
        printed = claude_code(claude, url, tmp_path)
    assert "It is seven." in printed
    assert len(prompts) == 4 and min(shared(prompts)) >= 95
    first, loaded, read, _ = map(text_of, prompts)
    # The place of work stands in the system message behind the task.
    assert str(tmp_path / "work") in first and "x-anthropic-billing-header" not in first
    assert first.count("Fetches a URL") == 0 and loaded.count("Fetches a URL") == 1
    assert "The number is seven." in read


def test_claude_code_goes_on_behind_a_picture(claude, tmp_path):
    picture = tmp_path / "seven.png"
    picture.write_bytes(PNG)
    answers = [
        call("Read", file_path=str(picture)),
        call("Bash", command="echo seven > out.txt", description="Write the number"),
        "It is seven.",
    ]
    with playing("late_kept", answers) as (url, prompts):
        printed = claude_code(claude, url, tmp_path)
    assert "It is seven." in printed
    assert "a picture was here" in text_of(prompts[1])


def ran_codex(codex, url, folder, model="tale"):
    command = [codex, "exec", "--skip-git-repo-check",
               "--dangerously-bypass-approvals-and-sandbox", "-m", model]  # fmt: skip
    provider = {"name": "here", "base_url": f"{url}/v1", "wire_api": "responses",
                "env_key": "HERE_KEY"}  # fmt: skip
    values = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    command += ["-c", 'model_provider="here"', "-c", f"model_providers.here={{{values}}}"]
    return ran([*command, TASK], folder, HERE_KEY="x")


@pytest.mark.parametrize("template", LATE)
def test_codex_reads_and_writes(codex, template, tmp_path):
    answers = [
        "<think>The note first.</think>" + call("exec_command", cmd="cat note.txt"),
        call("exec_command", cmd="echo seven > out.txt"),
        "It is seven.",
    ]
    with playing(template, answers) as (url, prompts):
        printed = ran_codex(codex, url, tmp_path)
    assert "It is seven." in printed
    assert len(prompts) == 3 and min(shared(prompts)) >= 95
    first, read, _ = map(text_of, prompts)
    assert first.index(str(tmp_path / "work")) < first.rindex(TASK)
    assert "The number is seven." in read


@pytest.mark.parametrize("template", LATE)
def test_codex_finds_a_function_of_a_namespace_and_patches(codex, template, tmp_path):
    """For a model of a name that it knows it sends a custom tool and a search for tools."""
    patch = "*** Begin Patch\n*** Add File: out.txt\n+seven\n*** End Patch\n"
    answers = [
        call("tool_search", query="close agent", limit=8),
        lambda prompt: call(re.findall(r'"([^" ]*close_agent)"', prompt)[-1], target="none"),
        call("apply_patch", input=patch),
        "It is seven.",
    ]
    with playing(template, answers, name="gpt-5.5") as (url, prompts):
        printed = ran_codex(codex, url, tmp_path, model="gpt-5.5")
    assert "It is seven." in printed
    assert len(prompts) == 4 and min(shared(prompts)) >= 95
    assert "unsupported call" not in text_of(prompts[-1])
