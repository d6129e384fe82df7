"""Bodies that the HTTP API writes: OpenAI's fields and vLLM's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from control_plane.frontend.open_requests import ChoiceFinish


class TokenizeResponse(BaseModel):
    """Token ids of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """The vocabulary's spelling of the tokens."""


class DetokenizeResponse(BaseModel):
    """The text of the tokens, special tokens included."""

    prompt: str


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["nanocp"] = "nanocp"
    root: str
    """The checkpoint."""
    parent: None = None
    max_model_len: int
    """Most tokens of prompt and output together."""
    permission: list[dict[str, Any]] = []


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    """GET /version."""

    version: str


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Tokens whose KV was in the cluster: they were not computed again."""


class CompletionTokensDetails(BaseModel):
    """Details of the generated tokens."""

    reasoning_tokens: int
    """Tokens up to the end of the reasoning; they are part of completion_tokens."""


class Usage(BaseModel):
    """Tokens of a call, all its choices together."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    """Absent if the model has no reasoning."""


class SpeculativeDecoding(BaseModel):
    """The drafts of a call, all its choices together. The names are vLLM's."""

    mean_acceptance_length: float
    """Tokens of a step with drafts."""
    draft_acceptance_rate: float
    """Share of accepted drafts."""
    acceptance_histogram: list[int]
    """Steps with drafts, by the number of accepted ones."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """Most drafts of a step."""


class CallMetrics(BaseModel):
    """Further measurements of a call."""

    speculative_decoding: SpeculativeDecoding


class KvShare(BaseModel):
    """One instance's part of a choice's KV."""

    instance: int
    pages: int
    """Pages of 64 tokens."""


class ChoicePlacement(BaseModel):
    """The placement of a choice at its end."""

    cp_degree: int
    moe_binding: int
    kv_split: list[KvShare]

    @classmethod
    def of(cls, finish: ChoiceFinish) -> ChoicePlacement:
        shares = [KvShare(instance=instance, pages=pages) for instance, pages in finish.kv_split]
        return cls(cp_degree=finish.cp_degree, moe_binding=finish.moe_binding, kv_split=shares)


class PromptLogprob(BaseModel):
    """A token of a prompt, or one that was likely in its place."""

    logprob: float
    rank: int | None
    """1 for the most likely; null outside the most likely."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Log probabilities by token id for each token of the prompt; null for the first."""


class CompletionLogprobs(BaseModel):
    """Log probabilities of a choice's tokens, in parallel lists."""

    text_offset: list[int]
    """Characters of the text before each token."""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One output."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: int | str | None = None
    """The stop token's id or the stop string; null for other ends."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    placement: ChoicePlacement | None = None


class Completion(BaseModel):
    """A completion, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: CallMetrics | None = None


class TopLogprob(BaseModel):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A sampled token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of a choice's tokens."""

    content: list[TokenLogprob]


class FunctionCall(BaseModel):
    """The function of a call, or its new part."""

    name: str | None = None
    arguments: str
    """JSON."""


class MessageToolCall(BaseModel):
    """A call that the model makes; `index` is in streams only."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(BaseModel):
    """The model's message, or its new part."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class _ChatChoice(BaseModel):
    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    placement: ChoicePlacement | None = None


class ChatChoice(_ChatChoice):
    """One output."""

    message: ChatMessage


class ChatChunkChoice(_ChatChoice):
    """New output of one choice."""

    delta: ChatMessage


class ChatCompletion(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: CallMetrics | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletionChunk(BaseModel):
    """A chunk of a chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: CallMetrics | None = None
    prompt_token_ids: list[int] | None = None
