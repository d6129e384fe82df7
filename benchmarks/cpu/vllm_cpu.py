"""vLLM on the CPU as a peer of the decode benchmark, run in an environment of its own.

Enters: a checkpoint, a dtype, threads; then JSON lines {"prompts": [[id, ...], ...], "num_tokens":
n} on standard input. Leaves: a JSON line when ready and {"tokens_per_s": x} for each. Does not
know: NanoCP.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cpu.peers import Measure, answer_lines

NUM_WARM_TOKENS = 2
MAX_MODEL_LEN = 1024


def load(checkpoint: str, dtype: str, threads: int) -> tuple[str, Measure]:
    """An engine in this process, so that its steps can be timed one by one."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if os.environ.get("NANOCP_PEER_INSTRUCTIONS") == "avx2":
        _hide_avx512()
    import vllm

    config = json.loads((Path(checkpoint) / "config.json").read_text())

    llm = vllm.LLM(
        checkpoint,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        max_num_batched_tokens=16384,
        enable_prefix_caching=False,
        # Where the CPU has AMX, vLLM picks a backend that does not take fp32.
        attention_config=(
            {"backend": "CPU_MLA"} if dtype == "float32" and "kv_lora_rank" in config else {}
        ),
    )
    return vllm.__version__, partial(tokens_per_s, llm)


def _hide_avx512() -> None:
    """Make vLLM choose its kernels as on a CPU without AVX-512: it asks torch, on import."""
    import torch

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda: False)


def tokens_per_s(llm: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, float]:
    """From the moment when every request has NUM_WARM_TOKENS to the first end."""
    from vllm import SamplingParams, TokensPrompt

    parameters = SamplingParams(
        temperature=0.0, max_tokens=num_tokens + NUM_WARM_TOKENS, ignore_eos=True, detokenize=False
    )
    engine = llm.llm_engine
    counts = {str(number): 0 for number in range(len(prompts))}
    for request_id, prompt in zip(counts, prompts, strict=True):
        engine.add_request(request_id, TokensPrompt(prompt_token_ids=list(prompt)), parameters)
    began_s, first, ended_s, last = 0.0, 0, 0.0, 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            counts[output.request_id] = len(output.outputs[0].token_ids)
        if not began_s and min(counts.values()) >= NUM_WARM_TOKENS:
            began_s, first = now_s, sum(counts.values())
        if began_s and not ended_s and max(counts.values()) >= num_tokens + NUM_WARM_TOKENS:
            ended_s, last = now_s, sum(counts.values())
    return {"tokens_per_s": (last - first) / (ended_s - began_s)}


if __name__ == "__main__":
    answer_lines(load)
