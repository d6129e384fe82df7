"""`nanocp generate` against a scripted service: what it prints, and exit codes."""

import json
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from harness.programs.imports import assert_not_imported
from harness.services.scripted_service import ScriptedService
from nanocp.cli.main import app
from nanocp.client import Client
from nanocp.wire.v1 import inference_pb2 as pb


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def server() -> Iterator[ScriptedService]:
    service = ScriptedService()
    yield service
    service.server.stop(0).wait()


def ask(server: ScriptedService, sampling: str, *others: str) -> tuple[int, str, str]:
    return run("--target", server.target, "--prompt", "x", "--sampling", sampling, *others)


def test_every_control_reaches_the_service(server: ScriptedService) -> None:
    penalties = {
        "min_p": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
    }
    asked = pb.SamplingParameters(
        **penalties,
        logit_bias={3: -1.5, 8: 2.0},
        bad_words=["no"],
        stop=["end", "\n\n"],
        include_stop_str_in_output=True,
    )
    given = penalties | {
        "logit_bias": {"3": -1.5, "8": 2},
        "bad_words": "no",
        "stop": ["end", "\n\n"],
        "include_stop_str_in_output": True,
        "seed": None,
    }
    code, _, err = ask(server, json.dumps(given))
    assert (code, server.script.last.sampling) == (0, asked), err
    code, _, err = ask(server, '{"json_schema": {"type": "null"}, "temperature": 1}')
    assert (code, server.script.last.sampling) == (
        0,
        pb.SamplingParameters(json_schema='{"type": "null"}', temperature=1),
    ), err


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ("{", "--sampling is no JSON: "),
        ("[1]", "--sampling is '[1]'; it must be a JSON object"),
        ('{"topk": 3}', "--sampling has 'topk'; it must be one of temperature, top_k, "),
        ('{"topk": 3}', " (nearest: top_k)"),
        ('{"top_k": 2.5}', "top_k is 2.5; it must be a whole number"),
        ('{"top_k": true}', "top_k is true; it must be a whole number"),
        ('{"temperature": "hot"}', 'temperature is "hot"; it must be a number'),
        ('{"temperature": -1}', "temperature is -1; it must be a finite number, 0 (greedy) or"),
        ('{"stop": [1]}', "stop is 1; it must be a text"),
        ('{"stop_token_ids": ["4"]}', 'stop_token_ids is "4"; it must be a whole number'),
        ('{"ignore_eos": 1}', "ignore_eos is 1; it must be true or false"),
        ('{"regex": ["a"]}', 'regex is ["a"]; it must be a text'),
        ('{"logit_bias": {"x": 1}}', 'logit_bias is {"x": 1}; it must be token ids and numbers'),
        ('{"logit_bias": [3]}', "logit_bias is [3]; it must be token ids and numbers"),
    ],
)
def test_a_wrong_parameter_is_named_with_what_would_be_right(sampling: str, sentence: str) -> None:
    code, out, err = run("--prompt", "x", "--sampling", sampling)
    assert (code, out) == (2, "") and sentence in err and err.startswith("nanocp generate: ")


def test_what_is_typed_every_day_has_an_option(server: ScriptedService) -> None:
    code, _, err = ask(server, '{"top_k": 3}', "--temperature", "0.5", "--max-tokens", "9")
    asked = pb.SamplingParameters(top_k=3, temperature=0.5, max_tokens=9)
    assert (code, server.script.last.sampling) == (0, asked), err
    code, _, err = ask(server, '{"max_tokens": 3}', "--max-tokens", "9")
    assert (code, err) == (
        2,
        "nanocp generate: max_tokens is in --sampling and in --max-tokens; give one\n",
    )


def test_logprobs_are_shown_as_json_only(server: ScriptedService) -> None:
    code, out, _ = ask(server, '{"logprobs": 0}', "--json")
    assert (code, server.script.last.sampling.logprobs) == (0, 0)
    assert json.loads(out)["logprobs"] == [{"logprob": -0.5, "top": [[7, -0.5], [3, -1.5]]}]
    code, _, err = ask(server, '{"logprobs": 2}')
    assert (code, err) == (2, "nanocp generate: logprobs is shown with --json only; give both\n")


def test_several_choices_are_shown_by_index(server: ScriptedService) -> None:
    code, out, err = ask(server, '{"temperature": 1, "n": 2}')
    assert (code, out) == (0, "[0] text 0\n[1] text 1\n") and err.count(
        "1 generated tokens, stop"
    ) == 2
    asked = '{"temperature": 1, "n": 2, "prompt_logprobs": 0}'
    code, out, _ = ask(server, asked, "--json")
    summary = json.loads(out)
    assert [
        (choice["text"], choice["token_ids"], choice["stop_reason"])
        for choice in summary["choices"]
    ] == [("text 0", [7], "q"), ("text 1", [8], "q")]
    assert (summary["prompt_tokens"], summary["prompt_logprobs"]) == (
        2,
        [{"logprob": -2.5, "top": []}],
    )
    code, _, err = ask(server, asked)
    assert (code, err) == (
        2,
        "nanocp generate: prompt_logprobs is shown with --json only; give both\n",
    )


