"""An idle stream stays open: the pings of each side are what the server allows."""

import contextlib
import threading
from concurrent import futures

import grpc

from control_plane.frontend import front_end
from control_plane.ports.members_port import SERVER_OPTIONS
from data_plane.member import controller_link, token_streams
from nanocp.client import connection
from nanocp.config.limits import LimitsConfig
from nanocp.config.whole import Config

FRONT_END = front_end._server_options(8192, Config())
STREAMS = {
    "member and controller": (SERVER_OPTIONS, controller_link.channel_options(LimitsConfig())),
    "client and front end": (FRONT_END, connection.CHANNEL_OPTIONS),
    "instance and front end": (SERVER_OPTIONS, token_streams._CHANNEL_OPTIONS),
}


def hasty(options, haste):
    """Options with pings `haste` times as often as in service."""
    return [
        (name, value // haste if name.endswith("_ms") and "timeout" not in name else value)
        for name, value in options
    ]


@contextlib.contextmanager
def idle_stream(server_options, client_options):
    """A call without messages, between two sides that ping every second, gRPC's shortest period."""
    haste = dict(client_options)["grpc.keepalive_time_ms"] // 1000
    closing = threading.Event()

    def say_nothing(request, context):
        closing.wait()
        yield b"the end"

    handler = grpc.unary_stream_rpc_method_handler(say_nothing)
    server = grpc.server(futures.ThreadPoolExecutor(1), options=hasty(server_options, haste))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("Idle", {"Stream": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(
        f"127.0.0.1:{port}", options=hasty(client_options, haste)
    ) as channel:
        try:
            yield channel.unary_stream("/Idle/Stream")(b"")
        finally:
            closing.set()
            server.stop(1).wait()


def test_an_idle_stream_stays_open():
    with contextlib.ExitStack() as stack:
        calls = {
            name: stack.enter_context(idle_stream(*options)) for name, options in STREAMS.items()
        }
        # The third ping that a server does not allow ends the stream.
        threading.Event().wait(6)
        assert {name: call.details() for name, call in calls.items() if call.done()} == {}
