"""Names of single tokens, for log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.frontend.http.answers.response_bodies import PromptLogprob, PromptLogprobs
from control_plane.frontend.text.tokenizer import Tokenizer
from nanocp.values.sampling import TokenLogprobs

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write; as in vLLM."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of tokens. Without a tokenizer, or with `as_ids`, a token is called token_id:N."""

    tokenizer: Tokenizer | None
    as_ids: bool

    def name(self, token_id: int) -> str:
        """Return the token's text; a piece of a character is U+FFFD."""
        if self.tokenizer is None or self.as_ids:
            return f"token_id:{token_id}"
        return self.spelled(token_id).decode(errors="replace")

    def spelled(self, token_id: int) -> bytes:
        """Return the token's UTF-8; for a special token, that of its name."""
        if self.tokenizer is None:
            return b""
        return self.tokenizer.token_name(token_id)

    def by_name(self, logprobs: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return log probabilities by the tokens' names, in order.

        Tokens with a used name, such as pieces of characters, are spelled in bytes, as at OpenAI.
        """
        named: dict[str, float] = {}
        ids = set()
        for token_id, logprob in logprobs:
            if token_id in ids:
                continue
            ids.add(token_id)
            name = self.name(token_id)
            if name in named:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.spelled(token_id))
            named.setdefault(name, finite(logprob))
        return named

    def of_prompt(
        self,
        prompt_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        num_top: int | None = None,
    ) -> PromptLogprobs:
        """Return a prompt's log probabilities in vLLM's form: null for the first token.

        num_top: most likely tokens of each place; None: all.
        """
        named: PromptLogprobs = [None]
        for token_id, told in zip(prompt_ids[1:], logprobs, strict=True):
            of_token = {token_id: self._of_prompt(token_id, told.logprob, None)}
            for rank, (top_id, logprob) in enumerate(told.top[:num_top], 1):
                of_token[top_id] = self._of_prompt(top_id, logprob, rank)
            named.append(of_token)
        return named

    def _of_prompt(self, token_id: int, logprob: float, rank: int | None) -> PromptLogprob:
        return PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=self.name(token_id))


def finite(logprob: float) -> float:
    """Return the log probability as a number that JSON can write."""
    return max(logprob, _LEAST_LOGPROB)
