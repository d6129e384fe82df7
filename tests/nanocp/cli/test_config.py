"""`nanocp config` and `--print-config`: what they print is read again, and the document has it."""

import os
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from harness.paths import ROOT
from harness.programs.command_line import nanocp
from nanocp.config.file import load_config
from nanocp.config.yaml import config_yaml, unit_of

DOCUMENT = ROOT / "docs/use/config.md"


def keys_of(tree, path=()):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from keys_of(value, (*path, name))
        else:
            yield ".".join((*path, name))


def test_what_is_printed_is_read_again(tmp_path):
    printed = nanocp("config")
    assert printed.exit_code == 0
    (tmp_path / "serve.yaml").write_text(printed.output)
    default = load_config(None, {}, {})
    assert load_config(tmp_path / "serve.yaml", {}, {}) == default
    changed = replace(default, cluster=replace(default.cluster, num_frames=7))
    (tmp_path / "serve.yaml").write_text(config_yaml(changed))
    assert load_config(tmp_path / "serve.yaml", {}, {}) == changed


def test_every_key_has_a_sentence():
    lines = nanocp("config").output.splitlines()
    for before, line in pairwise(lines):
        if re.match(r" +\w+:", line):
            assert before.lstrip().startswith("#"), line
    assert all(len(line) <= 100 for line in lines)
    assert unit_of("drain_timeout_ms") == "milliseconds" and unit_of("policy") == ""
    assert "(milliseconds)" in nanocp("config").output


def test_the_document_has_what_is_printed():
    before, block, after = re.fullmatch(
        r"(.*?```yaml\n)(.*?)(```\n)", DOCUMENT.read_text(), re.S
    ).groups()
    printed = nanocp("config").output
    if "REWRITE" in os.environ:
        DOCUMENT.write_text(before + printed + after)
    else:
        assert block == printed, "REWRITE=1 pytest tests/nanocp/cli/test_config.py writes it"


def test_what_is_in_force_says_where_it_is_from(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("cluster: {num_frames: 7, num_instances: 2}\n")
    printed = nanocp(
        *("serve", "no-checkpoint", "--print-config", "--config", str(file)),
        *("--instances", "3", "--api-key", "secret"),
        NANOCP_LIMITS__SUSPECT_MS="5000",
    )
    assert printed.exit_code == 0, printed.output
    lines = [line.strip() for line in printed.output.splitlines()]
    assert f"num_frames: 7  # {file}" in lines
    assert "num_instances: 3  # the command line" in lines
    assert "suspect_ms: 5000  # NANOCP_LIMITS__SUSPECT_MS" in lines
    assert "max_rows: 64  # default" in lines
    assert "secret" not in printed.output and 'api_keys: ["(not shown)"]' in printed.output


@pytest.mark.parametrize("key", ["12345", "sk-abc", '{"a": 1}'])
def test_the_key_of_the_engines_is_text_and_never_shown(key):
    environment = {"NANOCP_PREFILL__API_KEY": key}
    config = load_config(None, {}, environment)
    assert config.prefill.api_key == key and key not in repr(config)
    printed = nanocp("serve", "no-checkpoint", "--print-config", **environment)
    assert printed.exit_code == 0 and key not in printed.output
    assert 'api_key: "(not shown)"  # NANOCP_PREFILL__API_KEY' in printed.output


def test_a_secret_of_a_wrong_kind_is_not_in_the_message(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("prefill: {api_key: 12345}\n")
    printed = nanocp("serve", "no-checkpoint", "--config", str(file))
    assert printed.exit_code == 2 and "12345" not in printed.output
    assert "prefill.api_key is not as it must be; it must be a valid string" in printed.stderr


@pytest.mark.parametrize("arguments", [("--instances", "0"), ("--config", "absent.yaml")])
def test_a_mistake_is_a_sentence(arguments):
    printed = nanocp("serve", "no-checkpoint", "--print-config", *arguments)
    assert printed.exit_code == 2 and printed.stderr.startswith("nanocp serve: ")
    assert printed.stdout == ""


def test_help_shows_defaults():
    shown = " ".join(nanocp("serve", "--help").output.split())
    for name, default in (("--num-frames", "256"), ("--drain-timeout-s", "30")):
        line = shown[shown.index(name) :].partition("[default: ")[2]
        assert line.startswith(f"{default}]"), name
