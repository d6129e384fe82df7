"""Python clients of a NanoCP service: `Client` for threads, `AsyncClient` for asyncio.

with Client("127.0.0.1:50051") as client:
    for chunk in client.generate("Once upon a time", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from nanocp.client.async_client import AsyncChunks, AsyncClient
from nanocp.client.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unauthenticated,
    Unavailable,
)
from nanocp.client.messages import Chunk, Finish, Generated, Generation, Sampling, ServerInfo
from nanocp.client.sync_client import Chunks, Client

__all__ = [
    "Aborted",
    "AsyncChunks",
    "AsyncClient",
    "Chunk",
    "Chunks",
    "Client",
    "DeadlineExceeded",
    "Finish",
    "Generated",
    "Generation",
    "InvalidArgument",
    "NotFound",
    "ResourceExhausted",
    "Sampling",
    "ServerInfo",
    "ServiceError",
    "Unauthenticated",
    "Unavailable",
]
