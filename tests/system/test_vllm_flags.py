"""An installed vLLM has no flag without an answer here, and its benchmark measures as ours does.

vLLM has an environment of its own: `make .venv-vllm/.installed`, or NANOCP_VLLM_PYTHON.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from harness.hash_service import CONFIG, process_launcher
from harness.paths import ROOT
from harness.vllm_names import NAMES, unanswered
from nanocp.config.cluster import ClusterConfig
from nanocp.serve.service import Service, open_checkpoint

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ASK = """
import json
from vllm import __version__, envs
from vllm.benchmarks.serve import add_cli_args
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
serve, bench = make_arg_parser(FlexibleArgumentParser()), FlexibleArgumentParser()
add_cli_args(bench)
flags = lambda parser: sorted({flag for one in parser._actions for flag in one.option_strings})
print(json.dumps({"version": __version__, "serve": flags(serve), "bench": flags(bench),
    "environment": sorted(envs.environment_variables)}))
"""
BENCH = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def python():
    path = os.environ.get("NANOCP_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
    if not os.access(path, os.X_OK):
        pytest.skip(f"no vLLM at {path}: run make .venv-vllm/.installed")
    return path


def test_no_flag_of_the_installed_vllm_is_without_an_answer(python, tmp_path):
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    said = subprocess.run(
        [python, "-c", ASK], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert said.returncode == 0, said.stderr[-2000:]
    names = json.loads(said.stdout.splitlines()[-1])
    assert not unanswered("serve", names["serve"]) + unanswered("bench", names["bench"])
    if names["version"] == NAMES["version"]:
        assert names == NAMES, "tests/harness/vllm_names.json is what this version has"


@pytest.fixture(scope="module")
def service(tiny_checkpoint):
    config = replace(CONFIG, cluster=ClusterConfig(num_instances=2, max_model_len=1024))
    service = Service(config, open_checkpoint(config, tiny_checkpoint), process_launcher())
    try:
        service.start(lambda step: None)
        yield service
    finally:
        service.stop()


def close(one, other, share):
    return abs(one - other) <= share * max(one, other)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_both_benchmarks_measure_the_same(python, service, tiny_checkpoint, tmp_path, backend):
    """Requests, tokens and rates are the same to 2%; latencies are two runs on a shared machine."""
    path = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    words = [
        *("--backend", backend, "--base-url", f"http://{service.http_address}"),
        *("--endpoint", path, "--model", tiny_checkpoint, "--tokenizer", tiny_checkpoint),
        *("--dataset-name", "random", "--random-input-len", 60, "--random-output-len", 20),
        *("--num-prompts", 40, "--request-rate", 4, "--ignore-eos", "--seed", 3, "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir", tmp_path),
    ]
    made = {}
    for name, command in (
        ("ours", [sys.executable, "-m", "nanocp.cli.main", "bench", "serve"]),
        ("vllm", [python, "-c", BENCH]),
    ):
        subprocess.run(
            [*map(str, (*command, *words)), "--result-filename", f"{name}.json"],
            check=True,
            cwd=tmp_path if name == "vllm" else ROOT,
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        )
        made[name] = json.loads((tmp_path / f"{name}.json").read_text())
    ours, vllms = made["ours"], made["vllm"]
    assert ours["completed"] == vllms["completed"] == 40 and ours["failed"] == vllms["failed"] == 0
    assert ours["total_output_tokens"] == vllms["total_output_tokens"] == 800
    # Random ids that are decoded and read again are a few more or fewer.
    assert close(ours["total_input_tokens"], vllms["total_input_tokens"], 0.05)
    for key in ("request_throughput", "output_throughput"):
        assert close(ours[key], vllms[key], 0.02), (key, ours[key], vllms[key])
    for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "max_output_tokens_per_s"):
        print(key, ours[key], vllms[key])
        assert ours[key] > 0 and vllms[key] > 0
