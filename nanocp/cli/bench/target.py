"""The service that `nanocp bench serve` measures, and common fields of requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.bench.names import BACKENDS
from nanocp.cli.ask.batch import tls_context
from nanocp.cli.options.typed import Option, json_object
from nanocp.config.choices import one_of

if TYPE_CHECKING:
    from nanocp.bench.backends import Backend


@dataclass(frozen=True, slots=True)
class Target:
    """The service, its address, and common fields of requests."""

    backend: Annotated[
        str,
        typer.Option(
            help=f"{one_of(BACKENDS)}. openai and vllm: completions; openai-chat: chat completions."
        ),
    ] = "openai"
    base_url: Option[str | None] = None
    """http://... of the server, instead of host and port."""
    endpoint: Option[str | None] = None
    """Path of the HTTP endpoint; by default the backend's."""
    model: Option[str | None] = None
    """The model's name; by default the first that is listed."""
    host: Option[str] = "127.0.0.1"
    """The server's host."""
    port: Option[int | None] = None
    """The server's port; 8000, or 50051 for grpc."""
    ignore_eos: Option[bool] = False
    """Go on after the model's end of sequence; always for random and traces."""
    extra_body: Option[list[str]] = field(default_factory=list)
    """JSON, added to each request's body, such as sampling parameters."""
    served_model_name: str | None = None
    """The name that requests use, if another."""
    header: list[str] = field(default_factory=list)
    """KEY=VALUE, sent with each HTTP request."""
    ca: Path | None = None
    """Certificates by which the service's is judged."""
    logprobs: int | None = None
    """Report this many most likely tokens beside each."""

    def connect(self, body: dict[str, Any]) -> Backend:
        """A connection whose requests carry `body`; call it in its event loop."""
        from nanocp.bench.backends import GrpcBackend, OpenAIBackend

        host = f"[{self.host}]" if ":" in self.host else self.host
        # From the environment, as in vLLM: `ps` shows options.
        api_key = os.environ.get("OPENAI_API_KEY", "")
        if self.backend == "grpc":
            return GrpcBackend(f"{host}:{self.port or 50051}", body, api_key, self.ca)
        is_chat, scheme = self.backend == "openai-chat", "http" if self.ca is None else "https"
        return OpenAIBackend(
            base_url=self.base_url or f"{scheme}://{host}:{self.port or 8000}",
            endpoint=self.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions"),
            model=self.served_model_name or self.model,
            is_chat=is_chat,
            body=body,
            headers=({"Authorization": f"Bearer {api_key}"} if api_key else {})
            | pairs("--header", self.header),
            ssl=tls_context(self.ca),
        )

    def body(self, goes_on: bool) -> dict[str, Any]:
        """Fields of every request beside its prompt and length.

        goes_on: the dataset sets output lengths. Raises ValueError unless each --extra-body is a
        JSON object.
        """
        fields: dict[str, Any] = {"ignore_eos": True} if self.ignore_eos or goes_on else {}
        if self.logprobs is not None:
            fields |= (
                {"logprobs": True, "top_logprobs": self.logprobs}
                if self.backend == "openai-chat"
                else {"logprobs": self.logprobs}
            )
        for text in self.extra_body:
            fields |= json_object("--extra-body", text)
        return fields


def pairs(option: str, items: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE items as a dictionary. Raises ValueError, naming the option, for others."""
    values = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key.strip():
            raise ValueError(f"{option} is {item!r}; it must be KEY=VALUE")
        values[key.strip()] = value.strip()
    return values
