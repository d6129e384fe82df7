"""vLLM's connector interface as it was published, for tests without vLLM."""

import enum
import sys
from types import ModuleType

VERSION = "0.32.0"
METHODS = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "bind_connector_metadata": ("connector_metadata",),
    "clear_connector_metadata": (),
    "has_connector_metadata": (),
    "_get_connector_metadata": (),
    "register_kv_caches": ("kv_caches",),
    "handle_preemptions": ("kv_connector_metadata",),
    "start_load_kv": ("forward_context",),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "shutdown": (),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request", "block_ids"),
    "request_finished_all_groups": ("request", "block_ids"),
    "has_pending_push_work": (),
    "get_finished_count": (),
}


class KVConnectorRole(enum.Enum):
    """Where a connector runs."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """What travels from the scheduler to the workers."""


class SupportsHMA:
    """Marks a connector that takes blocks of several groups."""


class KVConnectorBase_V1:
    """The base class, as far as the connector relies on it."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def has_connector_metadata(self):
        return self._connector_metadata is not None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata


def install(monkeypatch):
    """Put the stand-ins where the connector imports vLLM from."""
    base = ModuleType("base")
    for item in (KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA):
        setattr(base, item.__name__, item)
    state = ModuleType("parallel_state")
    state.get_tensor_model_parallel_rank = lambda: 0
    package = ModuleType("vllm")
    package.__version__ = VERSION
    for name, module in {
        "vllm": package,
        "vllm.distributed.kv_transfer.kv_connector.v1.base": base,
        "vllm.distributed.parallel_state": state,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("", ".kv_transfer", ".kv_transfer.kv_connector", ".kv_transfer.kv_connector.v1"):
        monkeypatch.setitem(sys.modules, f"vllm.distributed{name}", ModuleType("package"))
    monkeypatch.delitem(sys.modules, "data_plane.prefill.connector.vllm", raising=False)
