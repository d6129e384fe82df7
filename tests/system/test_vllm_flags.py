"""An installed vLLM has no flag without an answer here, and its benchmark measures as ours does.

vLLM has an environment of its own: `make .venv-vllm/.installed`, or NANOCP_VLLM_PYTHON.
"""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harness.paths import ROOT
from harness.programs.installed import vllm_python
from harness.services.hash_service import CONFIG, process_launcher
from harness.services.kit import started
from harness.vllm.vllm_names import NAMES, unanswered
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
    return vllm_python()


def test_no_flag_of_the_installed_vllm_is_without_an_answer(python, tmp_path):
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    said = subprocess.run(
        [python, "-c", ASK], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert said.returncode == 0, said.stderr[-2000:]
    names = json.loads(said.stdout.splitlines()[-1])
    assert not unanswered("serve", names["serve"]) + unanswered("bench", names["bench"])
    if names["version"] == NAMES["version"]:
        assert names == NAMES, "tests/harness/vllm/vllm_names.json is what this version has"


@pytest.fixture(scope="module")
def service(tiny_checkpoint):
    config = replace(CONFIG, cluster=ClusterConfig(num_instances=2, max_model_len=1024))
    checkpoint = open_checkpoint(config, tiny_checkpoint)
    with started(Service(config, checkpoint, process_launcher())) as service:
        yield service


def close(one, other, share):
    return abs(one - other) <= share * max(one, other)


def both_results(python, address, checkpoint, folder, backend, *more):
    """What our benchmark and vLLM's write of the same server: the two objects."""
    path = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    words = [
        *("--backend", backend, "--base-url", f"http://{address}"),
        *("--endpoint", path, "--model", checkpoint, "--tokenizer", checkpoint),
        *("--dataset-name", "random", "--random-input-len", 60, "--random-output-len", 20),
        *("--num-prompts", 40, "--ignore-eos", "--seed", 3, "--disable-tqdm", *more),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir", folder),
    ]
    made = []
    for name, command in (
        ("ours", [sys.executable, "-m", "nanocp.cli.main", "bench", "serve"]),
        ("vllm", [python, "-c", BENCH]),
    ):
        subprocess.run(
            [*map(str, (*command, *words)), "--result-filename", f"{name}.json"],
            check=True,
            cwd=folder if name == "vllm" else ROOT,
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        )
        made.append(json.loads((folder / f"{name}.json").read_text()))
    return made


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_both_benchmarks_count_the_same(python, service, tiny_checkpoint, tmp_path, backend):
    ours, vllms = both_results(
        *(python, service.http_address, tiny_checkpoint, tmp_path, backend), *("--request-rate", 4)
    )
    assert ours["completed"] == vllms["completed"] == 40 and ours["failed"] == vllms["failed"] == 0
    assert ours["total_output_tokens"] == vllms["total_output_tokens"] == 800
    assert close(ours["total_input_tokens"], vllms["total_input_tokens"], 0.02)


@pytest.fixture(scope="module")
def paced_server():
    """A server whose first token takes 400 ms and each later one 40 ms, by its own clock."""

    class Paced(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "max_tokens" not in body and "max_completion_tokens" not in body:
                self.send_error(404)
                return
            count = body.get("max_tokens") or body["max_completion_tokens"]
            begun = time.monotonic()
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for number in range(count):
                time.sleep(max(0, begun + 0.4 + 0.04 * number - time.monotonic()))
                said = {"text": "a"} if "prompt" in body else {"delta": {"content": "a"}}
                self.say({"choices": [{"index": 0, **said}]})
            usage = {"prompt_tokens": 60, "completion_tokens": count, "total_tokens": 60 + count}
            self.say({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def say(self, chunk):
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        def log_message(self, *said):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Paced)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_both_benchmarks_time_the_same(python, paced_server, tiny_checkpoint, tmp_path, backend):
    ours, vllms = both_results(
        *(python, paced_server, tiny_checkpoint, tmp_path, backend), *("--max-concurrency", 4)
    )
    for figure in ("mean", "median"):
        for metric in ("ttft", "tpot", "itl", "e2el"):
            key = f"{figure}_{metric}_ms"
            print(key, ours[key], vllms[key])
            assert close(ours[key], vllms[key], 0.02), (key, ours[key], vllms[key])
    for key in ("duration", "request_throughput", "output_throughput", "total_token_throughput"):
        assert close(ours[key], vllms[key], 0.02), (key, ours[key], vllms[key])
