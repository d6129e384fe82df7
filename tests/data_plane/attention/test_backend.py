"""Attention backends: one interface; chosen by name or by auto, with a reason; refused by name."""

import tomllib
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_plane.attention import backend
from data_plane.attention.backend import AttentionSite, attention_backend
from data_plane.attention.flash_attention import FlashAttentionHeads
from data_plane.attention.flashmla import FlashMla
from data_plane.attention.fp8_latent import dequantise, quantise
from data_plane.attention.torch_paged import KvHeads, LatentKv, TorchPaged
from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.attention_kinds.mla import MlaConfig
from data_plane.model.sizes import token_bytes
from harness.gpu_stand_ins.published_packages import flash_attn_interface, flash_mla, sgl_flash_mla
from harness.kernels.kernel_cases import LENGTHS, AttentionCase
from harness.paths import ROOT

FLASHMLA = {"source": flash_mla, "wheel": sgl_flash_mla}
"""Each gives the module flash_mla."""


def site(device="cpu", q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16, rank=512, rope_dim=64):
    kind = MlaConfig(
        hidden_size=7168,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=rank,
        nope_dim=128,
        rope_dim=rope_dim,
        value_dim=128,
    )
    return AttentionSite(torch.device(device), q_dtype, kv_dtype, kind)


