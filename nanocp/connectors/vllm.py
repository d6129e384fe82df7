"""The connector for vLLM, by the name that vLLM's flags have for it (docs/use/prefill.md)."""

from data_plane.connectors.vllm import NanocpConnector

__all__ = ["NanocpConnector"]
