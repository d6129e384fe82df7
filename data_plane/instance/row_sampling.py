"""From logits to the tokens of rows, with log probabilities and masks of structured output."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from torch import Tensor

from data_plane.instance.grammar import GrammarMasks, MaskedRow
from data_plane.instance.rows import Row
from data_plane.instance.sampler import (
    Draw,
    RowMasks,
    gumbel_max,
    inverse,
    sample_rows,
    token_logprobs,
)
from nanocp.values.sampling import TokenLogprobs


def begin_masks(masks: GrammarMasks | None, rows: Sequence[Row]) -> Future[Tensor] | None:
    """Start the masks of the rows with a grammar, beside the step; None if there is none."""
    if masks is None:
        return None
    wanted = [_masked_row(row) for row in rows if row.params.constraint]
    return masks.begin(wanted) if wanted else None


def sample(
    rows: Sequence[Row], logits_BV: Tensor, allowed_MV: Tensor | None, draw: Draw = inverse
) -> list[tuple[int, TokenLogprobs | None]]:
    """Return each row's next token, and its log probabilities if wanted.

    logits_BV: [rows, vocabulary] fp32. allowed_MV: of `begin_masks`. draw: as of `sample_rows`.
    """
    masks = None
    if allowed_MV is not None:
        constrained = [i for i, row in enumerate(rows) if row.params.constraint]
        for index, allowed_V in zip(constrained, allowed_MV, strict=True):
            if not allowed_V.any():
                rows[index].is_broken_off = True
                allowed_V[list(rows[index].stop_token_ids)] = True
        masks = RowMasks(constrained, allowed_MV)
    token_ids = sample_rows(
        logits_BV,
        [row.params for row in rows],
        [row.output_ids for row in rows],
        [row.prompt_ids for row in rows],
        masks,
        draw,
    )
    sampled: list[tuple[int, TokenLogprobs | None]] = []
    for row, token_id, logits_V in zip(rows, token_ids, logits_BV, strict=True):
        num_top = row.params.logprobs
        logprobs = None
        if num_top is not None:
            (logprobs,) = token_logprobs(logits_V[None].cpu(), [token_id], num_top)
        sampled.append((token_id, logprobs))
    return sampled


def sample_drafts(
    rows: Sequence[Row], logits_BV: Tensor, masks: GrammarMasks | None, draw: Draw
) -> list[int | None]:
    """Return each row's next draft as the sampler would draw it; None: its grammar breaks off.

    Gumbel-max sampling uses the same clocks; other rows take the most likely token.
    """
    constrained = [index for index, row in enumerate(rows) if row.params.constraint]
    allowed, broken = None, set[int]()
    if masks is not None and constrained:
        allowed_MV = masks.masks([_masked_row(rows[i], rows[i].drafts) for i in constrained])
        has_any = allowed_MV.any(dim=1)
        broken = {constrained[place] for place in (~has_any).nonzero().flatten().tolist()}
        allowed_MV[~has_any] = True
        allowed = RowMasks(constrained, allowed_MV)
    token_ids = sample_rows(
        logits_BV,
        [
            replace(row.params, temperature=0.0)
            if row.params.temperature and draw is not gumbel_max
            else row.params
            for row in rows
        ],
        # An output may be long: it is copied only where drafts follow it.
        [[*row.output_ids, *row.drafts] if row.drafts else row.output_ids for row in rows],
        [row.prompt_ids for row in rows],
        allowed,
        draw,
    )
    return [None if index in broken else token_id for index, token_id in enumerate(token_ids)]


def _masked_row(row: Row, drafts: Sequence[int] = ()) -> MaskedRow:
    return MaskedRow(row.request_id, row.attempt, row.params.constraint, row.output_ids, drafts)