@pytest.fixture
def hopper(monkeypatch):
    """Pretend an H200 with every package; a test may take packages out of the set."""
    packages = {"triton", "flash_mla"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(backend, "find_spec", lambda name: name in packages or None)
    monkeypatch.setattr(backend, "_make", lambda name, site: name)
    return packages


@pytest.mark.parametrize("name", LENGTHS)
def test_torch_agrees_with_the_reference_through_the_interface(name):
    case = AttentionCase(LENGTHS[name], heads=3, rank=16, rope=8, dtype=torch.float32)
    case.check(*case.run(TorchPaged(LatentKv(16))), 5e-6, 5e-6)


@pytest.mark.parametrize("package", FLASHMLA)
@pytest.mark.parametrize("name", LENGTHS)
def test_flashmla_answers_by_our_conventions(name, package):
    """A stand-in has FlashMLA's published signature and conventions: its empty rows are +inf."""
    case = AttentionCase(
        LENGTHS[name], heads=2, rank=512, rope=64, dtype=torch.bfloat16, scale=0.04
    )
    flashmla = FlashMla(512, FLASHMLA[package])
    case.check(*case.run(flashmla), 2e-2, 2e-2)
    case.check(*case.run(flashmla), 2e-2, 2e-2)


@pytest.mark.parametrize("name", LENGTHS)
def test_flash_attention_answers_by_our_conventions(name):
    """A stand-in has FlashAttention 3's published signature; it looks up no entry that is none."""
    case = AttentionCase(
        LENGTHS[name], heads=6, rank=0, rope=0, dtype=torch.bfloat16, scale=0.1,
        layout=KvHeads(2, 64),
    )  # fmt: skip
    backend = FlashAttentionHeads(2, 64, flash_attn_interface)
    case.check(*case.run(backend), 2e-2, 2e-2)


class Launches(TorchDispatchMode):
    """Keeps the names of the operations that are no views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", [*FLASHMLA, "flash_attention"])
@pytest.mark.parametrize("needs_lse", [True, False])
def test_behind_a_packages_kernel_is_one_launch_at_most(kind, needs_lse):
    """It fills the lse of empty rows in place, and only for who merges; out is as it was."""
    out, lse = torch.ones(3, 1, 2, 512), torch.full((3, 2, 1), float("inf"))
    name = "flash_attn_with_kvcache" if kind == "flash_attention" else "flash_mla_with_kvcache"

    def kernel(*_, use_legacy=False, **keys):
        assert use_legacy == (kind == "wheel")
        return out, lse

    published = FLASHMLA.get(kind, flash_attn_interface)
    kernel.__signature__ = signature(getattr(published, name))
    package = SimpleNamespace(**{**vars(published), name: kernel})
    backend = FlashMla(512, package) if kind in FLASHMLA else FlashAttentionHeads(1, 4, package)
    plan = backend.plan(torch.zeros(3, 1, dtype=torch.int32), torch.tensor([5, 0, 7]).int())
    q, pool = torch.zeros(3, 2, 4), torch.zeros(1, 64, 8)
    with Launches() as launches:
        answer = backend.run(q, pool, plan, 0.1, needs_lse)
    assert launches.names == ["masked_fill_"] * needs_lse
    assert [each.data_ptr() for each in answer] == [out.data_ptr(), lse.data_ptr()]
    # An overflow of a row with tokens does not pass for an empty row.
    empty = float("-inf") if needs_lse else float("inf")
    assert answer[1].tolist() == [[float("inf")] * 2, [empty] * 2, [float("inf")] * 2]


def test_flashmla_plans_anew_for_new_lengths():
    case = AttentionCase([200, 64], heads=2, rank=512, rope=64, dtype=torch.bfloat16)
    flashmla = FlashMla(512, flash_mla)
    plans = [
        flashmla.plan(case.frame_AP, length_A) for length_A in (case.length_A, case.length_A - 1)
    ]
    for plan in plans + plans:  # layers share a step's plan
        flashmla.run(case.q, case.pool, plan, case.scale)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_the_cpu_runs_torch_and_says_why(name):
    chosen, why = attention_backend(name, site())
    assert isinstance(chosen, TorchPaged) and why.startswith("torch, ")


def test_auto_on_the_cpu_takes_what_the_kernels_have():
    native = TorchPaged(LatentKv(512))
    assert attention_backend("auto", site(), native) == (native, "native, because the kernels are")
    assert attention_backend("torch", site(), native)[0] is not native


@pytest.mark.parametrize("name", ["triton", "flashmla", "flash_attention"])
def test_gpu_backends_are_refused_by_name_on_the_cpu(name):
    with pytest.raises(ValueError, match=f"attention_backend is {name}: it needs an NVIDIA GPU"):
        attention_backend(name, site())


def test_auto_on_hopper_takes_flashmla_where_it_can_else_triton_and_says_why(hopper):
    assert attention_backend("auto", site("cuda")) == (
        "flashmla",
        "flashmla, because flashmla runs on NVIDIA H200",
    )
    fp8 = site("cuda", kv_dtype=torch.uint8)
    assert attention_backend("auto", fp8)[0] == "triton"
    hopper.remove("flash_mla")
    chosen, why = attention_backend("auto", site("cuda"))
    assert chosen == "triton" and "not flashmla: the package flash_mla is not installed" in why
    (wheel,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["flashmla"]
    assert f"(pip install --no-deps {wheel})" in why
    hopper.remove("triton")
    with pytest.raises(ValueError, match=r"flash_mla is not installed.*triton is not installed"):
        attention_backend("auto", site("cuda"))


@pytest.mark.parametrize(("name", "what", "words"), [
    ("triton", {"rank": 500}, "kv_lora_rank is 500"),
    ("triton", {"rope_dim": 8}, "qk_rope_head_dim is 8"),
    ("triton", {"kv_dtype": torch.float32}, "reads KV of the queries' dtype or FP8"),
    ("flashmla", {"rank": 256}, "its widths are 512"),
    ("flashmla", {"q_dtype": torch.float32, "kv_dtype": torch.float32},
     "takes bfloat16 or float16"),
    ("flashmla", {"kv_dtype": torch.uint8}, "takes bfloat16 or float16"),
    ("flash_attention", {}, "the package flash_attn_3 is not installed"),
    ("torch", {}, "it is the CPU's path"),
])  # fmt: skip
def test_what_a_backend_cannot_do_is_refused_by_name(hopper, name, what, words):
    with pytest.raises(ValueError, match=f"attention_backend is {name}: .*{words}"):
        attention_backend(name, site("cuda", **what))


def test_flashmla_is_refused_off_hopper(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="Hopper"):
        attention_backend("flashmla", site("cuda"))
    assert attention_backend("auto", site("cuda"))[0] == "triton"


def test_fp8_tokens_have_flashmlas_bytes_and_an_error_of_four_bits():
    kv = (
        torch.randn(5, 64, 576, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1, 50, 0, 7])[:, None, None]
    )
    packed = quantise(kv, 512)
    assert packed.shape == (5, 64, token_bytes(512, 64)) == (5, 64, 656)
    restored = dequantise(packed, 512)
    groups = kv[..., :512].unflatten(-1, (4, 128))
    error = (restored[..., :512].unflatten(-1, (4, 128)) - groups).abs()
    # e4m3 has three bits after the leading one; below 2^-6 of 448 its steps are even.
    assert (
        error <= groups.abs() * 2**-4 + groups.abs().amax(-1, keepdim=True) * 2**-10 / 448 * 1.01
    ).all()
    torch.testing.assert_close(restored[..., 512:], kv[..., 512:], atol=0, rtol=2**-8)


def heads_site(head_dim=128, device="cpu", kv_dtype=torch.bfloat16):
    kind = GqaConfig(
        hidden_size=4096,
        num_heads=64,
        num_kv_heads=4,
        head_dim=head_dim,
        rope_dim=head_dim,
        has_bias=False,
        has_norms=True,
        norm_eps=1e-6,
    )
    return AttentionSite(torch.device(device), torch.bfloat16, kv_dtype, kind)


def test_kv_heads_run_on_torch_here_and_on_no_kernel_of_latent_kv(monkeypatch):
    backend, why = attention_backend("auto", heads_site())
    assert isinstance(backend, TorchPaged) and why.startswith("torch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("data_plane.attention.backend.find_spec", lambda name: name)
    with pytest.raises(ValueError, match="it reads latent KV, and the model has K/V heads"):
        attention_backend("flashmla", heads_site(device="cuda"))
    with pytest.raises(ValueError, match="head_dim is 48; its tiles need a power of two"):
        attention_backend("triton", heads_site(head_dim=48, device="cuda"))


def test_flash_attention_is_taken_by_name_and_refused_by_what_it_cannot_do(hopper, monkeypatch):
    """No GPU has run it yet, so auto takes Triton."""
    hopper.add("flash_attn_interface")
    on_gpu = heads_site(device="cuda")
    assert attention_backend("flash_attention", on_gpu)[0] == "flash_attention"
    assert attention_backend("auto", on_gpu)[0] == "triton"
    for wrong, words in (
        (site("cuda"), "the model has latent KV"),
        (heads_site(head_dim=100, device="cuda"), "head_dim is 100"),
        (heads_site(device="cuda", kv_dtype=torch.uint8), "takes bfloat16 or float16"),
    ):
        with pytest.raises(ValueError, match=f"attention_backend is flash_attention: .*{words}"):
            attention_backend("flash_attention", wrong)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(ValueError, match="for Hopper"):
        attention_backend("flash_attention", on_gpu)
