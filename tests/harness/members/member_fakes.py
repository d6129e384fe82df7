"""What stands around a member's loop in its tests: a scripted controller, and a front end."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import grpc

from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Envelope
from nanocp.wire.members import TOKEN_SINK, TOKENS

CLUSTER_ID = f"test-{uuid.uuid4().hex}"
LIMITS = LimitsConfig(
    tick_ms=20, plan_timeout_ms=300, exchange_timeout_ms=1000, retry_ms=200, start_timeout_ms=500
)


class Inbox(Queue):
    """Messages; then `last`, if there is one, for a member that would wait."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def get(self, block=True, timeout=None):
        if block and self.last is not None and self.empty():
            return self.last
        return super().get(block, timeout)


class Link:
    """A link whose controller has already sent its messages; it records what is sent up.

    last: what a member gets that has taken all messages and waits.
    """

    def __init__(self, *messages, last=None):
        self.inbox = Inbox(last)
        for message in messages:
            self.inbox.put(message)
        self.sent = []

    def send(self, message, term=0):
        self.sent.append(Envelope(message, term))

    def kinds(self):
        return [type(envelope.message) for envelope in self.sent]


class Sink:
    """A front end that records tokens and log probabilities of prompts."""

    def __init__(self):
        self.tokens = []
        self.prompts = []
        self.ended = threading.Event()

    def deliver(self, batches, context):
        for batch in map(TOKENS.decode, batches):
            self.tokens += [(batch.instance, item.request_id, item.index) for item in batch.tokens]
            self.prompts += [
                (
                    prompt.request_id,
                    prompt.first,
                    item.logprob,
                    [token_id for token_id, _ in item.top],
                )
                for prompt in batch.prompts
                for item in prompt.logprobs
            ]
        self.ended.set()
        return b""


def serve(sink, port=0):
    server = grpc.server(ThreadPoolExecutor(2))
    methods = {"Deliver": grpc.stream_unary_rpc_method_handler(sink.deliver)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TOKEN_SINK, methods),))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, f"127.0.0.1:{port}"
