"""The oracle: one `transformers` forward over prompt and output judges every greedy token.

Enters: a checkpoint, token ids. Leaves: verdicts. Does not know: any code that serves; so it cannot
share a fault with it. `transformers` is imported when an Oracle is made: only the demo and tests
need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_plane.reference.gates import GateDecision, ReferenceGates

NEAR_TIE = 1e-5
"""A token is also right if its logit is this close to the highest.

The last bits of an fp32 sum depend on its order.
"""
_ATTENTION = "sdpa_of_equal_widths"
_MAX_TRIES = 8
"""Most near-ties of the gates tried the other way for one output; each costs a forward."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the reference model says of one output."""

    num_tokens: int
    first_wrong: int | None
    """Index of the first token that is not the reference's; None if all are right."""
    near_ties: int
    """Near-ties that the output decided otherwise than the reference.

    Tokens that are not the argmax, but within NEAR_TIE of it; and choices of the reference's gates
    that were within GATE_NEAR_TIE of another, and had to be taken the other way for the output to
    be right.
    """

    @property
    def exact(self) -> bool:
        """Every token is right, and there is one."""
        return self.first_wrong is None and self.num_tokens > 0


def _attention(
    module: Any, query: Any, key: Any, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[Any, None]:
    """`transformers`' sdpa, with values padded to the width of the keys.

    torch's kernel that keeps no scores needs equal widths, which MLA does not have.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    width = value.shape[-1]
    padded = torch.nn.functional.pad(value, (0, max(0, key.shape[-1] - width)))
    output, _ = sdpa_attention_forward(module, query, key, padded, mask, **options)
    return output[..., :width], None


Distance = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""How far each token of an output is from the one that its logits ask for: ([output, vocabulary],
output ids) -> [output], 0 where it is that one."""


def below_highest(logits: torch.Tensor, output_ids: Sequence[int]) -> torch.Tensor:
    """A Distance for greedy outputs: how far each token's logit is below the highest."""
    chosen = logits.gather(1, torch.tensor(output_ids)[:, None]).squeeze(1)
    return logits.max(dim=-1).values - chosen


class Oracle:
    """The reference model, loaded once, in fp32; torch has one thread in its process from then."""

    def __init__(self, checkpoint: str | Path) -> None:
        """Raises what `transformers` raises if it cannot read the checkpoint."""
        import transformers

        # On a busy machine two threads, which wait for each other, took 20 times as long.
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        transformers.AttentionInterface.register(_ATTENTION, _attention)
        transformers.AttentionMaskInterface.register(
            _ATTENTION, transformers.masking_utils.sdpa_mask
        )
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(checkpoint),
            dtype=torch.float32,
            attn_implementation=_ATTENTION,
            local_files_only=True,
        )
        self._model = model.eval()
        self._gates = ReferenceGates(model)

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
        """[output, vocabulary]: row i is what token i of the output was chosen from."""
        ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        logits: torch.Tensor = self._model(
            ids, logits_to_keep=len(output_ids), use_cache=False
        ).logits[0]
        return logits

    def judge(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        distance: Distance = below_highest,
    ) -> Verdict:
        """Judge an output, by default a greedy one. prompt_ids: at least one.

        After a wrong token the rest is not judged, and its near-ties are not counted: it continues
        another text.
        """
        if not output_ids:
            return Verdict(0, None, 0)
        verdict, ties = self._compare(prompt_ids, output_ids, frozenset(), distance)
        otherwise: frozenset[GateDecision] = frozenset()
        tried: set[GateDecision] = set()
        while verdict.first_wrong is not None and len(tried) < _MAX_TRIES:
            position = len(prompt_ids) - 1 + verdict.first_wrong
            untried = [tie for tie in ties if tie.token <= position and tie not in tried]
            if not untried:
                break
            tie = max(untried, key=lambda tie: tie.token)  # the later, the more it weighs
            tried.add(tie)
            trial, trial_ties = self._compare(prompt_ids, output_ids, otherwise | {tie}, distance)
            if trial.first_wrong is None or trial.first_wrong > verdict.first_wrong:
                verdict, ties, otherwise = trial, trial_ties, otherwise | {tie}
        return replace(verdict, near_ties=verdict.near_ties + len(otherwise))

    def _compare(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        otherwise: frozenset[GateDecision],
        distance: Distance,
    ) -> tuple[Verdict, list[GateDecision]]:
        """The verdict, and the gates' near-ties, if the gates decide `otherwise` the other way."""
        self._gates.near_ties, self._gates.decided_otherwise = [], otherwise
        logits = self.logits(prompt_ids, output_ids)
        self._gates.decided_otherwise = frozenset()
        below = distance(logits, output_ids)
        wrong = (~(below <= NEAR_TIE)).nonzero().flatten().tolist()  # so that NaN is wrong
        first_wrong = wrong[0] if wrong else None
        verdict = Verdict(len(output_ids), first_wrong, int((below[:first_wrong] > 0).sum()))
        return verdict, self._gates.near_ties
