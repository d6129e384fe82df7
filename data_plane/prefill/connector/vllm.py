"""NanoCP's KV connector for vLLM: prefill there, decode here (docs/use/prefill.md).

Only this file knows the interface of VLLM_VERSIONS; requests.py is the scheduler's half, sender.py
the worker's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from data_plane.model.attention_kinds.delta import DeltaConfig
from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.config import ModelConfig
from data_plane.prefill.connector import vllm_layout
from data_plane.prefill.connector.fingerprint import fingerprint
from data_plane.prefill.connector.paged_kv import PagedKv
from data_plane.prefill.connector.requests import PagePart, StepWork, TicketedRequests
from data_plane.prefill.connector.rings import PageWriters
from data_plane.prefill.connector.sender import PageSender
from data_plane.prefill.connector.vllm_states import StateReader, StateViews, state_views
from nanocp.values.plan import CARRY_PAGE, PAGE_SIZE

logger = logging.getLogger(f"vllm.{__name__}")

VLLM_VERSIONS = ("0.32.0",)
"""The tested versions; others get a warning."""
_MAX_HELD_BLOCKS = 1 << 14
_IDLE_WAIT_S = 0.01
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass
class NanocpMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's message from the scheduler's half to the workers."""

    work: StepWork


class NanocpConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Sends the KV of each request with a ticket; it loads nothing.

    kv_connector_extra_config: `allowed`, networks that may be dialled (by default this host alone),
    and `max_held_blocks` of ended requests. Raises ValueError for KV that it cannot send.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm.__version__ not in VLLM_VERSIONS:
            logger.warning(
                "NanoCP's connector was tested with vLLM %s; this is %s",
                ", ".join(VLLM_VERSIONS),
                vllm.__version__,
            )
        folder = _folder(vllm_config)
        self._model = ModelConfig.from_folder(folder)
        self._groups = kv_cache_config.kv_cache_groups
        _refuse_parallel(vllm_config.parallel_config, self._model)
        if self._model.delta is not None:
            _refuse_for_states(vllm_config, self._model.delta)
        self._dtype = _kv_dtype(vllm_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._requests: TicketedRequests | None = None
        self._sender: PageSender | None = None
        self._config = vllm_config
        if role == KVConnectorRole.SCHEDULER:
            self._requests = TicketedRequests(
                fingerprint(folder, self._dtype),
                int(extra.get("max_held_blocks", _MAX_HELD_BLOCKS)),
            )
        else:
            self._places = PageWriters(_networks(extra.get("allowed", "")))

    # --- in the scheduler's process

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._requests is not None
        self._requests.allocated(
            request.request_id, request.kv_transfer_params, request.num_prompt_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> NanocpMetadata:
        assert self._requests is not None
        return NanocpMetadata(self._requests.step(scheduler_output))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._requests is not None
        is_aborted = request.status.name == "FINISHED_ABORTED"
        return self._requests.finished(request.request_id, is_aborted)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._requests is not None
        self._requests.sent(connector_output.finished_sending or ())

    def has_pending_push_work(self) -> bool:
        return self._requests is not None and self._requests.is_holding

    def get_finished_count(self) -> int:
        """One: the worker of rank 0 sends, since it has the whole KV."""
        return 1

    # --- in a worker's process

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV of all layers. Raises ValueError if it is not the model's."""
        if get_tensor_model_parallel_rank() != 0:
            return
        linear = self._model.linear_layers
        names = sorted(kv_caches, key=_layer_number)
        full = [name for name in names if _layer_number(name) not in linear]
        num_layers = self._model.num_kept_layers
        speculative = self._config.speculative_config
        has_mtp = speculative is not None and speculative.method == "mtp"
        if len(full) != num_layers + has_mtp or len(names) - len(full) != len(linear):
            raise ValueError(
                f"vLLM has {len(full)} layers of KV and the model {num_layers}: in an engine "
                "that computes prompts for NanoCP speculative decoding must be off, or of method "
                "mtp, which adds one layer"
            )
        group_of = {
            name: number for number, group in enumerate(self._groups) for name in group.layer_names
        }
        first, kv_group = kv_caches[full[0]], group_of[full[0]]
        if any(group_of[name] != kv_group for name in full):
            raise ValueError("vLLM keeps KV of layers in several groups; it must be one group")
        block_size, kernel_size = self._groups[kv_group].kv_cache_spec.block_size, first.shape[-2]
        # A block of vLLM's scheduler may be several of its attention's, one after another.
        ratio = block_size // kernel_size
        layers = [
            [view.view(-1, ratio, *view.shape[1:]) for view in self._views(name, kv_caches[name])]
            for name in full
        ]
        # Instances that draft have an MTP layer, whether vLLM has one or not: then it is zero.
        shape = num_layers + 1, PAGE_SIZE, first[0].numel() // kernel_size
        page = torch.zeros(shape, dtype=first.dtype, device=first.device)
        plain = PagedKv(layers, block_size, page, _bytes_of)
        fp8 = PagedKv(layers, block_size, page, self._fp8_bytes)
        states = None
        if linear:
            named = [(name, group_of[name]) for name in names if name not in full]
            states = self._states(named, first.dtype, page[:num_layers].nbytes)

        def read_page(part: PagePart, number: int, num_tokens: int) -> Any:
            if states is not None and number >= CARRY_PAGE:
                return states.page(part.blocks, part.ticket.num_tokens, number - CARRY_PAGE)
            kv = fp8 if part.ticket.kv_dtype == "fp8" else plain
            return kv.read(part.blocks[kv_group], number, num_tokens, part.ticket.num_layers)

        self._sender = PageSender(read_page, self._places)
        self._is_gpu = first.is_cuda

    def _states(
        self, named: Sequence[tuple[str, int]], dtype: torch.dtype, page_bytes: int
    ) -> StateReader:
        delta, context = self._model.delta, self._config.compilation_config.static_forward_context
        assert delta is not None
        is_cpu = self._config.device_config.device_type == "cpu"
        views = [
            StateViews(group, *state_views(name, context[name].kv_cache, delta, dtype, is_cpu))
            for name, group in named
        ]
        return StateReader(delta, views, dtype, page_bytes)

    def _views(self, name: str, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kind = self._model.attention
        if not isinstance(kind, GqaConfig):
            return vllm_layout.latent(name, kv)
        layer = self._config.compilation_config.static_forward_context[name]
        # Only vLLM's attention on a CPU names the kernel that its blocks are laid out for.
        kernel = getattr(layer, "isa", None)
        return vllm_layout.heads(name, kv, kind.num_kv_heads, kind.head_dim, kernel)

    def _fp8_bytes(self, page: torch.Tensor) -> Any:
        from data_plane.attention.fp8_latent import quantise

        return _bytes_of(quantise(page, self._model.attention.fp8_rank()))

    def handle_preemptions(self, kv_connector_metadata: NanocpMetadata) -> None:
        if self._sender is not None:
            self._sender.drop(kv_connector_metadata.work.dropped)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is sent by layer: a page has all of them."""

    def wait_for_save(self) -> None:
        work = self._get_connector_metadata().work
        if self._sender is not None and work.parts:
            self._sender.queue(work.parts, self._computed())

    def _computed(self) -> Callable[[], None]:
        if not self._is_gpu:
            return lambda: None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return lambda: event.synchronize()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._sender is None:
            return None, None
        is_idle = self.has_connector_metadata() and self._get_connector_metadata().work.is_idle
        # An engine that only waits for pages to be sent would otherwise spin.
        sent = self._sender.finished(finished_req_ids, _IDLE_WAIT_S if is_idle else 0.0)
        return sent or None, None

    def shutdown(self) -> None:
        if self._sender is not None:
            self._sender.close()


def _refuse_parallel(parallel: Any, model: ModelConfig) -> None:
    names = [
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ]
    if isinstance(model.attention, GqaConfig):  # a rank has only its heads
        names.append("tensor_parallel_size")
    for name in names:
        if getattr(parallel, name, 1) != 1:
            raise ValueError(
                f"{name} is {getattr(parallel, name)}; it must be 1 in an engine that computes "
                "prompts for NanoCP, where one process has a whole page"
                + (" with all K/V heads" if name == "tensor_parallel_size" else "")
            )


def _refuse_for_states(config: Any, delta: DeltaConfig) -> None:
    cache, dtype = config.cache_config, config.model_config.dtype
    for is_wrong, sentence in (
        (
            delta.has_channel_decay,
            "they are Kimi Delta Attention; the connector sends states of Gated DeltaNet only",
        ),
        (
            cache.mamba_cache_mode != "none",
            "prefix caching is on, so that vLLM keeps states of several positions: it must be off: "
            "--no-enable-prefix-caching",
        ),
        (
            cache.use_replayssm,
            "use_replayssm is on, so that vLLM's states lack tokens: it must be off",
        ),
        (
            config.speculative_config is not None,
            "speculative decoding is on, whose tokens enter states: it must be off",
        ),
        (
            config.device_config.device_type == "cpu" and dtype != torch.bfloat16,
            f"dtype is {dtype}: on a CPU vLLM runs them in bfloat16 only: "
            "--dtype bfloat16, and data_plane.dtype bfloat16 in NanoCP",
        ),
    ):
        if is_wrong:
            raise ValueError(f"the model has linear attention layers, and {sentence}")


def _kv_dtype(config: Any) -> str:
    cache_dtype = config.cache_config.cache_dtype
    dtype = _DTYPES.get(config.model_config.dtype)
    if dtype is None or cache_dtype not in ("auto", dtype):
        raise ValueError(
            f"dtype is {config.model_config.dtype} and kv_cache_dtype {cache_dtype}; NanoCP takes "
            "float32 or bfloat16 from vLLM, and makes FP8 of bfloat16 where it is asked to: "
            "--kv-cache-dtype auto"
        )
    return dtype


def _folder(config: Any) -> Path:
    folder = Path(config.model_config.model)
    if not folder.is_dir():
        raise ValueError(
            f"the model is {config.model_config.model!r}; give vLLM the checkpoint as a folder, so "
            "that it can be compared with NanoCP's"
        )
    return folder


def _networks(allowed: Any) -> list[str]:
    return [name for name in allowed.split(",") if name] if isinstance(allowed, str) else allowed


def _layer_number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def _bytes_of(page: torch.Tensor) -> Any:
    # From a GPU this waits for the copy: the blocks have been read once it returns.
    return page.contiguous().view(torch.uint8).reshape(-1).cpu().numpy()
