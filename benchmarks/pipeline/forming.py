"""Batch forming of other systems: the pipeline scheduler's rows under their rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from control_plane.scheduler.pipeline.pass_rows import PassRow, PassRows
from nanocp.config.choices import check_one_of
from nanocp.simulator.pipeline.simulation import MakeRows

PASS_FORMS = ("ours", "vllm", "gllm", "sarathi", "no_mixing")

SARATHI_TOKENS = 512
"""Token budget of a pass of Sarathi-Serve (OSDI'24, 5.1: 512 where the SLO is strict)."""
GLLM_PASSES, GLLM_LEAST_TOKENS = 8, 32
"""gLLM's throttling (arXiv 2504.14775): prompts are spread over 8 passes, 32 tokens or more."""


def making(form: str) -> MakeRows | None:
    """What PipelineTrial takes for a name of PASS_FORMS. Raises ValueError for another."""
    check_one_of(PASS_FORMS, passes=form)
    return None if form == PASS_FORMS[0] else partial(FormedRows, form)


class FormedRows(PassRows):
    """Rows in passes as another system forms them."""

    def __init__(
        self, form: str, num_stages: int, max_tokens: int, free_share: Callable[[], float]
    ) -> None:
        """free_share: share of free frames."""
        super().__init__(num_stages, SARATHI_TOKENS if form == "sarathi" else max_tokens)
        self._form = form
        self._free_share = free_share

    @property
    def num_share(self) -> int:
        """Rows of a pass that decode, at most."""
        if self._form == "gllm":
            return super().num_share
        if self._form == "no_mixing" and self.num_prompt_left:
            return 0
        return self._max_tokens

    def chunks(self, num_decoding: int) -> list[tuple[PassRow, int]]:
        """(row, tokens) of the prompts in the pass, first come, first served."""
        num_tokens = self._max_tokens - num_decoding
        if self._form == "gllm":
            share = -(-self.num_prompt_left // GLLM_PASSES)
            most = int(self._max_tokens * self._free_share())
            num_tokens = min(num_tokens, max(min(share, most), GLLM_LEAST_TOKENS))
        return self._taken(num_tokens)
