"""Bodies that the HTTP API reads and writes: OpenAI's fields, and vLLM's beside them.

Enters: JSON. Leaves: validated requests, and responses as they go out. Does not know: tokens,
streams, HTTP.

A field that is not named here is ignored, as in vLLM. One that is named here and cannot be served
is refused, because ignoring it would give a wrong answer.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.open_requests import ChoiceFinish

MAX_PROMPTS = 1024
"""Most prompts of one completion request."""
_INT32 = (1 << 31) - 1
_INT64 = (1 << 63) - 1

Int32 = Annotated[int, Field(ge=-_INT32 - 1, le=_INT32)]
TokenId = Annotated[int, Field(ge=0, le=_INT32)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    """The served model's name. Absent: that model."""


class StreamOptions(BaseModel):
    """What a stream has beside the text."""

    include_usage: bool = False
    """Whether a last chunk, without choices, has the usage."""
    continuous_usage_stats: bool = False
    """Whether every chunk has the usage so far."""


class ResponseFormat(BaseModel):
    """The form of the output: `text`, as it comes."""

    type: str


class GenerationRequest(_Request):
    """Fields that completions and chats have in common.

    Absent sampling fields take the checkpoint's own defaults.
    """

    unsupported: ClassVar[tuple[str, ...]] = (
        "structured_outputs", "logprob_token_ids", "allowed_token_ids", "repetition_detection",
        "thinking_token_budget", "truncate_prompt_tokens", "use_beam_search",
        "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    )  # fmt: skip

    n: int | None = 1
    best_of: int | None = None
    """Must be at most n: choices are not ranked."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    """-1 and 0: all tokens."""
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int32 | None = None
    """Number of most likely tokens, with their log probabilities, for each token of the prompt; not
    in a stream."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: Int32 = 0
    request_id: str | None = None
    """The client's id; the header X-Request-Id goes before it."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_placement: bool = False
    """Whether each choice ends with its placement. Only this service has it."""
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    queue_timeout_ms: Int32 | None = None
    """Answer with 504 if the request waits longer than this to be placed."""

    structured_outputs: Any = None
    logprob_token_ids: Any = None
    allowed_token_ids: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: bool | None = None
    guided_json: Any = None
    """vLLM's name for structured_outputs in earlier versions, as are the next three."""
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def check_supported(self) -> None:
        """Raise ApiError naming a field that cannot be served."""
        for name in self.unsupported:
            if getattr(self, name) not in (None, False):
                raise ApiError(f"{name} is not supported; leave it out", name)
        if self.response_format is not None and self.response_format.type != "text":
            raise ApiError(
                f"response_format is {self.response_format.type!r}; only 'text' is supported",
                "response_format",
            )
        if self.best_of is not None and self.best_of > (
            num_choices := 1 if self.n is None else self.n
        ):
            raise ApiError(
                f"best_of is {self.best_of}; it must be at most n ({num_choices}): choices are not "
                "ranked",
                "best_of",
            )
        if self.prompt_logprobs and self.stream:
            raise ApiError(
                "prompt_logprobs is given; it needs stream to be false", "prompt_logprobs"
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options is given; it needs stream to be true", "stream_options")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    unsupported = (*GenerationRequest.unsupported, "suffix", "prompt_embeds")

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    """A text, token ids, or several of either."""
    echo: bool | None = False
    """Whether the text begins with the prompt's, and log probabilities with those of the prompt.
    With max_tokens 0 there is nothing else."""
    logprobs: Int32 | None = None
    """Number of most likely tokens, with their log probabilities, beside each token."""
    suffix: Any = None
    prompt_embeds: Any = None

    @property
    def is_prompt_only(self) -> bool:
        """Whether nothing of the output is returned."""
        return bool(self.echo) and self.max_tokens == 0


class TextPart(BaseModel):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(BaseModel):
    """One message of a chat. The model's template decides what other fields mean."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    unsupported = (*GenerationRequest.unsupported, "functions", "function_call", "echo")

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    """Goes before max_tokens. Without both: as many as the model's length leaves."""
    logprobs: bool | None = False
    top_logprobs: Int32 | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools for the template only: they must come with tool_choice "none"."""
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    """Absent: unless the final message is to be continued."""
    continue_final_message: bool = False
    chat_template: str | None = None
    """A template of the client's, which is refused: only the model's own renders."""
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    echo: bool | None = None

    def check_supported(self) -> None:
        """See GenerationRequest."""
        super().check_supported()
        check_template_fields(self.chat_template)
        if self.tools and self.tool_choice != "none":
            raise ApiError(
                'tools are given; tool_choice must be "none": tool calls are not parsed',
                "tool_choice",
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs is given; it needs logprobs to be true", "top_logprobs")


def check_template_fields(chat_template: str | None) -> None:
    """Raise ApiError if a client brings its own template, which is a program."""
    if chat_template is not None:
        raise ApiError(
            "chat_template is given; only the model's own template renders messages",
            "chat_template",
        )


class TokenizeTextRequest(_Request):
    """POST /tokenize, of a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(_Request):
    """POST /tokenize, of a chat."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    """Absent: unless the final message is to be continued."""
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(_Request):
    """POST /detokenize."""

    tokens: list[TokenId]


class TokenizeResponse(BaseModel):
    """Token ids of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """The tokens as the vocabulary spells them."""


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
    """What is known of the prompt's tokens."""

    cached_tokens: int
    """Those whose KV was in the cluster: they were not computed again."""


class Usage(BaseModel):
    """Tokens of a call, all its choices together."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class KvShare(BaseModel):
    """What one instance holds of a choice's KV."""

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
        """The placement in this form."""
        shares = [KvShare(instance=instance, pages=pages) for instance, pages in finish.kv_split]
        return cls(cp_degree=finish.cp_degree, moe_binding=finish.moe_binding, kv_split=shares)


class PromptLogprob(BaseModel):
    """A token of a prompt, or one that was likely in its place."""

    logprob: float
    rank: int | None
    """1 for the most likely; null for one that is not among the most likely."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Log probabilities by token id, for each token of the prompt; null for the first, which has
none."""


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
    """The stop token's id or the stop string; null for max_tokens and for the model's end of
    sequence."""
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


class TopLogprob(BaseModel):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was sampled."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of a choice's tokens."""

    content: list[TokenLogprob]


class ChatMessage(BaseModel):
    """What the model says, or what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class _ChatChoice(BaseModel):
    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
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
    prompt_token_ids: list[int] | None = None
