"""guidellm, vLLM's load generator for servers, reports the truth on a service's HTTP API.

Four real instances serve. Needs the program `guidellm` on PATH, or its path in NANOCP_GUIDELLM.
`make test-system` installs it.
"""

import json
import os
import re
import subprocess
from dataclasses import replace

import httpx
import pytest
from tokenizers import Tokenizer

from harness.programs.installed import installed
from harness.services.hash_service import CONFIG, process_launcher
from harness.services.kit import started
from nanocp.config.cluster import ClusterConfig
from nanocp.serve.service import Service, open_checkpoint

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 200, 32


@pytest.fixture(scope="module")
def guidellm():
    return installed("guidellm", "NANOCP_GUIDELLM", "pip install it into another environment")


@pytest.fixture(scope="module")
def service(tiny_checkpoint):
    config = replace(CONFIG, cluster=ClusterConfig(num_instances=4, max_model_len=1024))
    checkpoint = open_checkpoint(config, tiny_checkpoint)
    with started(Service(config, checkpoint, process_launcher())) as service:
        yield service


def counted(service):
    """(prompt tokens, generated tokens) as the service counts them."""
    page = httpx.get(f"http://{service.http_address}/metrics").text
    names = ("prompt_tokens_total", "generation_tokens_total")
    return tuple(
        float(re.search(rf"^nanocp:{name} (.*)$", page, re.MULTILINE)[1]) for name in names
    )


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_every_request_is_served_and_every_token_counted(
    guidellm, service, tiny_checkpoint, tmp_path, endpoint
):
    before, target = counted(service), f"http://{service.http_address}"
    subprocess.run(
        [*(guidellm, "run", "--disable-console"),
         *("--backend", f"kind=openai_http,target={target},request_format={endpoint}"),
         *("--tokenizer", f"kind=huggingface_auto,model={tiny_checkpoint}"),
         *("--data",
           f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
         *("--profile", "kind=concurrent,streams=8", "--constraint",
           f"kind=max_requests,count={NUM_REQUESTS}"),
         *("--output", f"kind=json,path={tmp_path}/report.json")],
        check=True, timeout=400, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {
        "successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS,
    }  # fmt: skip
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    requests = benchmark["requests"]["successful"]
    for request in requests:
        assert request["output_tokens"] == OUTPUT_TOKENS
        # An event brings all tokens that have come since the last event.
        assert OUTPUT_TOKENS / 2 < request["info"]["timings"]["token_iterations"] <= OUTPUT_TOKENS
        assert 0 < request["time_to_first_token_ms"] < 1000 * request["request_latency"]
        if endpoint == "/v1/completions":
            text = json.loads(request["request_args"])["body"]["prompt"]
            assert request["prompt_tokens"] == len(tokenizer.encode(text).ids)
        else:
            assert request["prompt_tokens"] > PROMPT_TOKENS, (
                "the template's tokens belong to the prompt"
            )
    reported = tuple(
        sum(request[field] for request in requests) for field in ("prompt_tokens", "output_tokens")
    )
    assert reported == tuple(
        after - was for after, was in zip(counted(service), before, strict=True)
    )
