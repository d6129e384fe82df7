"""Every flag and variable of vLLM has an answer, and command lines for vLLM are read as vLLM does.

tests/harness/vllm/vllm_names.json has the names of vLLM's own parsers and of its variables;
tests/system/test_vllm_flags.py asks an installed vLLM for them.
"""

import json
import os
import re
import subprocess
import textwrap
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from harness.paths import ROOT
from harness.vllm.vllm_names import NAMES, options_of, unanswered
from nanocp.cli.main import app
from nanocp.cli.options.vllm_flags import Reader, answers, said_of_environment
from nanocp.cli.serve import vllm_sizes as sizes
from nanocp.config.file import load_config
from nanocp.config.whole import Config

DOCUMENT = ROOT / "docs/use/vllm.md"
TALE = ROOT / "models/tale"


def read(*words, command="serve"):
    options = options_of(command)
    return Reader(options, answers(command), command == "serve").read(list(words))


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_no_flag_of_vllm_is_without_an_answer(command):
    assert not unanswered(command, NAMES[command])
    for flag, answer in answers(command).items():
        if answer.option:
            assert answer.option in options_of(command), flag
        assert answer.why and len(answer.why) < 170, flag


def test_a_flag_of_vllm_is_accepted_or_refused_in_a_sentence():
    """However it is written, and whatever follows it."""
    for flag in {*NAMES["serve"]} - {"-h", "--help"}:
        underscores = flag[:2] + flag[2:].replace("-", "_")
        for words in ((flag,), (flag, "1"), (f"{flag}=1",), (underscores, "1")):
            made = read("folder", *words)
            assert not any("did you mean" in one or "see --help" in one for one in made.refused)
            for sentence in (*made.refused, *made.said):
                assert sentence.startswith((flag, underscores)) and len(sentence) > len(flag) + 20


@pytest.mark.parametrize(("words", "expected"), [
    (["--port", "80"], ["--http-port=80"]),
    (["--port=80"], ["--http-port=80"]),
    (["--max-num-seqs", "128"], ["--max-rows=128"]),
    (["--max_num_seqs", "1k"], ["--max-rows=1000"]),
    (["--max-model-len", "16k"], ["--max-model-len=16000"]),
    (["--max-model-len", "16K"], ["--max-model-len=16384"]),
    (["--max-model-len=1.5k"], ["--max-model-len=1500"]),
    (["--max_model_len", "2M"], [f"--max-model-len={2 << 20}"]),
    (["--max-model-len", "many"], ["--max-model-len=many"]),
    (["--max-model-len", "-1"], ["--max-model-len=-1"]),
    (["--max-model-len", "auto"], ["--max-model-len=-1"]),
    (["--max-model", "512"], ["--max-model-len=512"]),
    (["--dtype", "auto"], []),
    (["--dtype", "half"], ["--dtype=bfloat16"]),
    (["--dtype=float16"], ["--dtype=bfloat16"]),
    (["--dtype", "float"], ["--dtype=float32"]),
    (["--dtype", "bfloat16"], ["--dtype=bfloat16"]),
    (["-dp", "2", "-asc=3"], ["--instances=2", "--front-ends=3"]),
    (["-tp", "1", "--pipeline-parallel-size=1", "--block-size", "64"], []),
    (["--no-enable-lora", "--no-enforce-eager"], []),
    (["-O3", "--trust-remote-code", "-cc.mode", "3", "-O", "2"], []),
    (["--compilation-config", '{"mode": 3}', "-ep", "--enable_chunked_prefill"], []),
    (["--api-key", "a", "b"], ["--api-key", "a", "--api-key", "b"]),
    (["--log-level", "DEBUG"], ["--log-level=debug"]),
    (["--no-ray", "--device", "cpu"], ["--no-ray", "--device=cpu"]),
    (["-sc.method", "mtp", "--speculative-config.num_speculative_tokens", "1"],
     ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}']),
])  # fmt: skip
def test_a_plain_flag_is_accepted(words, expected):
    made = read("folder", *words)
    assert (made.refused, made.words) == ([], ["folder", *expected])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--burstiness", "0.5"], ["--set=burstiness=0.5"]),
        (["--num_warmups=3"], ["--set=num_warmups=3"]),
        (["--disable-tqdm"], ["--set=disable_tqdm=on"]),
        (["--no-self-timed"], ["--set=self_timed=off"]),
        (["--sharegpt-output-len", "7"], ["--set=output_len=7"]),
        (["--output-len", "7", "--hf-output-len=-1"], ["--set=output_len=7"]),
        (["--header", "a=1", "b=2"], ["--set=header=a=1", "--set=header=b=2"]),
        (
            ["--goodput", "ttft:500", "tpot:50", "--seed", "1"],
            ["--set=goodput=ttft:500", "--set=goodput=tpot:50", "--seed", "1"],
        ),
        (
            ["--temperature", "0.5", "--extra-body", '{"user": "me"}', "--top_k=3"],
            [
                *("--extra-body", '{"user": "me"}'),
                *("--extra-body", '{"temperature": 0.5, "top_k": 3}'),
            ],
        ),
    ],
)
def test_a_flag_of_vllms_benchmark_is_a_setting_or_a_field(words, expected):
    made = read(*words, command="bench")
    assert (made.refused, made.words) == ([], expected)


