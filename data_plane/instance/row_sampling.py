"""From logits to the tokens of rows, with their log probabilities and masks of structured output.

Enters: rows, logits of the model. Leaves: a token for each row. Does not know: steps, passes, which
kind of member samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from torch import Tensor

from data_plane.instance.grammar import GrammarMasks, MaskedRow
from data_plane.instance.rows import Row
from data_plane.instance.sampler import RowMasks, sample_rows, token_logprobs
from nanocp.values.sampling import TokenLogprobs


def begin_masks(masks: GrammarMasks | None, rows: Sequence[Row]) -> Future[Tensor] | None:
    """Start the masks of the rows that have a grammar; None if none has one.

    They need the outputs so far only, so they are made while the rows' logits are computed.
    """
    if masks is None:
        return None
    wanted = [
        MaskedRow(row.request_id, row.attempt, row.params.constraint, row.output_ids)
        for row in rows
        if row.params.constraint
    ]
    return masks.begin(wanted) if wanted else None


def sample(
    rows: Sequence[Row], logits_BV: Tensor, allowed_MV: Tensor | None
) -> list[tuple[int, TokenLogprobs | None]]:
    """The next token of each row, and its log probabilities if the row wants them.

    logits_BV: [rows, vocabulary] fp32. allowed_MV: what `begin_masks` started; None if nothing.
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
    )
    sampled: list[tuple[int, TokenLogprobs | None]] = []
    for row, token_id, logits_V in zip(rows, token_ids, logits_BV, strict=True):
        num_top = row.params.logprobs
        logprobs = None
        if num_top is not None:
            (logprobs,) = token_logprobs(logits_V[None].cpu(), [token_id], num_top)
        sampled.append((token_id, logprobs))
    return sampled
