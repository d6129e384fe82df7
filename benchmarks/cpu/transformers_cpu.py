"""`transformers` as a peer of the decode benchmark: its own forward and cache, decode steps only.

Enters: a checkpoint, a dtype, threads; then JSON lines {"prompts": [[id, ...], ...], "num_tokens":
n} on standard input. Leaves: a JSON line when ready and {"tokens_per_s": x} for each. Does not
know: NanoCP.

The fastest of its experts' implementations is not the same at every batch: each is tried on the
batch, the best stays.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks.cpu.peers import Measure, answer_lines

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
"""The first is also that of the prefill: batched_mm copies the weights of every expert of every
token."""
NUM_TRIAL_STEPS = 3


class LoadedModel:
    """The model, and for each batch the prompts' cache and the experts' implementation that won."""

    def __init__(self, checkpoint: str, dtype: str) -> None:
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            local_files_only=True,
        ).eval()
        self._caches: dict[int, tuple[Any, str]] = {}

    @torch.inference_mode()
    def tokens_per_s(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> dict[str, float | str]:
        """Time num_tokens steps of one token each after the prompts, which are prefilled once."""
        ids_BT = torch.tensor(prompts)
        if len(ids_BT) not in self._caches:
            self._caches[len(ids_BT)] = self._prefilled(ids_BT)
        cache, best = self._caches[len(ids_BT)]
        seconds = sum(self._steps_s(ids_BT, cache, best, num_tokens))
        return {"tokens_per_s": len(ids_BT) * num_tokens / seconds, "experts_implementation": best}

    def _prefilled(self, ids_BT: torch.Tensor) -> tuple[Any, str]:
        names = EXPERTS_IMPLEMENTATIONS if self._has_experts() else ("none",)
        cache = self._model(ids_BT, use_cache=True, logits_to_keep=1).past_key_values
        best_s = {name: min(self._steps_s(ids_BT, cache, name, NUM_TRIAL_STEPS)) for name in names}
        return cache, min(best_s, key=best_s.__getitem__)

    def _has_experts(self) -> bool:
        """Whether the model is a mixture, and takes the first implementation, the prefill's."""
        try:
            self._model.set_experts_implementation(EXPERTS_IMPLEMENTATIONS[0])
        except ValueError:
            return False
        return True

    def _steps_s(
        self, ids_BT: torch.Tensor, cache: Any, experts: str, num_steps: int
    ) -> list[float]:
        """Time each step, in seconds; a first one is not counted, since it allocates."""
        if experts != "none":
            self._model.set_experts_implementation(experts)
        cache.crop(ids_BT.shape[1] - 1 - cache.get_seq_length())
        next_B1 = ids_BT[:, -1:]
        ends_s = []
        for _ in range(num_steps + 1):
            next_B1 = (
                self._model(next_B1, past_key_values=cache, use_cache=True)
                .logits[:, -1]
                .argmax(-1, keepdim=True)
            )
            ends_s.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(ends_s)]


def load(checkpoint: str, dtype: str, threads: int) -> tuple[str, Measure]:
    """Load the model in this process."""
    torch.set_num_threads(threads)
    return transformers.__version__, LoadedModel(checkpoint, dtype).tokens_per_s


if __name__ == "__main__":
    answer_lines(load)
