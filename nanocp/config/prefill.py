"""Settings of the prefill, which computes prompts."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Literal

from nanocp.config.choices import Natural, Positive, check_fields, require


@dataclass(frozen=True, slots=True)
class PullConfig:
    """Prompts that a router had computed before: their KV is read from vLLM's memory by NIXL."""

    __pydantic_config__ = {"extra": "forbid"}

    allowed: tuple[str, ...] = ()
    """Networks of the vLLM servers that may be dialled, such as 10.0.0.0/8; a server's name must
    resolve into them. Empty: none, and kv_transfer_params are refused."""
    lease_s: Positive = 30
    """Shortest time for which one of these servers keeps blocks without a heartbeat (its
    kv_lease_duration)."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """Once KV cannot be read: recompute lets the prefill compute the prompt, and fail ends the
    request with 503. With fail and without engines nothing here computes prompts."""

    def __post_init__(self) -> None:
        check_fields(self)
        for network in self.allowed:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                require(False, f"allowed has {network!r}, which is no network: {error}")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The prefill (3): vLLM servers, or the embedded one for small models."""

    __pydantic_config__ = {"extra": "forbid"}

    engines: tuple[str, ...] = ()
    """vLLM servers that compute prompts, as http://host:port (docs/use/prefill.md). Empty: the
    embedded prefill."""
    api_key: str = field(default="", repr=False)
    """API key of these servers (vLLM's --api-key); a secret, best given as NANOCP_PREFILL__API_KEY.
    Empty: none."""
    stages: Positive = 1
    """Processes that compute prompts together on one machine, each with some layers of the model.
    1: the embedded prefill, one process with all layers."""
    synthetic_kv: bool = False
    """Fill KV with seeded noise instead of computing it, for benchmarks of decode alone."""
    chunk_tokens: Positive = 512
    """Most tokens of a pass through the stages of the prefill."""
    ring_pages: Positive = 8
    """Pages in each receive ring; an instance has one ring for each engine or stage."""
    timeout_ms: Positive = 60_000
    """Longest time of an engine for a prompt, or of stages for a pass, besides
    timeout_us_per_token."""
    timeout_us_per_token: Natural = 10_000
    """Time of an engine for each token of a prompt, besides timeout_ms."""
    max_attempts: Positive = 3
    """Engines that are asked for one prompt, one after the other, before its request fails."""
    max_tokens_in_flight: Positive = 65_536
    """Most prompt tokens in flight at one engine; one prompt is always allowed."""
    pull: PullConfig = field(default_factory=PullConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.stages == 1 or not (self.engines or self.synthetic_kv),
            f"stages is {self.stages}, and engines or synthetic_kv is set too; with these nothing "
            "here computes prompts: take 1",
        )
        for url in self.engines:
            require(
                re.fullmatch(r"https?://[^/\s]+/?", url) is not None,
                f"engines has {url!r}; it must be the address of a vLLM server, as http://host:port",
            )
        require(
            self.api_key.isascii()
            and self.api_key.isprintable()
            and self.api_key == self.api_key.strip(),
            "api_key has a character that no header can carry; it must be printable ASCII, without "
            "space at its ends",
        )
        require(
            len(set(self.engines)) == len(self.engines),
            f"engines is {', '.join(self.engines)}; each address must be there once",
        )
        require(
            not (self.pull.allowed and self.synthetic_kv),
            "synthetic_kv is set and pull.allowed too; with synthetic KV nothing is read",
        )
        require(
            not (self.engines and self.synthetic_kv),
            "synthetic_kv is set and engines too; with synthetic KV no engine computes anything",
        )

    def limit_ms(self, num_tokens: int) -> float:
        """Longest time for a prompt, or for a pass, of this many tokens."""
        return self.timeout_ms + self.timeout_us_per_token * num_tokens / 1000

    @property
    def num_writers(self) -> int:
        """Processes that write pages of prompts, each into its own rings."""
        if self.synthetic_kv or not self.computes:
            return 0
        return max(self.stages, len(self.engines))

    @property
    def computes(self) -> bool:
        """False if every prompt's KV must be pulled."""
        return not self.pull.allowed or bool(self.engines) or self.pull.on_failure == "recompute"
