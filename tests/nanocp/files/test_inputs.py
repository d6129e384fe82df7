"""Every command that takes an input file takes a pipe: it is read once, and as often as needed."""

import os
import threading

import pytest
from typer.testing import CliRunner

from harness.paths import ROOT
from nanocp.bench.dataset import DatasetOptions, sample_requests
from nanocp.cli.ask.batch_files import read_requests
from nanocp.cli.main import app
from nanocp.files.inputs import readable
from nanocp.simulator.costs.cluster_file import SHIPPED, load_cluster_file
from nanocp.simulator.loads.request_logs import read_log
from nanocp.simulator.loads.workload import Workload

MOONCAKE = (ROOT / "benchmarks/traces/mooncake_conversation_200.jsonl").read_bytes()
AZURE = (ROOT / "benchmarks/traces/azure_2023_conv_200.csv").read_bytes()
BATCH = b"".join(
    b'{"custom_id": "r%d", "method": "POST", "url": "/v1/completions", "body": {}}\n' % at
    for at in range(3)
)


@pytest.fixture
def pipe(tmp_path):
    """A path that gives these bytes once, as a shell's <(...) does."""
    writers = []

    def make(content):
        path = tmp_path / f"pipe{len(writers)}"
        os.mkfifo(path)
        writers.append(threading.Thread(target=path.write_bytes, args=(content,), daemon=True))
        writers[-1].start()
        return path

    yield make
    for writer in writers:
        writer.join(20)
        assert not writer.is_alive()


def test_a_pipe_is_copied_once_and_a_file_never(pipe, tmp_path):
    path = pipe(b"once")
    assert [readable(path).read_bytes() for _ in range(3)] == [b"once"] * 3
    for other in (tmp_path, tmp_path / "none", ROOT / "README.md"):
        assert readable(other) == other


@pytest.mark.parametrize("content", [MOONCAKE, AZURE], ids=["json", "csv"])
def test_logs(pipe, content):
    path = pipe(content)
    assert len(read_log(path).requests) == len(read_log(path).requests) == 200


@pytest.mark.parametrize(("kind", "content"), [("mooncake", MOONCAKE), ("azure", AZURE)])
def test_traces_of_the_simulator_and_the_benchmark(pipe, kind, content):
    workload = Workload(f"{kind}:{pipe(content)}", 5.0)
    for _ in range(2):
        assert next(workload.requests(1 << 20)).prompt_len > 0
    options = DatasetOptions(name=kind, path=pipe(content), num_prompts=7)
    assert len(sample_requests(options, None)) == 7


def test_batches_and_clusters(pipe):
    path = pipe(BATCH)
    assert [len(list(read_requests(path))) for _ in range(2)] == [3, 3]
    cluster = pipe((SHIPPED / "h200x32-deepseek-v3.yaml").read_bytes())
    assert load_cluster_file(str(cluster)) == load_cluster_file("h200x32-deepseek-v3")
    page = CliRunner().invoke(app, ["plan", str(cluster), "--instances", "16"])
    assert page.exit_code == 0 and "It fits" in page.output
