"""Judges outputs, greedy, sampled or penalised, by one forward of the reference model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from data_plane.instance.sampler import controlled_logits, token_probabilities, uniform
from data_plane.reference.oracle import Oracle
from nanocp.values.sampling import SamplingParams, penalized_prompt_ids


class Judge(Protocol):
    """Knows which tokens are right."""

    def first_wrong(
        self, prompt_ids: Sequence[int], params: SamplingParams, output_ids: Sequence[int]
    ) -> tuple[int | None, int]:
        """Return the index of the first wrong token, None if all are right; and the near-ties."""


class ReferenceJudge(Judge):
    """`transformers` on the checkpoint that is served."""

    def __init__(self, checkpoint: Path) -> None:
        self._oracle = Oracle(checkpoint)

    def first_wrong(
        self, prompt_ids: Sequence[int], params: SamplingParams, output_ids: Sequence[int]
    ) -> tuple[int | None, int]:
        prompt = penalized_prompt_ids(prompt_ids, params)

        def distance(logits: torch.Tensor, output_ids: Sequence[int]) -> torch.Tensor:
            return torch.stack(
                [
                    _distance(row, params, output_ids[:index], prompt, output_ids[index])
                    for index, row in enumerate(logits)
                ]
            )

        verdict = self._oracle.judge(prompt_ids, output_ids, distance)
        return verdict.first_wrong, verdict.near_ties


def _distance(
    logits_V: torch.Tensor,
    params: SamplingParams,
    before: Sequence[int],
    prompt: Sequence[int],
    token_id: int,
) -> torch.Tensor:
    """A token's distance from the right one.

    In logits for a greedy token; for a drawn one from the random number to its part of [0, 1).
    """
    logits_V = controlled_logits(logits_V, params, before, prompt)
    if params.temperature == 0:
        return logits_V.max() - logits_V[token_id]
    edges = token_probabilities(logits_V, params).cumsum(dim=0)
    target = uniform(params.seed, len(before)) * edges[-1]
    begin = edges[token_id - 1] if token_id else edges.new_zeros(())
    return torch.maximum(begin - target, target - edges[token_id]).clamp(min=0)
