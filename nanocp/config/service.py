"""The service for clients and operators: addresses, keys, names, parsers, its log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from nanocp.config.choices import Among, between, check_fields, require

Port = Annotated[int, between(0, 65_535)]
LOG_FORMATS = ("text", "json")
TOOL_CALL_PARSERS = (
    "auto", "none", "hermes", "deepseek_v3", "deepseek_v31", "kimi_k2", "glm45", "glm47",
    "qwen3_coder",
)  # fmt: skip
REASONING_PARSERS = ("auto", "none", "think")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Addresses, keys and names of the service for clients and members."""

    __pydantic_config__ = {"extra": "forbid"}

    host: str = "127.0.0.1"
    """Address to listen on for clients and members; 0.0.0.0: every interface. With a loopback
    address, all instances run on this machine."""
    advertised_host: str = ""
    """Address of this machine for members on others. Empty: `host` or, if that is every interface,
    the address of this machine's route to the others."""
    grpc_port: Port = 50051
    """Port of the gRPC API. 0 picks a free port."""
    metrics_port: Port = 9464
    """Port of /metrics and /cluster. 0 picks a free port."""
    http_port: Port = 8000
    """Port of OpenAI's API. 0 picks a free port."""
    members_port: Port = 0
    """Port at which members dial the controller; front ends use the ports after it. 0 picks free
    ports."""
    served_model_name: str = ""
    """The model's name for clients. Empty: the checkpoint's path, as it was given."""
    api_keys: tuple[str, ...] = ()
    """API keys; clients send one as `Authorization: Bearer KEY` or `x-api-key: KEY`, over gRPC as
    metadata. Empty: no key is needed. `ps` shows keys on the command line."""
    api_keys_file: str = ""
    """File with further API keys, one a line, that is read again when it changes. Empty: none."""
    cache_salt_by_key: bool = False
    """Equal prompts of several tenants share no cached KV: a tenant is an API key or, in a service
    without keys, a user."""
    responses_store_mib: Annotated[int, between(0, 1 << 20)] = 64
    """Memory of each front end for responses that clients name by id, in MiB. 0: it keeps none."""
    operator_keys_file: str = ""
    """File with keys of operators, one a line, each with an optional name: `alice KEY`. It is read
    again when it changes. A service with keys of any kind needs one for /metrics, the data of
    /cluster, and changes of seats and layers. Empty: nobody has one."""
    public_status: bool = False
    """/metrics and the data of /cluster need no operator's key."""
    tool_call_parser: Annotated[str, Among(TOOL_CALL_PARSERS)] = "auto"
    """Form of the model's tool calls: auto (as its chat template does), none, hermes (Qwen too),
    deepseek_v3, deepseek_v31, kimi_k2, glm45, glm47 or qwen3_coder (Qwen3.5 too)."""
    reasoning_parser: Annotated[str, Among(REASONING_PARSERS)] = "auto"
    """Reasoning is text between <think> and </think>: think, none, or auto (if the chat template
    has the marker)."""
    ssl_keyfile: str = ""
    """Private key (PEM) of both APIs' certificate. Empty: no TLS."""
    ssl_certfile: str = ""
    """Certificate (PEM) of both APIs, with its chain."""
    ssl_ca_certs: str = ""
    """Certificates (PEM) of authorities for clients' certificates."""
    ssl_cert_reqs: int = 0
    """Certificates of clients: 0 not needed, 2 needed."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the HTTP API, such as https://chat.example. `*`: any. Empty:
    none."""
    event_log: str = ""
    """File that records every call of the scheduler, for `nanocp simulate replay` and `nanocp why`.
    Earlier logs are kept, renamed by their time. Empty: none."""
    log_format: Annotated[str, Among(LOG_FORMATS)] = "text"
    """Lines of the log on standard error: text or json. json: the start-up output too."""
    log_level: Annotated[str, Among(LOG_LEVELS)] = "info"
    """Least level of the log: debug, info, warning or error. info has a line for each request that
    ends, and the load every 10 s."""
    otlp_traces_endpoint: str = ""
    """OpenTelemetry collector for a trace of each request, by OTLP over gRPC, such as
    http://localhost:4317. Empty: no traces. It needs `pip install '.[otel]'`."""
    kv_events: str = ""
    """ZMQ endpoint that publishes events of cached pages to routers, as vLLM does, such as
    tcp://*:5557. Whoever reaches it reads the token ids of prompts. Empty: none. It needs `pip
    install '.[kv_events]'`."""
    kv_events_topic: str = "kv-events"
    """Topic of these events; llm-d takes kv@POD@MODEL, as it names them."""
    vllm_metrics: bool = False
    """/metrics also has vLLM's names of what routers read, with the labels model_name and engine,
    which is 0."""
    check_invariants: bool = False
    """Check the scheduler's whole state while no window is in flight, for tests; a fault ends the
    service."""
    front_ends: int = 1
    """Front ends; front end i serves its own clients at grpc_port + i and http_port + i. Several
    are processes of their own, restarted when lost."""
    controller_process: bool = False
    """Run the controller, and a single front end too, as processes of their own, restarted when
    lost."""
    node_streams: bool = False
    """One stream to the controller for each node instead of each instance, for a hundred instances
    and more."""

    @property
    def has_front_end_processes(self) -> bool:
        """True if front ends are processes, and no thread of the controller's."""
        return self.front_ends > 1 or self.controller_process

    @property
    def has_keys(self) -> bool:
        """True if clients or operators have keys: their data needs one."""
        return bool(self.api_keys or self.api_keys_file or self.operator_keys_file)

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            bool(self.ssl_keyfile) == bool(self.ssl_certfile),
            "ssl_keyfile and ssl_certfile go together: give both or neither",
        )
        require(
            self.ssl_cert_reqs in (0, 2)
            and (self.ssl_cert_reqs == 0 or bool(self.ssl_certfile and self.ssl_ca_certs)),
            f"ssl_cert_reqs is {self.ssl_cert_reqs}; it must be 0, or 2 beside ssl_certfile and "
            "ssl_ca_certs",
        )
        require(
            re.fullmatch(r"(https?://[^/\s]+/?)?", self.otlp_traces_endpoint) is not None,
            f"otlp_traces_endpoint is {self.otlp_traces_endpoint!r}; it must be like "
            "http://localhost:4317",
        )
        require(
            re.fullmatch(r"(tcp://\S+:[1-9]\d*|ipc://\S+)?", self.kv_events) is not None,
            f"kv_events is {self.kv_events!r}; it must be a ZMQ endpoint such as tcp://*:5557",
        )
        require(
            all(
                key.isascii() and key.isprintable() and key == key.strip() != ""
                for key in self.api_keys
            ),
            "api_keys has a key that no header can carry; each must be printable ASCII, without "
            "space at its ends",
        )
        require(
            1 <= self.front_ends <= 64
            and max(self.grpc_port, self.http_port, self.members_port + 2) + self.front_ends
            <= 65536,
            f"front_ends is {self.front_ends}; it must be from 1 to 64, and grpc_port, http_port "
            "and members_port + 2 at most 65536 with it added",
        )
