"""The oracle: one `transformers` forward over prompt and output says whether every greedy token is right.

Enters: a checkpoint, token ids. Leaves: verdicts. Does not know: anything of ours; that is its worth.
`transformers` is imported when an Oracle is made: only the demo and tests need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 1e-5
"""A token whose logit is this close to the highest is right too: fp32 sums differ in the last bits by their order."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the reference model says of one output."""

    num_tokens: int
    first_wrong: int | None
    """Index of the first token that is not the reference's; None if all are right."""
    near_ties: int
    """Right tokens that are not the argmax, but within NEAR_TIE of it."""

    @property
    def exact(self) -> bool:
        """Every token is right, and there is one."""
        return self.first_wrong is None and self.num_tokens > 0


class Oracle:
    """The reference model, loaded once, in fp32."""

    def __init__(self, checkpoint: str | Path) -> None:
        """Raises what `transformers` raises if it cannot read the checkpoint."""
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(checkpoint), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        self._model = model.eval()

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
        """[output, vocabulary]: row i is what token i of the output was chosen from."""
        ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        logits: torch.Tensor = self._model(ids, logits_to_keep=len(output_ids), use_cache=False).logits[0]
        return logits

    def judge(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Verdict:
        """Judge a greedy output. prompt_ids: at least one.

        After a wrong token the rest is not judged, and its near-ties are not counted: it continues another text.
        """
        if not output_ids:
            return Verdict(0, None, 0)
        logits = self.logits(prompt_ids, output_ids)
        chosen = logits.gather(1, torch.tensor(output_ids)[:, None]).squeeze(1)
        below = logits.max(dim=-1).values - chosen
        wrong = (~(below <= NEAR_TIE)).nonzero().flatten().tolist()  # so that NaN is wrong
        first_wrong = wrong[0] if wrong else None
        return Verdict(len(output_ids), first_wrong, int((below[:first_wrong] > 0).sum()))