def test_priority_and_queue_timeout_reach_the_service(server):
    run("--target", server.target, "--prompt", "x", "--priority", "4", "--queue-timeout-s", "1.5")
    assert (server.script.last.priority, server.script.last.queue_timeout_ms) == (4, 1500)
    code, _, err = run("--target", server.target, "--prompt", "x", "--queue-timeout-s", "0")
    assert (code, err) == (
        2,
        "nanocp generate: --queue-timeout-s is 0; it must be above 0 and at most 1e+06\n",
    )
    code, _, err = run("--target", server.target, "--prompt", "x", "--timeout-s", "1e30")
    assert (code, err) == (
        2,
        "nanocp generate: --timeout-s is 1e+30; it must be above 0 and at most 1e+06\n",
    )


def test_generate_streams_text_and_sums_up_on_standard_error(server):
    code, out, err = run(
        *("--target", server.target, "--prompt", "hello", "--max-tokens", "3"),
        *("--sampling", '{"stop_token_ids": [4]}', "--user", "me"),
    )
    assert (code, out) == (0, "\x1b[2Jhi!\n")
    assert "2 prompt and 3 generated tokens, length; CP degree 2, MoE binding 1" in err
    assert "4 on instance 0, 5 on instance 1" in err
    assert (server.script.last.text, server.script.last.sampling.max_tokens) == ("hello", 3)
    assert list(server.script.last.sampling.stop_token_ids) == [4]
    assert server.script.last.user == "me"
    assert not server.script.last.sampling.HasField("temperature")


def test_generate_prints_one_json_object(server):
    code, out, err = run("--target", server.target, "--prompt", "hello", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "request_id": "named", "text": "\x1b[2Jhi!", "token_ids": [7, 8, 9],
        "finish_reason": "length", "stop_reason": None, "prompt_tokens": 2, "generated_tokens": 3,
        "cp_degree": 2, "moe_binding": 1, "kv_split": [[0, 4], [1, 5]],
    }  # fmt: skip


def test_generate_reads_prompts_from_files(server, tmp_path):
    text, ids = tmp_path / "prompt.txt", tmp_path / "ids.json"
    text.write_text("from a file\n", encoding="utf-8")
    ids.write_text("[1, 2, 3]")
    assert run("--target", server.target, "--prompt-file", str(text))[0] == 0
    assert server.script.last.text == "from a file\n"
    assert run("--target", server.target, "--prompt-ids", str(ids))[0] == 0
    assert list(server.script.last.token_ids.ids) == [1, 2, 3]


@pytest.mark.parametrize(("content", "sentence"), [
    ("[1, -2]", "JSON array of token ids"),
    ("{}", "JSON array"),
    ("1 2", "is not JSON"),
    ("[true]", "JSON array"),
])  # fmt: skip
def test_a_file_without_ids_is_named(tmp_path, content, sentence):
    path = tmp_path / "ids.json"
    path.write_text(content)
    code, out, err = run("--prompt-ids", str(path))
    assert (code, out) == (2, "")
    assert str(path) in err and sentence in err


def test_generate_wants_exactly_one_prompt(tmp_path):
    for arguments in (
        (),
        ("--prompt", "x", "--prompt-file", "y"),
        ("--prompt", "", "--prompt-ids", "y"),
    ):
        code, _, err = run(*arguments)
        assert code == 2 and "exactly one of --prompt, --prompt-file and --prompt-ids" in err
    assert "cannot be read" in run("--prompt-file", str(tmp_path / "absent"))[2]


def test_a_failed_request_is_one_sentence_and_an_exit_status(server, monkeypatch):
    code, out, err = run("--target", "127.0.0.1:9", "--prompt", "x")
    assert (code, out) == (2, "")
    assert (
        err.startswith("nanocp generate: no service answers at 127.0.0.1:9")
        and err.count("\n") == 1
    )

    for name, status in (
        ("fail INVALID_ARGUMENT", 2),
        ("fail RESOURCE_EXHAUSTED", 1),
        ("break", 1),
    ):
        real = Client.generate
        monkeypatch.setattr(
            Client, "generate", lambda *a, n=name, r=real, **k: r(*a, **{**k, "request_id": n})
        )
        code, _, err = run("--target", server.target, "--prompt", "x")
        monkeypatch.undo()
        assert code == status, name
        assert "nanocp generate: " in err


def test_a_service_without_text_shows_ids(server, monkeypatch):
    real = Client.generate
    monkeypatch.setattr(Client, "generate", lambda *a, **k: real(*a, **{**k, "request_id": "ids"}))
    assert run("--target", server.target, "--prompt", "x")[1] == "7 8 9\n"


def test_a_terminal_gets_no_control_characters(monkeypatch):
    from nanocp.cli.ask.generate import _printable

    assert _printable("a\x1b[2J\n\tb") == "a\x1b[2J\n\tb"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _printable("a\x1b[2J\n\tb\x07") == "a\ufffd[2J\n\tb\ufffd"


def test_the_command_imports_quickly():
    heavy = ("grpc", "torch", "ray", "transformers")
    assert_not_imported("import nanocp.cli.ask.generate", *heavy)


def test_an_answer_comes_from_another_front_end_if_one_is_gone(server):
    code, out, _ = run("--target", f"127.0.0.1:9, {server.target}", "--prompt", "x")
    assert (code, out) == (0, run("--target", server.target, "--prompt", "x")[1])
    code, _, err = run("--target", f"127.0.0.1:9,, {server.target}", "--prompt", "x")
    assert code == 2 and "target" in err
