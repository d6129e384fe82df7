"""vLLM's own tests of tool parsers, unchanged, over this project's parsers; templates beside them.

They are in vLLM's source distribution; NANOCP_VLLM_SOURCES names the folder with it, and `make
test-system` fetches it. What this project does otherwise is listed with its reason, exactly.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from control_plane.frontend.http.protocol import Message
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from control_plane.frontend.http.tools.conversation import conversation
from control_plane.frontend.http.tools.template_habits import habits_of
from harness.paths import ROOT
from harness.vllm.call_templates import TOOLS, asked

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

FILES = ("hermes", "deepseekv3", "deepseekv31", "kimi_k2", "glm4_moe", "glm47_moe", "qwen3coder")
SUPPORT = ("__init__", "tool_parsers/__init__", "tool_parsers/common_tests", "tool_parsers/utils",
           "tool_parsers/conftest", "parser/__init__", "parser/engine/__init__",
           "parser/engine/replay_harness")  # fmt: skip
HABITS = {
    "what does not parse whole stays content, as docs/use/api.md says": [
        "kimi_k2.TestExtractToolCalls.test_invalid_json_still_extracted",
        "kimi_k2.TestStreamingEdgeCases.test_truncated_tool_call_no_end_marker",
        "qwen3coder.test_extract_tool_calls_missing_closing_parameter_tag[chat_completion]",
        "qwen3coder.test_extract_tool_calls_missing_closing_parameter_tag[responses_api]",
        "qwen3coder.test_extract_tool_calls_streaming_missing_closing_tag[chat_completion]",
        "qwen3coder.test_extract_tool_calls_streaming_missing_closing_tag[responses_api]",
    ],
    "text between and behind calls is content, so that nothing is lost": [
        "deepseekv31.test_extract_tool_calls_with_multiple_tools",
        "kimi_k2.TestStreamingEdgeCases.test_noise_between_markers_suppressed",
        "kimi_k2.TestStreamingEdgeCases.test_content_after_tool_section",
    ],
    "white space before a call stays, as vLLM's tests of kimi_k2 say": [
        "glm4_moe.test_extract_tool_calls_with_glm45_newline_format"
    ],
    "forced calls are held to a schema with any model, and not to its form": [
        "qwen3coder.test_get_vllm_registry_structural_tag_returns_structural_tag[chat_completion]",
        "qwen3coder.test_get_vllm_registry_structural_tag_returns_structural_tag[responses_api]",
        "qwen3coder.test_adjust_request_required_prefers_structural_tag[chat_completion]",
        "qwen3coder.test_adjust_request_required_prefers_structural_tag[responses_api]",
    ],
    "there is no Responses API": [
        "glm47_moe.TestGlm47ExtractToolCalls.test_namespace_tool_call_round_trip_to_responses_output"
    ],
    "it is expected to fail in vLLM, and passes": [
        "deepseekv3.TestDeepSeekV3ToolParser.test_malformed_input[False]"
    ],
}
"""Tests that fail, by the reason."""
LEAST_PASSED = 160


@pytest.fixture(scope="module")
def archive() -> Iterator[tarfile.TarFile]:
    folder = os.environ.get("NANOCP_VLLM_SOURCES")
    sources = sorted(Path(folder).glob("vllm-*.tar.gz")) if folder else []
    if not sources:
        pytest.skip("no source distribution of vLLM in NANOCP_VLLM_SOURCES")
    with tarfile.open(sources[-1]) as opened:
        yield opened


def test_all_pass_but_those_that_ask_for_other_habits(archive, tmp_path):
    wanted = [*SUPPORT, *(f"tool_parsers/test_{name}_tool_parser" for name in FILES)]
    top = archive.getnames()[0].partition("/")[0]
    for name in wanted:
        archive.extract(f"{top}/tests/{name}.py", tmp_path, filter="data")
    report = tmp_path / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "harness.vllm.vllm_tool_parsers",
         "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={report}",
         "--rootdir", tmp_path / top, "tests/tool_parsers"],
        cwd=tmp_path / top,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        check=False,
    )  # fmt: skip
    failed, num_passed = set(), 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = re.search(r"test_(\w+)_tool_parser(.*)", f"{case.attrib['classname']}.")
        assert module is not None, case.attrib
        name = f"{module[1]}{module[2]}{case.attrib['name']}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
        num_passed += len(case) == 0
    assert failed == {name for names in HABITS.values() for name in names}
    assert num_passed >= LEAST_PASSED


FORMS = {
    "hermes": "hermes", "qwen3coder": "qwen3_coder", "deepseekr1": "deepseek_v3",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
}  # fmt: skip
"""Templates of vLLM's examples -> form of calls. The others have forms that are not known."""


def test_templates_of_real_models_render_as_transformers_renders_them(archive):
    """Each gets what clients echo, and transformers a conversation as its documentation has it."""
    forms, num_rendered = {}, 0
    for entry in archive.getmembers():
        found = re.search(r"/examples/tool_chat_template_(\w+(\.\d)?\w*)\.jinja$", entry.name)
        file = archive.extractfile(entry) if found else None
        if found is None or file is None:
            continue
        template = ChatTemplate(file.read().decode(), {"bos_token": "<s>", "eos_token": "</s>"})
        if form := habits_of(template).call_form:
            forms[found[1]] = form
        for sent, content in product((WRITTEN, "", "null", '{"city": '), (None, "So.")):
            value = json.loads(WRITTEN) if sent == WRITTEN else {}
            plain = asked(value, content or "")
            if habits_of(template).takes_text:
                plain = asked(WRITTEN if sent == WRITTEN else "{}", content or "")
            echoed = conversation([Message(**one) for one in asked(sent, content)], template)
            texts = [_text(template, messages) for messages in (echoed, plain)]
            assert texts[0] == texts[1], found[1]
            num_rendered += texts[0] is not None
    assert forms == FORMS
    assert num_rendered >= 100


WRITTEN = '{"city": "Köln", "deep": {"a": [1, null]}}'


def _text(template: ChatTemplate, messages: list[dict[str, Any]]) -> str | None:
    try:
        return template.render(messages, tools=TOOLS)
    except ValueError:  # Some have rules of their own for ids and roles.
        return None
