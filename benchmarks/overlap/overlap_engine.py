"""The overlap engine against the graph that TorchDynamo traced: its bits, its time, its memory.

Enters: nothing. Leaves: tables, and a list of {part, ...}. Does not know: how the engine runs an
order. Times are of the processor, in one thread, by turns; the fastest of many counts.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from benchmarks.kit.bench import BenchRun, Claim, at_most, bench
from nanocp.overlap.engine.backend import overlap, overlap_backend
from nanocp.overlap.engine.batch import Cut
from nanocp.overlap.engine.engine import OverlapEngine
from nanocp.overlap.engine.partition import mark
from nanocp.overlap.engine.recording import record
from nanocp.overlap.ops import OverlapPolicy, SplitModule
from nanocp.overlap.policies.orders import DualBatchOverlap, NanoFlow, Sequential

MAX_FALLBACK = 1.05
"""Claim: a batch that is not split takes at most this much of the graph's processor time."""
MAX_DECIDED_US = 10.0
MAX_RECORDED_US = 2.0
"""Claims: what an operator costs beside its own call, when a policy decides, and repeated."""
MAX_PEAK = 1.1
"""Claim: most memory at a time, of a whole batch's and of what a layer's parts are merged into."""
MAX_APART = 1e-6
"""A static cache's graph may differ by so much."""
VOCABULARY = 64
PROMPT, CACHE_LENGTH = 7, 16
CACHES = ("none", "growing", "static")
NUM_OPERATORS = 100


@bench("Under a minute: two layers, few rounds; judges no time.")
def main(run: BenchRun) -> None:
    """Capture three models, time the engine, and count what merging copies."""
    torch.set_num_threads(1)
    # One row has a graph of its own, without a batch to split: it warns of that.
    logging.getLogger("nanocp.overlap.engine.backend").setLevel(logging.ERROR)
    num_layers, num_rounds = (2, 5) if run.is_quick else (4, 300)
    with torch.no_grad():
        captured = [capture(name, cache, num_layers) for name in MODELS for cache in CACHES]
        fallen_back = fallback(num_layers, num_rounds)
        operators = operator_cost(num_rounds)
        merged = [merging(name, num_layers) for name in MODELS]
    for part in (captured, [fallen_back], [operators], merged):
        run.table(part[0]["part"], part)
    run.keep(*captured, fallen_back, operators, *merged, layers=num_layers)
    run.judge(claim for result in captured for claim in claims_of_capture(result))
    run.judge(claim for result in merged for claim in claims_of_merging(result))
    run.judge(claims_of_time(fallen_back, operators), run.too_quick)


# --- models


_FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[type, Any, Any, dict[str, int]]] = {
    "Llama": (LlamaAttention, LlamaConfig, LlamaForCausalLM, {}),
    "Qwen3-MoE": (
        *(Qwen3MoeAttention, Qwen3MoeConfig, Qwen3MoeForCausalLM),
        _FEW_EXPERTS | {"num_experts": 4, "head_dim": 16},
    ),
    "DeepSeek-V3": (
        *(DeepseekV3Attention, DeepseekV3Config, DeepseekV3ForCausalLM),
        _FEW_EXPERTS
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}
        | {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    ),
}
"""Name -> the class of its attention, its configuration's, its own, and what it is given."""


