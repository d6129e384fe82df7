"""A prefill as a reader of its KV sees it: vLLM's side channel, NIXL agents, blocks and leases.

It is a process of its own. A prompt's KV is computed by the reference prefill, and written into
blocks of real registered memory; notifications and heartbeats come by real NIXL.
"""

import itertools
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from harness.programs.forks import FORKS
from nanocp.serve.process import free_port
from nanocp.values.remote_blocks import RemoteBlocks

_TURN_S = 0.0005
_ANSWER_S = 120


@dataclass
class Options:
    """Choices of a stand-in; sizes as vLLM would have them."""

    checkpoint: str
    port: int
    dtype: str = "float32"
    block_size: int = 16
    num_blocks: int = 128
    kernel: str | None = "vec"
    """Order of K/V heads in a block: vec, amx, HNC or NHC; latent KV has none."""
    tp_size: int = 1
    lease_s: float = 30.0
    num_more_layers: int = 0
    """Regions behind the model's, as of an MTP layer; their KV is noise."""
    blocks_per_logical: int = 1
    gap: int = 0
    """Bytes between blocks of a region."""
    generation: int | None = None
    """The first registration's number; None: it is not said, as by vLLM 0.32."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the handshake that differ from the true ones; None: left out."""


class NixlEngine:
    """A running stand-in. `options` are those of Options; commands are those of Server."""

    def __init__(self, checkpoint: Path, **options: Any) -> None:
        self.port = free_port()
        with Listener(family="AF_UNIX") as listener:
            main, words = f"{__name__}:main", [str(listener.address)]
            self.process = FORKS.popen(main, words, [__name__])
            self._pipe = listener.accept()
        self._pipe.send(Options(str(checkpoint), self.port, **options))
        assert self._answer() == "serving"

    def _answer(self) -> Any:
        assert self._pipe.poll(_ANSWER_S), "the stand-in does not answer"
        return self._pipe.recv()

    def _ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        self._pipe.send((name, arguments, named))
        answer = self._answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def prefill(self, token_ids: list[int], kv: Any = None) -> dict[str, Any]:
        """Compute a prompt, hold its blocks, and return the kv_transfer_params of the answer.

        kv: [layers, tokens, width] in place of what the model computes.
        """
        import torch

        # Tensors would go by shared memory, which takes the processes' keys.
        data = None if kv is None else kv.contiguous().view(torch.uint8).numpy()
        return self._ask("prefill", list(token_ids), data)

    def kv(self, token_ids: list[int]) -> Any:
        """The prompt's KV in every layer of the model, [layers, tokens, width]."""
        import torch

        data, dtype = self._ask("kv", list(token_ids))
        return torch.from_numpy(data).view(getattr(torch, dtype))

    def __getattr__(self, name: str) -> Any:
        """Another command of Server, to be called."""
        return partial(self._ask, name)

    def kill(self) -> None:
        """End it as a failure would."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "NixlEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()


def blocks_of(params: dict[str, Any]) -> RemoteBlocks:
    """The blocks that kv_transfer_params name."""
    return RemoteBlocks(
        params["remote_engine_id"],
        params["remote_request_id"],
        tuple(params["remote_block_ids"][0]),
        params["remote_host"],
        params["remote_port"],
        params["tp_size"],
        params["remote_num_tokens"],
        params["remote_prefill_cached_tokens"],
        params.get("remote_registration_generation"),
    )


@dataclass
class Held:
    """A prompt that is computed, and not yet read."""

    blocks: list[int]
    deadlines: list[float]
    """By rank."""
    ranks: set[int] = field(default_factory=set)
    """Those that were notified."""


class Server:
    """The process: one loop around memory, agents and the side channel."""

    def __init__(self, options: Options) -> None:
        import torch
        import zmq

        from data_plane.model.config import ModelConfig
        from data_plane.model.weights import load_weights
        from data_plane.transport.nixl.pages import nixl_package

        torch.set_num_threads(1)
        self.options = options
        self.model = ModelConfig.from_folder(options.checkpoint)
        self.dtype = getattr(torch, options.dtype)
        experts = range(self.model.num_experts)
        self.weights = load_weights(options.checkpoint, self.model, self.dtype, experts)
        self.engine_id = f"engine-{os.getpid()}"
        self.num_layers = self.model.num_layers + options.num_more_layers
        width = self.model.attention.kv_width
        self.block_len = options.block_size * width * self.dtype.itemsize
        self.stride = self.block_len + options.gap
        self._api = __import__(f"{nixl_package()}._api", fromlist=["nixl_agent"])
        agents = self._api.nixl_agent_config(enable_prog_thread=False)
        self.agents = [
            self._api.nixl_agent(f"{self.engine_id}-{rank}", agents)
            for rank in range(options.tp_size)
        ]
        self.memory, self._registered = [], []
        self._number = itertools.count()
        self._generation = (options.generation or 1) - 1
        self.register_again()
        order = torch.randperm(options.num_blocks, generator=torch.Generator().manual_seed(1))
        self.free = deque(order.tolist())
        self.held: dict[str, Held] = {}
        self.notified, self.beats, self.asked = [], [], []
        self._router = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.bind(f"tcp://127.0.0.1:{options.port}")
        self._nothing = zmq.Again, zmq.NOBLOCK

    def run(self, pipe: Any) -> None:
        pipe.send("serving")
        while True:
            self._shake_hands()
            self._take_notifications()
            self._reap()
            if not pipe.poll(_TURN_S):
                continue
            name, arguments, named = pipe.recv()
            try:
                answer = getattr(self, name)(*arguments, **named)
            except Exception as error:
                answer = error
            pipe.send(answer)

    # --- the reader's side

    def _shake_hands(self) -> None:
        import msgspec

        empty, flags = self._nothing
        try:
            identity, _, message = self._router.recv_multipart(flags)
        except empty:
            return
        _, _, rank = msgspec.msgpack.decode(message)
        self.asked.append(rank)
        encode = msgspec.msgpack.encode
        fields = self._metadata(rank) | self.options.fields
        inner = encode({name: value for name, value in fields.items() if value is not None})
        payload = {"compatibility_hash": "0" * 64, "agent_metadata_bytes": inner}
        self._router.send_multipart([identity, b"", encode(payload), encode(time.perf_counter())])

    def _metadata(self, rank: int) -> dict[str, Any]:
        num, physical = self.num_layers, self.options.blocks_per_logical
        base = self.memory[rank].data_ptr()
        num_blocks = self.options.num_blocks * physical
        names = sorted(f"model.layers.{layer}.self_attn.attn" for layer in range(num))
        # As vLLM: in the order of the layers' numbers.
        names.sort(key=lambda name: int(name.split(".")[2]))
        return {
            "engine_id": self.engine_id,
            "agent_metadata": self.agents[rank].get_agent_metadata(),
            "kv_caches_base_addr": [
                base + layer * num_blocks * self.stride for layer in range(num)
            ],
            "device_id": 0,
            "num_blocks": num_blocks,
            "block_lens": [self.block_len] * num,
            "block_strides": [self.stride] * num,
            "block_size": self.options.block_size,
            "ssm_sizes": [0, 0],
            "physical_blocks_per_logical_kv_block": physical,
            "region_num_blocks": [num_blocks] * num,
            "region_group_ids": [0] * num,
            "region_names": names,
            "region_mem_types": ["DRAM"] * num,
            "dcp_size": 1,
            "pcp_size": 1,
        }

    def _take_notifications(self) -> None:
        for rank, agent in enumerate(self.agents):
            for text in itertools.chain(*agent.get_new_notifs().values()):
                self._take(rank, text.decode())

    def _take(self, rank: int, text: str) -> None:
        if text.startswith("HB:"):
            ids = text[3:].split(",")
            self.beats.append((rank, ids))
            until = time.monotonic() + self.options.lease_s * 2 / 3
            for held in (self.held[each] for each in ids if each in self.held):
                held.deadlines[rank] = max(held.deadlines[rank], until)
            return
        self.notified.append((rank, text))
        request_id, number = text.rsplit(":", 1)
        assert number == "1"
        if held := self.held.get(request_id):
            held.ranks.add(rank)

    def _reap(self) -> None:
        now = time.monotonic()
        for request_id, held in list(self.held.items()):
            if all(
                rank in held.ranks or deadline < now for rank, deadline in enumerate(held.deadlines)
            ):
                # As vLLM: the last blocks of a prompt are the first to be used again.
                self.free.extend(reversed(held.blocks))
                del self.held[request_id]

    # --- commands

    def prefill(self, token_ids: list[int], kv: Any) -> dict[str, Any]:
        import torch

        kv = self._kv(token_ids) if kv is None else torch.from_numpy(kv).view(self.dtype)
        num_tokens = len(token_ids)
        size = self.options.block_size * self.options.blocks_per_logical
        num_blocks = -(-num_tokens // size)
        assert num_blocks <= len(self.free), "no free blocks"
        blocks = [self.free.popleft() for _ in range(num_blocks)]
        for layer in range(self.num_layers):
            rows = kv[layer] if layer < len(kv) else self._noise(num_tokens, layer)
            self._write(layer, blocks, rows)
        request_id = f"cmpl-{next(self._number)}-0-{os.urandom(4).hex()}"
        until = time.monotonic() + self.options.lease_s
        self.held[request_id] = Held(blocks, [until] * self.options.tp_size)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.options.port,
            "tp_size": self.options.tp_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }
        if self.options.generation is not None:
            params["remote_registration_generation"] = self._generation
        return params

    def kv(self, token_ids: list[int]) -> tuple[Any, str]:
        import torch

        return self._kv(token_ids).view(torch.uint8).numpy(), self.options.dtype

    def _kv(self, token_ids: list[int]) -> Any:
        import torch

        from harness.exact.reference_prefill import prefill_pages

        num_tokens = len(token_ids)
        # The reference looks one token beyond the last.
        ids = [*token_ids, 0]
        pages = prefill_pages(self.weights, self.model, ids, num_tokens, 512)
        return torch.cat([kv_LSW for _, kv_LSW in pages], dim=1)[:, :num_tokens].contiguous()

    def free_blocks(self) -> int:
        """Logical blocks that no prompt has."""
        return len(self.free)

    def notifications(self) -> list[tuple[int, str]]:
        """(rank, text) of each that has come, without heartbeats."""
        return self.notified

    def heartbeats(self) -> list[tuple[int, list[str]]]:
        """(rank, ids of requests) of each that has come."""
        return self.beats

    def handshakes(self) -> list[int]:
        """The ranks that were asked for."""
        return self.asked

    def expire(self, request_id: str) -> None:
        """End the lease of a prompt now: its blocks are free."""
        self.held[request_id].deadlines = [0.0] * self.options.tp_size
        self._reap()

    def overwrite(self, block_ids: list[int], layers: list[int] | None = None) -> None:
        """Write other KV into logical blocks, as another prompt would; None: in all layers."""
        size = self.options.block_size * self.options.blocks_per_logical
        for layer in range(self.num_layers) if layers is None else layers:
            self._write(layer, block_ids, self._noise(len(block_ids) * size, layer + 1000))

    def register_again(self) -> None:
        """Move the KV to other memory, empty, as after a sleep; the handshake changes."""

        import torch

        for agent, registered in zip(self.agents, self._registered, strict=False):
            agent.deregister_memory(registered)
        num_blocks = self.options.num_blocks * self.options.blocks_per_logical
        num_bytes = self.num_layers * num_blocks * self.stride
        # The memory before is kept: a reader of the old addresses gets old bytes, and no fault.
        self._old, self.memory = (
            self.memory,
            [torch.full((num_bytes,), 0x3C, dtype=torch.uint8) for _ in self.agents],
        )
        self._registered = [
            agent.register_memory([(memory.data_ptr(), num_bytes, 0, "")], "DRAM")
            for agent, memory in zip(self.agents, self.memory, strict=True)
        ]
        self._generation += 1

    def set_fields(self, **fields: Any) -> None:
        """Change fields of the handshake; None: left out."""
        self.options.fields = fields

    # --- blocks

    def _is_latent(self) -> bool:
        from data_plane.model.attention_kinds.mla import MlaConfig

        return isinstance(self.model.attention, MlaConfig)

    def _noise(self, num_tokens: int, seed: int) -> Any:
        import torch

        shape = num_tokens, self.model.attention.kv_width
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def _views(self, rank: int, layer: int) -> Any:
        """The parts of a token's KV in a layer's blocks, [blocks, tokens, ...]."""
        from data_plane.prefill.connector import vllm_layout

        size, item = self.options.block_size, self.dtype.itemsize
        num_blocks = self.options.num_blocks * self.options.blocks_per_logical
        region = self.memory[rank].view(self.num_layers, num_blocks, self.stride)[layer]
        raw = region.view(self.dtype)[:, : self.block_len // item]
        if self._is_latent():
            return (raw.unflatten(1, (size, -1)),)
        kind = self.model.attention
        if self.options.kernel == "NHC":
            kv = raw.unflatten(1, (size, kind.num_kv_heads, -1)).transpose(1, 2)
        else:
            kv = raw.unflatten(1, (kind.num_kv_heads, size, -1))
        kernel = None if self.options.kernel in ("HNC", "NHC") else self.options.kernel
        return vllm_layout.heads(f"layer {layer}", kv, kind.num_kv_heads, kind.head_dim, kernel)

    def _write(self, layer: int, blocks: list[int], rows: Any) -> None:
        size, physical = self.options.block_size, self.options.blocks_per_logical
        places = [block * physical + part for block in blocks for part in range(physical)]
        for rank in range(self.options.tp_size):
            for number, place in enumerate(places):
                part_of = rows[number * size : (number + 1) * size].to(self.dtype)
                begin = 0
                for part in self._views(rank, layer):
                    block = part[place].reshape(size, -1).clone()
                    width = block.shape[1]
                    block[: len(part_of)] = part_of[:, begin : begin + width]
                    part[place].copy_(block.view(part[place].shape))
                    begin += width


def main() -> None:
    with Client(sys.argv[1]) as pipe:
        Server(pipe.recv()).run(pipe)
