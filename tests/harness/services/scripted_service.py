"""A gRPC service that answers by the request's id, and the chunks that a client makes of it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from nanocp.client import Chunk, Finish
from nanocp.values.plan import FinishReason
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

WAIT_S = 60.0
FINISH = pb.Finish(
    reason=pb.Finish.LENGTH, prompt_tokens=2, generated_tokens=3, cp_degree=2, moe_binding=1,
    kv_split=[pb.KvShare(instance=0, pages=4), pb.KvShare(instance=1, pages=5)],
)  # fmt: skip
CHUNKS = [
    Chunk("named", (7,), "\x1b[2Jhi", None),
    Chunk("named", (8, 9), "!", Finish(FinishReason.LENGTH, 2, 3, 2, 1, ((0, 4), (1, 5)))),
]


class Script(rpc.InferenceServicer, rpc.ControlServicer):
    """A service that answers by the request's id."""

    def __init__(self) -> None:
        self.last = pb.GenerateRequest()
        self.cancelled = threading.Event()

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.last = request
        word, _, rest = request.request_id.partition(" ")
        if word == "fail":
            context.abort(grpc.StatusCode[rest], f"a sentence about {rest}")
        if word == "hang":
            context.add_callback(self.cancelled.set)
        if request.sampling.n > 1:
            prompt_logprobs = [pb.Logprobs(logprob=-2.5)] * request.sampling.HasField(
                "prompt_logprobs"
            )
            yield pb.GenerateResponse(request_id="named", prompt_logprobs=prompt_logprobs)
            for index in reversed(range(request.sampling.n)):
                finish = pb.Finish(
                    reason=pb.Finish.STOP, stop_string="q", prompt_tokens=2, generated_tokens=1
                )
                text = "" if word == "ids" else f"text {index}"
                yield pb.GenerateResponse(
                    request_id="named", index=index, token_ids=[7 + index], text=text, finish=finish
                )
            return
        first, last = ("", "") if word == "ids" else ("\x1b[2Jhi", "!")
        logprobs = [pb.Logprobs(logprob=-0.5, top_token_ids=[7, 3], top_logprobs=[-0.5, -1.5])]
        if not request.sampling.HasField("logprobs"):
            logprobs = []
        yield pb.GenerateResponse(request_id="named", token_ids=[7], text=first, logprobs=logprobs)
        if word == "break":
            context.abort(grpc.StatusCode.UNAVAILABLE, "instance 2 was lost")
        if word == "hang":
            self.cancelled.wait(WAIT_S)
        yield pb.GenerateResponse(request_id="named", token_ids=[8, 9], text=last, finish=FINISH)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        if "nobody" in request.request_ids:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        return pb.AbortResponse(aborted=request.request_ids[:1])


class ScriptedService:
    def __init__(self) -> None:
        self.script = Script()
        self.server = grpc.server(ThreadPoolExecutor(4))
        rpc.add_InferenceServicer_to_server(self.script, self.server)
        rpc.add_ControlServicer_to_server(self.script, self.server)
        self.target = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()
