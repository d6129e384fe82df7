"""The connector for vLLM, over stand-ins for what it imports."""

import sys

import pytest

from harness.vllm import published_vllm


@pytest.fixture
def connector_module(monkeypatch):
    published_vllm.install(monkeypatch)
    import data_plane.prefill.connector.vllm as module

    yield module
    sys.modules.pop("data_plane.prefill.connector.vllm", None)
