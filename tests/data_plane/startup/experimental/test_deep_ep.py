from types import SimpleNamespace

import pytest
import torch

from data_plane.model.norm import rms_norm
from data_plane.moe.gpu.grouped import GroupedExperts, GroupedMm
from data_plane.startup.experimental import deep_ep
from data_plane.startup.experimental.deep_ep import DeepEpExchange, deep_ep_obstacle
from harness.gpu_stand_ins.published_packages import deep_ep as package
from harness.kernels.kernel_cases import ExpertCase
from nanocp.config.cluster import BoundsConfig, ClusterConfig


def test_deep_ep_carries_live_rows_and_combines_them_by_weight():
    case = ExpertCase(torch.bfloat16, experts=range(7))
    x_TX, expert_TK, weight_TK = case.rows
    # A group of one: all other experts do not exist.
    expert_TK = expert_TK.masked_fill(expert_TK >= 7, -1)
    live_T = torch.arange(20) % 4 != 1
    cluster = ClusterConfig(num_instances=1, bounds=BoundsConfig(max_rows=32))
    model = SimpleNamespace(num_experts=7, hidden_size=48)
    exchange = DeepEpExchange.open(None, cluster, model, package)
    experts = GroupedExperts(GroupedMm(), case.place_E, *case.weights)
    dispatched = exchange.dispatch(x_TX, expert_TK, weight_TK, live_T)
    exchange.run_experts(dispatched, experts)
    norm_X = torch.ones(48, dtype=torch.bfloat16)
    y_TX, normed_TX = exchange.combine(dispatched, x_TX, x_TX, norm_X, 1e-6)
    expected = case.expected.masked_fill(~live_T[:, None], 0) + 2 * x_TX.float()
    torch.testing.assert_close(y_TX.float(), expected, atol=3e-2, rtol=3e-2)
    assert normed_TX.equal(rms_norm(y_TX, norm_X, 1e-6))


SIZES = {"hidden_size": 7168, "num_experts": 256, "num_experts_per_token": 8}
SITE = {"dtype": torch.bfloat16, "num_instances": 32, "max_rows": 128}


@pytest.mark.parametrize(("what", "words"), [
    ({}, None),
    ({"dtype": torch.float32}, "carries bfloat16"),
    ({"hidden_size": 1024}, "hidden size is 1024"),
    ({"num_experts_per_token": 12}, "at most 11"),
    ({"num_instances": 24}, "256 experts cannot be shared"),
    ({"num_instances": 2, "max_rows": 33}, "multiple of 4"),
    ({"max_rows": 512}, "needs at least 1026"),
])  # fmt: skip
def test_what_deep_ep_cannot_serve_is_named(monkeypatch, what, words):
    monkeypatch.setattr(deep_ep, "find_spec", lambda name: name)
    site = SITE | SIZES | what
    model = SimpleNamespace(**{name: site.pop(name) for name in SIZES})
    obstacle = deep_ep_obstacle(model=model, **site, environment={})
    assert words in obstacle if words else obstacle == ""


def test_an_absent_deep_ep_is_a_sentence():
    assert "deep_ep is not installed" in deep_ep_obstacle(model=None, **SITE, environment={})