def test_the_folder_may_come_last_or_by_a_flag():
    assert read("--api-key", "a", "folder").words == ["--api-key", "a", "folder"]
    assert read("--model", "folder", "--api-key", "a", "b").words[0] == "folder"
    assert read("--port", "1", "--", "--odd").words == ["--http-port=1", "--", "--odd"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tensor-parallel-size", "8"], "give --instances N"),
        (["-tp=8"], "-tp is no option here: an instance is one device"),
        (["--tensor-par", "8"], "give --instances N"),
        (["-qfp8"], "they are not quantized"),
        (["--hf-overrides.rope_theta", "1"], "change config.json"),
        (["--kv-cache-dtype", "nvfp4"], "it must be auto, fp8"),
        (["--max-rowz", "3"], "did you mean --max-rows?"),
        (
            ["--layer-policy", "even"],
            "--layer-policy is no option here: write --set pipeline.layer_policy=VALUE",
        ),
        (["--cluster.num_frames", "9"], "write --set cluster.num_frames=VALUE"),
        (["--port"], "--port has no value: give one"),
        (["--max-num-seqs="], "--max-num-seqs has no value: give one"),
        (["--swap-space", "--enable-chunked-prefill"], "--swap-space has no value: give one"),
        (["--speculative-config.method"], "method has no value: give one"),
        (["--enable-prefix-caching=False"], "give it alone, or its opposite"),
        (["--wire-form", "x"], "write --set data_plane.wire_form=VALUE"),
        (["--zzz"], "--zzz is no option here: see --help"),
    ],
)
def test_what_is_refused_says_what_to_give(words, sentence):
    (said,) = read("folder", *words).refused
    assert sentence in said


