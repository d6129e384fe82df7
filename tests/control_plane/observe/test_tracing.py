"""Traces: a real collector gets the spans of requests over both APIs; a dead one costs nothing."""

import itertools
import queue
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from harness.exact.settings import configured
from harness.services.hash_service import CONFIG, expected, generate, hash_service, prompt
from nanocp.config.service import ServiceConfig
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc

WAIT_S = 60.0
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector(otlp_grpc.TraceServiceServicer):
    def __init__(self):
        self.spans = queue.Queue()

    def Export(self, request, context):
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert names["service.name"] == "nanocp"
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put(span)
        return otlp.ExportTraceServiceResponse()


@pytest.fixture(scope="module")
def collector():
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(None)


def tracing_to(url):
    return configured(CONFIG, otlp_traces_endpoint=url)


def attributes(span):
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def test_a_request_over_either_api_is_a_trace_of_its_parts(collector):
    body = {"prompt": prompt(300, 1), "max_tokens": 9, "temperature": 0}
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt(90, 2)), sampling=pb.SamplingParameters(max_tokens=5)
    )
    before_ns = time.time_ns()
    with hash_service(tracing_to(collector.url)) as service:
        headers = {"traceparent": TRACEPARENT, "X-Request-Id": "mine"}
        url = f"http://{service.http_address}/v1/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=WAIT_S).status_code == 200
        with grpc.insecure_channel(service.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            stub.GenerateUnary(message, metadata=(("traceparent", TRACEPARENT),), timeout=WAIT_S)
        generate(service.address, prompt(20, 3), 3)
        # It never samples what its client does not.
        unsampled = {"traceparent": f"{TRACEPARENT[:-2]}00"}
        httpx.post(url, json=body, headers=unsampled, timeout=WAIT_S)
    after_ns = time.time_ns()
    spans = [collector.spans.get(timeout=WAIT_S) for _ in range(15)]
    assert collector.spans.empty(), "the last request's client did not want a trace"
    roots = [span for span in spans if span.name == "llm_request"]
    children = defaultdict(dict)
    for span in spans:
        children[span.parent_span_id.hex()][span.name] = span
    by_endpoint = {attributes(root)["nanocp.endpoint"]: root for root in roots}
    http, unary = by_endpoint["/v1/completions"], by_endpoint["GenerateUnary"]
    for root in (http, unary):
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    alone = by_endpoint["Generate"]
    assert alone.trace_id.hex() != TRACE and not alone.parent_span_id
    said = attributes(http)
    assert said["gen_ai.request.id"] == "cmpl-mine" and said["gen_ai.usage.prompt_tokens"] == 300
    assert (said["gen_ai.usage.completion_tokens"], said["nanocp.cp_degree"]) == (9, 4)
    assert said["gen_ai.latency.time_to_first_token"] <= said["gen_ai.latency.e2e"]
    for root in roots:
        parts = children[root.span_id.hex()]
        assert set(parts) == {"queue", "prefill", "decode"}
        (transfer,) = children[parts["prefill"].span_id.hex()].values()
        assert transfer.name == "transfer"
        edges = [before_ns, root.start_time_unix_nano]
        for part in (parts[name] for name in ("queue", "prefill", "decode")):
            edges += [part.start_time_unix_nano, part.end_time_unix_nano]
        edges += [root.end_time_unix_nano, after_ns]
        # Made of sums of seconds: each is right to a millisecond.
        assert all(early <= late + 10**6 for early, late in itertools.pairwise(edges))
        assert [event.name for event in root.events][:3] == ["arrived", "placed", "KV is there"]


def test_without_traces_nothing_of_it_is_loaded():
    program = (
        "import sys, control_plane.observe.tracing; "
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_a_collector_requests_are_answered_and_the_service_ends():
    with hash_service(tracing_to("http://127.0.0.1:1")) as service:
        assert generate(service.address, prompt(20, 3), 3) == expected(prompt(20, 3), 3)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < WAIT_S


@pytest.mark.parametrize("url", ["localhost:4317", "http://", "http://host/v1/traces"])
def test_an_endpoint_that_is_none_is_refused_by_name(url):
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint is .*it must be like http"):
        ServiceConfig(otlp_traces_endpoint=url)
