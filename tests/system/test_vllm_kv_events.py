"""vLLM's own readers of KV events read those of a service.

Needs the environment that `make .venv-vllm/.installed` makes, and vLLM's source distribution in the
folder of NANOCP_VLLM_SOURCES, whose example is run as it is.
"""

import json
import os
import re
import socket
import subprocess
import tarfile
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import pytest

from control_plane.observe.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from harness.programs.installed import vllm_python
from harness.services.hash_service import CONFIG, generate, hash_service, prompt
from nanocp.values.offload import page_hashes

pytestmark = pytest.mark.system
EXAMPLE = "examples/features/kv_events/kv_events_subscriber.py"
PORT = 5557
"""The example's."""
DECODE = """
import json, sys
import msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.read()), type=KVEventBatch)
print(json.dumps([type(e).__name__ for e in batch.events]), batch.data_parallel_rank)
print(json.dumps(msgspec.to_builtins(batch.events)))
"""


def test_the_classes_of_vllm_decode_a_batch():
    events = [
        AllBlocksCleared(),
        BlockStored([2**64 - 1, 5], 7, [1] * 128, 64, None, "GPU", None, [("ab",), None]),
        BlockStored([5], None, [2] * 64, 64, None, "GPU", None),
        BlockRemoved([2**64 - 1], "GPU"),
    ]
    batch = msgspec.msgpack.encode((time.time(), events, 0))
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    result = subprocess.run(
        [vllm_python(), "-c", DECODE], input=batch.hex(), capture_output=True, text=True,
        env=environment, timeout=300, check=True,
    )  # fmt: skip
    kinds, found = result.stdout.splitlines()[-2:]
    assert kinds == json.dumps([type(event).__name__ for event in events]) + " 0"
    all_ours = json.loads(msgspec.json.encode(events))
    for theirs, ours in zip(json.loads(found), all_ours, strict=True):
        assert {name: theirs[name] for name in ours} == ours


@pytest.fixture
def example(tmp_path):
    folder = os.environ.get("NANOCP_VLLM_SOURCES")
    sources = sorted(Path(folder).glob("vllm-*.tar.gz")) if folder else []
    if not sources:
        pytest.skip("no source distribution of vLLM in NANOCP_VLLM_SOURCES")
    with socket.socket() as probe:
        if not probe.connect_ex(("127.0.0.1", PORT)):
            pytest.skip(f"port {PORT}, which the example reads, is taken")
    with tarfile.open(sources[-1]) as archive:
        top = archive.getnames()[0].partition("/")[0]
        archive.extract(f"{top}/{EXAMPLE}", tmp_path, filter="data")
    return tmp_path / top / EXAMPLE


def test_the_example_of_vllm_prints_the_pages_of_prompts(example):
    endpoint = f"tcp://127.0.0.1:{PORT}"
    config = replace(CONFIG, service=replace(CONFIG.service, kv_events=endpoint))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (
        hash_service(config) as service,
        subprocess.Popen(
            [vllm_python(), example], stdout=subprocess.PIPE, text=True, env=environment
        ) as reader,
    ):
        try:
            lines = iter(reader.stdout.readline, "")
            assert any(line.startswith("Listening for") for line in lines)
            os.set_blocking(reader.stdout.fileno(), False)
            told = ""
            for number in count():
                ids = prompt(130, number)
                generate(service.address, ids, 2)
                told += reader.stdout.read() or ""
                if "BlockStored" in told:
                    break
                time.sleep(0.2)
            wanted = [int.from_bytes(each[-8:], "big") for each in page_hashes(ids)]
            pattern = rf"BlockStored\(block_hashes=\[{wanted[0]}, {wanted[1]}\], parent.*=None, to"
            deadline_s = time.monotonic() + 60
            while not re.search(pattern, told) and time.monotonic() < deadline_s:
                time.sleep(0.1)
                told += reader.stdout.read() or ""
            assert re.search(pattern, told) and "Error" not in told, told
        finally:
            reader.kill()