def model_of(name: str, num_layers: int) -> nn.Module:
    """A small model with random weights. What was compiled before is forgotten."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    _, config, model, more = MODELS[name]
    return model(config(**shape, **more)).eval()


def rules_of(name: str) -> tuple[SplitModule, ...]:
    """Attention is an operator of its own, and so is what lies between two of them."""
    return (SplitModule(MODELS[name][0], "attention"),)


def ids_of(rows: int, length: int) -> Tensor:
    """Random token ids."""
    return torch.randint(0, VOCABULARY, (rows, length))


# --- capture


def capture(name: str, cache: str, num_layers: int) -> dict[str, Any]:
    """Run batches of several sizes; the captured graph's logits beside the model's own."""
    model, engines = model_of(name, num_layers), []
    run = overlap(model, Sequential(rules_of(name)), engines.append)
    apart, num_graphs = 0.0, 0
    for rows in (8, 5, 2, 1):
        caches = [_cache(model, cache) for _ in range(2)]
        ids = ids_of(rows, PROMPT)
        if cache != "none":
            for each in caches:
                model(ids, past_key_values=each, use_cache=True)
        for _ in range(3):
            more = ids_of(rows, PROMPT if cache == "none" else 1)
            mine, whole = (
                form(more, past_key_values=each, use_cache=cache != "none").logits
                for form, each in zip((run, model), caches, strict=True)
            )
            apart = max(apart, float((mine - whole).abs().max()))
        num_graphs = len(engines)
    return {
        "part": "capture",
        "model": name,
        "cache": cache,
        "operators": len(engines[0].program.operators),
        "graphs": num_graphs,
        "apart": apart,
    }


def _cache(model: nn.Module, kind: str) -> DynamicCache | StaticCache | None:
    if kind == "none":
        return None
    if kind == "growing":
        return DynamicCache()
    return StaticCache(model.config, max_cache_len=CACHE_LENGTH)


def claims_of_capture(result: dict[str, Any]) -> Iterator[Claim]:
    """Equal bits, and one graph for all batches of several rows."""
    which = f"{result['model']}, cache: {result['cache']}"
    most = MAX_APART if result["cache"] == "static" else 0.0
    yield at_most(f"{which}: logits differ by", result["apart"], most)
    graphs = 2 if result["cache"] == "growing" else 1
    sentence = f"8, 5 and 2 rows have {result['graphs']} graphs, {graphs} expected"
    yield Claim(f"{which}: {sentence}", result["graphs"] == graphs)


# --- time


def fastest_us(forms: tuple[Callable[[], Any], ...], num_rounds: int) -> list[float]:
    """Microseconds of processor time of the fastest call of each form, taken by turns.

    As in timeit, no garbage is collected meanwhile: what was compiled before makes that slow.
    """
    best = [float("inf")] * len(forms)
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_rounds):
            for index, form in enumerate(forms):
                begin_ns = time.process_time_ns()
                form()
                best[index] = min(best[index], (time.process_time_ns() - begin_ns) / 1000)
    finally:
        gc.enable()
    return best


def called(
    model: nn.Module, policy: OverlapPolicy, batch: Tensor, **options: Any
) -> tuple[OverlapEngine, Sequence[Any]]:
    """The engine of a model's graph, once it has recorded, and what it is called with."""
    found: list[tuple[Any, Sequence[Any]]] = []

    def backend(graph: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        engine = overlap_backend(policy)(graph, examples)

        def call(*inputs: Any) -> Any:
            found.append((engine, inputs))
            return engine(*inputs)

        return call

    torch._dynamo.mark_dynamic(batch, 0)
    torch.compile(model, backend=backend)(batch, **options)
    ((engine, inputs),) = found
    assert isinstance(engine, OverlapEngine)
    return engine, inputs


def fallback(num_layers: int, num_rounds: int) -> dict[str, Any]:
    """A batch that the policy does not split, against the traced graph alone."""
    model = model_of("Llama", num_layers)
    ids = ids_of(2, PROMPT)
    torch._dynamo.mark_dynamic(ids, 0)
    plain = torch.compile(model, backend=lambda graph, inputs: graph.forward)
    engine = overlap(model, NanoFlow(rules_of("Llama"), least_rows=64))
    for form in (plain, engine):
        form(ids, use_cache=False)
    graph_us, engine_us = fastest_us(
        (lambda: plain(ids, use_cache=False), lambda: engine(ids, use_cache=False)), num_rounds
    )
    return {
        "part": "a batch that is not split",
        "graph_us": round(graph_us),
        "engine_us": round(engine_us),
        "ratio": round(engine_us / graph_us, 3),
    }


class _Steps(nn.Module):
    """Many operators that do next to nothing."""

    def forward(self, rows: Tensor) -> Tensor:
        for number in range(NUM_OPERATORS):
            with mark(f"step {number}"):
                rows = torch.neg(rows)
        return rows


def operator_cost(num_rounds: int) -> dict[str, Any]:
    """What an operator costs beside its own call: decided, and repeated."""
    torch._dynamo.reset()
    policy, rows = NanoFlow(), torch.ones(8, 1)
    engine, inputs = called(_Steps(), policy, rows)
    assert len(engine.program.operators) == NUM_OPERATORS and all(engine.recordings.values())

    half = len(rows) // 2
    arguments = [
        [rows[:half] if isinstance(engine.program.kinds[number], Cut) else half for number in each]
        for each in (operator.inputs for operator in engine.program.operators)
    ]
    alone_calls = 2 * [
        (operator.module.forward, given)
        for operator, given in zip(engine.program.operators, arguments, strict=True)
    ]

    def alone() -> None:
        for call, given in alone_calls:
            call(*given)

    alone_us, decided_us, repeated_us = fastest_us(
        (alone, lambda: record(engine.program, policy, len(rows)), lambda: engine(*inputs)),
        num_rounds,
    )
    calls = 2 * NUM_OPERATORS
    return {
        "part": "what an operator costs",
        "alone_us": round(alone_us / calls, 2),
        "decided_us": round(decided_us / calls, 2),
        "repeated_us": round((repeated_us - alone_us) / calls, 2),
    }


def claims_of_time(fallen_back: dict[str, Any], operators: dict[str, Any]) -> Iterator[Claim]:
    """What is claimed of the engine's own time."""
    what = "a batch that is not split takes {} of the graph's time"
    yield at_most(what, fallen_back["ratio"], MAX_FALLBACK)
    what = "an operator that a policy decides on costs {} us"
    yield at_most(what, operators["decided_us"], MAX_DECIDED_US)
    yield at_most("a repeated operator costs {} us", operators["repeated_us"], MAX_RECORDED_US)


# --- memory


class _LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that were made inside and live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address and address not in inputs and address not in self._live:
                self._live[address] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, address, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return made


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def merging(name: str, num_layers: int) -> dict[str, Any]:
    """Halves that meet at attention: what is copied for that, and the most memory at a time."""
    model = model_of(name, num_layers)
    ids = ids_of(8, PROMPT)
    peaks, copied = [], 0
    for policy in (Sequential(rules_of(name)), DualBatchOverlap(rules_of(name))):
        engine, inputs = called(model, policy, ids, use_cache=False)
        engine(*inputs)
        before = engine.num_copied_bytes
        gc.collect()
        with _LiveBytes() as live:
            engine(*inputs)
        peaks.append(live.peak)
        copied = engine.num_copied_bytes - before
    merged = len(ids) * PROMPT * model.config.hidden_size * 4
    return {
        "part": "merging",
        "model": name,
        "copied_bytes": copied,
        "mask_bytes": len(ids) * PROMPT**2,
        "whole_peak_bytes": peaks[0],
        "halves_peak_bytes": peaks[1],
        "merged_bytes": merged,
        "ratio": round(peaks[1] / (peaks[0] + merged), 3),
    }


def claims_of_merging(result: dict[str, Any]) -> Iterator[Claim]:
    """The rows are not copied, and little more memory is needed."""
    what = f"{result['model']}: merging copies {{}} bytes, the mask's"
    yield at_most(what, result["copied_bytes"], result["mask_bytes"])
    what = (
        f"{result['model']}: halves need {{}} of the memory of the whole batch and of the "
        f"{result['merged_bytes']} bytes that they are merged into"
    )
    yield at_most(what, result["ratio"], MAX_PEAK)


if __name__ == "__main__":
    main()
