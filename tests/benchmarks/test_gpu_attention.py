"""gpu_attention's arithmetic, without a GPU: shapes, ceilings and claims."""

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import gpu_attention as bench

CEILINGS = {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 800.0}


def test_cells_cover_the_claim_and_fit_the_pool():
    cells = bench.cells(bench.FULL)
    assert len(cells) == len(set(cells)) and all(
        batch * context <= 2**25 for _, batch, context in cells
    )
    assert {
        ("bf16", 1, 2**20),
        ("bf16", 256, 2**11),
        ("bf16", 256, 2**17),
        ("fp8", 1, 2**20),
    } <= set(cells)
    tokens = bench.FULL.figure_3a_tokens
    figure = [batch for kv, batch, context in cells if kv == "bf16" and batch * context == tokens]
    assert sorted(figure) == list(bench.FULL.batches)
    assert (
        all(context % 64 == 0 for _, _, context in cells)
        and len(bench.cells(bench.FULL, quick=True)) < 10
    )


def test_the_nearer_ceiling_is_the_one_that_takes_longer():
    num_bytes, flops = bench.work(bench.FULL, "bf16", 1, 2**16)
    assert num_bytes // 2**16 == 1152 + 4 and flops == 2 * 128 * (576 + 512) * 2**16
    result = bench.rates("attention", "triton", 100.0, num_bytes, flops, CEILINGS)
    assert (
        result["of_ceiling"]
        == round(flops / 800e12 * 1e6 / 100.0, 3)
        > num_bytes / 4000e9 * 1e6 / 100.0
    )
    assert result["gb_per_s"] == round(num_bytes / 100e-6 / 1e9, 1)


def test_what_was_claimed_and_not_reached_is_said():
    def result(backend, us, context=2**16):
        return bench.rates(
            "attention", backend, us, 4 * 10**8, 0, CEILINGS, kv="bf16", batch=1, context=context
        )

    def missed(*results):
        return [claim.sentence for claim in bench.claims(results) if not claim.holds]

    assert missed(result("triton", 120.0), result("flashmla", 110.0)) == []
    (sentence,) = missed(result("triton", 120.0), result("flashmla", 100.5))
    assert "FlashMLA" in sentence
    (sentence,) = missed(result("triton", 130.0))
    assert "of the nearer ceiling" in sentence
    assert missed(result("triton", 500.0, context=2**13)) == []


def test_the_copy_ceiling_is_that_of_a_kernel(monkeypatch):
    """A copy in a graph is a node of its own kind, which is slower than a kernel."""
    measured = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            measured[-1].append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def noted(calls):
        measured.append([])
        with Noting():
            calls[0]()
        return 1.0

    monkeypatch.setattr(bench, "replay_us", noted)
    with FakeTensorMode():
        bench.measure_ceilings(False)
    assert measured == [["add"], ["mm"]]
