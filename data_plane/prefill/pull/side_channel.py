"""The side channel of vLLM's NixlConnector: where an engine keeps KV, rank by rank.

Any vLLM of connector version 9 and later: fields are known by name, and unknown ones are ignored.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from nanocp.values.remote_blocks import RemoteBlocks

_ASK = b"get_meta_msg"
_TIMEOUT_MS = 5_000
_MAX_BYTES = 16 << 20
"""Longest answer; that of 61 layers takes 10 kB."""
_Number = Annotated[int, Meta(ge=1, le=1 << 24)]

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The KV of one rank of an engine: vLLM's NixlAgentMetadata. Lists are by region, in bytes."""

    engine_id: str
    agent_metadata: bytes
    """NIXL's own."""
    kv_caches_base_addr: list[int]
    device_id: int
    num_blocks: _Number
    block_lens: Annotated[list[_Number], Meta(min_length=1)]
    block_strides: list[int]
    block_size: _Number
    """Tokens of a physical block."""
    physical_blocks_per_logical_kv_block: _Number
    ssm_sizes: tuple[int, int] = (0, 0)
    """Bytes of recurrent states in a block."""
    region_num_blocks: list[int] | None = None
    region_group_ids: list[int] | None = None
    region_names: list[str] | None = None
    region_mem_types: list[str] | None = None
    """DRAM or VRAM; None: all VRAM."""
    dcp_size: int = 1
    pcp_size: int = 1


@dataclass(frozen=True, slots=True)
class _Payload:
    agent_metadata_bytes: bytes


def allowed_address(host: str, networks: Sequence[Network]) -> str:
    """Return the host's IP address. Raises ValueError if one of its addresses is in no network.

    Raises ConnectionError if the name does not resolve.
    """
    try:
        found = [each[4][0] for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise ConnectionError(f"remote_host is {host!r}, which does not resolve: {error}") from None
    for address in found:
        ip = ipaddress.ip_address(address)
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if not any(ip in network for network in networks):
            raise ValueError(
                f"remote_host is {host!r} with the address {address}; it must be in a network of "
                "prefill.pull.allowed"
            )
    return str(found[0])


def shake_hands(address: str, blocks: RemoteBlocks, rank: int) -> EngineMemory:
    """Ask the engine of these blocks, at this IP address, for the memory of a rank.

    A vLLM that is asked for a rank that it lacks answers nobody any more. Raises ConnectionError if
    none answers within 5 s, ValueError for what is not a handshake of this engine.
    """
    zmq: Any = import_module("zmq")
    host = f"[{address}]" if ":" in address else address
    with zmq.Context.instance().socket(zmq.REQ) as side:
        side.setsockopt(zmq.IPV6, 1)
        side.setsockopt(zmq.LINGER, 0)
        side.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        side.setsockopt(zmq.SNDTIMEO, _TIMEOUT_MS)
        side.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
        side.connect(f"tcp://{host}:{blocks.port}")
        try:
            side.send(msgspec.msgpack.encode((_ASK, 0, rank)))
            memory = decode(side.recv_multipart()[0])
        except zmq.ZMQError as error:
            raise ConnectionError(
                f"the side channel at {host}:{blocks.port} does not answer a handshake: {error}"
            ) from error
    if memory.engine_id != blocks.engine_id:
        raise ValueError(
            f"remote_engine_id is {blocks.engine_id!r}; the server at {blocks.host}:{blocks.port} "
            f"is {memory.engine_id!r}"
        )
    return memory


def decode(answer: bytes) -> EngineMemory:
    """Decode the answer to a handshake. Raises ValueError naming the missing or wrong field."""
    try:
        payload = msgspec.msgpack.decode(answer, type=_Payload)
        return msgspec.msgpack.decode(payload.agent_metadata_bytes, type=EngineMemory)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"the handshake of vLLM's NixlConnector cannot be read: {error}; its version must be 9 "
            "or later"
        ) from error