def test_all_that_is_refused_is_said_at_once():
    words = ["serve", "models/tale", "-tp", "8", "--enable-lora", "--lora-modules", "a", "b"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert [line.split(" is ")[0] for line in result.output.splitlines()] == [
        "nanocp serve: -tp",
        "nanocp serve: --enable-lora",
        "nanocp serve: --lora-modules",
    ]


def print_config(*words, **environment):
    result = CliRunner().invoke(
        app, ["serve", str(TALE), *words, "--print-config"], env=environment
    )
    assert result.exit_code == 0, result.output
    return result.output


def said_at_start(*words):
    """What is said before the service starts, which a policy of no name refuses."""
    words = ["serve", str(TALE), *words, "--policy", "foo"]
    result = CliRunner().invoke(app, words, env={"VLLM_API_KEY": "secret"})
    assert result.exit_code == 2 and "policy is 'foo'" in result.output
    assert "accepted" not in result.output, "before it is refused"
    return result.output


def test_the_log_has_a_line_for_each_variable_and_flag():
    said = said_at_start("--enable-chunked-prefill", "--dtype", "half")
    assert "--enable-chunked-prefill changes nothing: long prompts" in said
    assert "--dtype half: auto leaves the default" in said
    assert "VLLM_API_KEY is vLLM's: give --api-keys-file" in said and "secret" not in said


def test_keys_without_an_option_are_set():
    printed = print_config(
        *("--kv_cache_dtype", "auto", "--no-enable-prefix-caching", "--enforce-eager"),
        *("--max-num-queued-tokens=5k", "--allowed-origins", '["https://a"]'),
    )
    for line in (
        "prefix_sharing: false  # the command line",
        "eager: true",
        "max_queued_tokens: 5000",
        'cors_origins: ["https://a"]',
    ):
        assert line in printed


def test_as_long_as_the_model_allows_and_the_frames_hold():
    long = print_config("--max-model-len", "auto", "--num-frames", "4096")
    short = print_config("--max-model-len=-1", "--num-frames", "2", "--instances", "2")
    model = json.loads((TALE / "config.json").read_text())["max_position_embeddings"]
    assert f"max_model_len: {model} " in long and "max_model_len: 256 " in short


def test_a_share_of_a_gpus_memory_chooses_frames(monkeypatch):
    """nvidia-smi is played: two GPUs, of which the smaller decides."""

    def asked(command, **_):
        assert command[0] == "nvidia-smi"
        return subprocess.CompletedProcess(command, 0, "81559\n40000\n")

    monkeypatch.setattr(subprocess, "run", asked)
    made = {}
    for share in (0.2, 0.9):
        flags = {"data_plane.device": "cuda", "gpu_memory_utilization": share}
        config, flags = sizes.with_sizes(None, flags, TALE)
        made[share] = config.cluster.num_frames
        assert flags["cluster.num_frames"] == config.cluster.num_frames
    page = 0.7 * 40000 * (1 << 20) / (made[0.9] - made[0.2])
    assert 0.7 < page / (40000 * (1 << 20) * 0.9 / made[0.9]) < 1, "weights and graphs come first"
    given = {"data_plane.device": "cuda", "gpu_memory_utilization": 0.9, "cluster.num_frames": 5}
    assert sizes.with_sizes(None, given, TALE)[0].cluster.num_frames == 5
    with pytest.raises(ValueError, match=r"no frame fits into 0\.4 GB of each GPU"):
        sizes.with_sizes(None, flags | {"gpu_memory_utilization": 0.01}, TALE)


def test_on_cpus_frames_are_as_many_as_is_said():
    assert "num_frames: 256 " in print_config("--gpu-memory-utilization", "0.9")
    said = said_at_start("--gpu-memory-utilization", "0.9", "--num-frames", "7")
    assert "changes nothing on CPUs: an instance has 7 frames" in said
    result = CliRunner().invoke(app, ["serve", str(TALE), "--gpu-memory-utilization=90"])
    assert result.exit_code == 2 and "above 0 and at most 1" in result.output


def test_without_nvidia_smi_frames_are_asked_for():
    flags = {"data_plane.device": "cuda", "gpu_memory_utilization": 0.9}
    with pytest.raises(ValueError, match="give --num-frames"):
        sizes.with_sizes(None, flags, TALE)


def test_each_variable_of_vllm_that_is_set_gets_a_sentence():
    said = list(said_of_environment({"VLLM_API_KEY": "x", "VLLM_MADE_UP": "1", "HOME": "/"}))
    assert [one.split(" is ")[0] for one in said] == ["VLLM_API_KEY", "VLLM_MADE_UP"]
    assert "--api-keys-file" in said[0] and "x" not in said[0].split() and "nothing here" in said[1]
    all_of_them = [name for name in NAMES["environment"] if name.startswith("VLLM_")]
    assert len(list(said_of_environment(dict.fromkeys(all_of_them, "1")))) == len(all_of_them)


def test_what_follows_from_another_setting_follows():
    at = load_config(None, {"cluster.bounds.max_rows": 128}, {}).cluster.bounds
    assert (at.max_rows, at.max_attention_rows) == (128, 192)
    assert (
        load_config(None, {"cluster.bounds.max_rows": 8}, {}).cluster.bounds.max_attention_rows
        == 96
    )
    set_too = {"cluster.bounds.max_rows": 128, "cluster.bounds.max_attention_rows": 130}
    assert load_config(None, set_too, {}).cluster.bounds.max_attention_rows == 130
    environment = {"NANOCP_LIMITS__PLAN_TIMEOUT_MS": "40000"}
    assert load_config(None, {}, environment).limits.exchange_timeout_ms == 60_000
    assert "max_attention_rows: 192  # follows max_rows" in print_config("--max-num-seqs", "128")


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_flags_and_keys_that_sentences_name_exist(command):
    text = " ".join(f"{answer.why} {answer.key}" for answer in answers(command).values())
    if command == "serve":
        text += " ".join(said_of_environment(dict.fromkeys(NAMES["environment"], "1")))
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert flags <= options_of(command).keys() and len(flags) > 8
    sections = "|".join(field.name for field in fields(Config))
    for path in re.findall(rf"(?<!/)\b((?:{sections})\.[a-z_.]*[a-z])", text):
        value = Config()
        for name in path.split("."):
            value = getattr(value, name)
    for section, name in re.findall(r"NANOCP_([A-Z_]+)__([A-Z_]+)", text):
        assert hasattr(getattr(Config(), section.lower()), name.lower())


# --- the document

KINDS = {
    "same": "The same here.",
    "here": "Another name or setting here.",
    "always": "Accepted, and changes nothing.",
    "give": "Refused, with what to give instead.",
    "never": "Not supported.",
}


def names(flags):
    return ", ".join(f"`{flag}`" for flag in sorted(flags, key=lambda f: f.lstrip("-")))


def kind_and_answer(flag, command):
    """The kind of a flag's answer, and what is said of it before and behind its name."""
    if (answer := answers(command).get(flag)) is None:
        return "same", ("", "")
    why = answer.why[0].upper() + answer.why[1:].rstrip(".")
    but = f" Accepted with {names(answer.harmless)}." if answer.harmless else ""
    if answer.kind in ("always", "give", "never"):
        return answer.kind, (f"{why}:", but)
    here = answer.option or answer.key or "CHECKPOINT"
    return "here", (f"`{here}`:", f" {why}.{but}")


def of_one_answer(flags, command):
    """Each kind of answer once, and below it each answer with all its flags."""
    made = {}
    for flag in flags:
        kind, answer = kind_and_answer(flag, command)
        made.setdefault(kind, {}).setdefault(answer, []).append(flag)
    for kind, title in KINDS.items():
        yield f"\n**{title}**\n"
        for (before, behind), group in sorted(made.get(kind, {}).items()):
            text = f"{before} {names(group)}.{behind}".strip()
            begin = "- " if before else ""
            yield textwrap.fill(
                begin + text, 100, subsequent_indent=" " * len(begin), break_on_hyphens=False
            )


def tables():
    for command, title in (("serve", "vllm serve"), ("bench", "vllm bench serve")):
        own = {name for name in NAMES[command] if name in options_of(command)} - {"-h", "--no-ray"}
        yield f"## Flags of {title}"
        yield from of_one_answer(own | answers(command).keys(), command)
        yield ""
    yield "## Variables\n\n| vLLM | here |\n|---|---|"
    made = {}
    for sentence in said_of_environment(dict.fromkeys(NAMES["environment"], "1")):
        name, _, why = sentence.partition(" is vLLM's: ")
        if "nothing here reads it" not in why:
            made.setdefault(why, []).append(name)
    for why, variables in made.items():
        yield f"| {names(variables)} | {why[0].upper() + why[1:]}. |"


def test_each_flag_stands_once_under_its_answer():
    for command in ("serve", "bench"):
        text = " ".join("\n".join(of_one_answer(answers(command), command)).split())
        for flag, answer in answers(command).items():
            (item,) = re.findall(rf"(?:^|- )((?:(?!- ).)*`{flag}`[,.](?:(?!- ).)*)", text)
            assert answer.why[1:].rstrip(".") in item, flag


def test_the_document_has_the_table():
    """REWRITE=1 writes it."""
    before, heading, _ = DOCUMENT.read_text().partition("## Flags of vllm serve")
    made = "\n".join(tables()) + "\n"
    if "REWRITE" in os.environ:
        DOCUMENT.write_text(before + made)
    assert DOCUMENT.read_text() == before + made and heading
