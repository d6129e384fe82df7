"""Blocks of KV that an engine holds for a prompt that it has computed, until they are read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RemoteBlocks:
    """A prompt's blocks at a vLLM server: the `kv_transfer_params` that its NixlConnector made."""

    engine_id: str
    request_id: str
    """The engine's own id of the prompt."""
    block_ids: tuple[int, ...]
    """Logical blocks, from position 0 on."""
    host: str
    """Host name or IP address of the engine's side channel."""
    port: int
    tp_size: int
    """Ranks that hold KV: each has a registration of its own, and frees the blocks by itself."""
    num_tokens: int
    """Tokens whose KV is there."""
    num_cached: int = 0
    """Tokens that the engine found in its own cache."""
    generation: int | None = None
    """Counts the engine's registrations of its KV; None: it does not say."""

    @property
    def key(self) -> tuple[str, str]:
        """The prompt's name at all engines."""
        return self.engine_id, self.request_id
