"""A line of the log for each request that ends or is refused."""

from __future__ import annotations

import logging

from control_plane.observe.observer import EndedRequest
from nanocp.logs import fields
from nanocp.values.plan import FinishReason

logger = logging.getLogger("nanocp.requests")


def log_ended(reason: FinishReason, request: EndedRequest) -> None:
    """Log the end of a submitted request: one line for each choice."""
    is_fault = reason in (FinishReason.FAILED, FinishReason.FATAL)
    level = logging.WARNING if is_fault else logging.INFO
    logger.log(
        level,
        "request ended",
        extra=fields(
            id=request.client_id,
            number=request.request_id,
            endpoint=request.endpoint or None,
            tenant=request.tenant or None,
            reason=reason.value,
            tokens_in=request.prompt_len,
            tokens_out=request.generated_len,
            queue_s=_rounded(request.queue_s),
            prefill_s=_rounded(request.prefill_s),
            decode_s=_rounded(request.decode_s),
            total_s=_rounded(request.e2e_s),
            cp_degree=request.cp_degree,
            moe_binding=request.moe_binding,
            attempts=request.num_attempts if request.num_attempts > 1 else None,
            error=request.message or None,
        ),
    )


def log_refused(client_id: str, endpoint: str, reason: FinishReason, message: str) -> None:
    """Log a request refused before it was submitted."""
    shown = FinishReason.REFUSED if reason is FinishReason.FAILED else reason
    logger.info(
        "request refused",
        extra=fields(
            id=client_id or None, endpoint=endpoint or None, reason=shown.value, error=message
        ),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
