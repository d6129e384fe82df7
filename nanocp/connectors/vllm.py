"""The connector for vLLM, by the name that vLLM's flags have for it (docs/use/prefill.md)."""

from data_plane.prefill.connector.vllm import NanocpConnector

__all__ = ["NanocpConnector"]
