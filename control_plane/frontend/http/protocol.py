"""Bodies that the HTTP API reads: OpenAI's fields and vLLM's.

Unknown fields are ignored, as in vLLM; those that would change the answer are refused by name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from control_plane.frontend.http.errors import ApiError
from nanocp.values.sampling_fields import BOUNDS

MAX_PROMPTS = 1024
"""Most prompts of one completion request."""
MAX_MESSAGES = 8192
"""Most messages of one chat: reading them takes a quarter of a second and blocks all others."""
_CHAT_NAMES = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}
"""Fields of chats with the sampling parameter that each is."""
_LEAVE_OUT = "leave it out"
_NOTHING: tuple[Any, ...] = (None, "", [], ["text"])
"""Values of refused fields that ask for nothing, besides false; a text's modalities too."""
_INT32 = (1 << 31) - 1
_INT64 = (1 << 63) - 1

Int32 = Annotated[int, Field(ge=-_INT32 - 1, le=_INT32)]
TokenId = Annotated[int, Field(ge=0, le=_INT32)]

_PROMPT: JsonDict = {"prompt": "Once upon a time", "max_tokens": 16}
_CHAT: JsonDict = {
    "messages": [{"role": "user", "content": "Who are you?"}],
    "max_tokens": 16,
}
"""Bodies that work as they stand, in the form at /docs."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    """The served model's name; it may be absent."""


class StreamOptions(BaseModel):
    """Additions to the text of a stream."""

    include_usage: bool = False
    """Whether a last chunk, without choices, has the usage."""
    continuous_usage_stats: bool = False
    """Every chunk has the usage so far; needs include_usage."""


class JsonSchemaFormat(BaseModel):
    """OpenAI's schema with a name; `strict` and the description change nothing."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of the output: free text, any JSON object, JSON of a schema, or tags."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @property
    def tags(self) -> str:
        """The structural tags as JSON, for type structural_tag."""
        return json.dumps(self.model_extra)


class StructuredOutputs(BaseModel):
    """vLLM's constraints of the output: exactly one of the first six."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = True
    """JSON has no whitespace between its tokens. vLLM's default is false."""
    whitespace_pattern: str | None = None
    """A regular expression of the whitespace that JSON may have between its tokens."""


class ResumedChoiceBody(BaseModel):
    """The client's part of a choice that has not ended."""

    index: Annotated[int, Field(ge=0)] = 0
    output_ids: list[TokenId] = []
    """Token ids in order, as returned with `return_token_ids`."""


class ResumeBody(BaseModel):
    """The point at which a broken answer continues."""

    attempt: int = 1
    """Counts how often the client has resumed the request."""
    choices: list[ResumedChoiceBody]


class GenerationRequest(_Request):
    """Fields of completions and chats.

    Absent sampling fields take the checkpoint's defaults.
    """

    # Extra fields are kept, so that those which change the answer can be refused.
    model_config = ConfigDict(extra="allow")

    refused: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("logprob_token_ids", "allowed_token_ids", "repetition_detection", "vllm_xargs",
             "thinking_token_budget", "truncate_prompt_tokens", "use_beam_search", "watermarking",
             "return_token_offsets", "return_prompt_text", "return_weight_versions",
             "ec_transfer_params"),
            _LEAVE_OUT,
        ),
        # vLLM's names in earlier versions.
        **{
            f"guided_{kind}": f"give structured_outputs.{kind}"
            for kind in ("json", "regex", "choice", "grammar")
        },
    }  # fmt: skip
    """Fields that would change the answer and cannot be served, with alternatives."""
    harmless: ClassVar[frozenset[str]] = frozenset({
        # About OpenAI's own service.
        "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store",
        # About images, which are refused where they stand.
        "media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs",
        # About fields that are refused themselves.
        "early_stopping", "length_penalty", "truncation_side", "routed_experts_prompt_start",
        "guided_decoding_backend", "guided_whitespace_pattern",
        # Special tokens stand beside each other as they are, and chunks come as tokens do.
        "spaces_between_special_tokens", "session_id", "stream_interval",
    })  # fmt: skip
    """Fields of OpenAI's and vLLM's that are ignored: they do not change the answer."""

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
    """Most likely tokens, with log probabilities, for each prompt token; not in a stream."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: Int32 = 0
    user: str | None = None
    """Tenant, in a service without API keys."""
    cache_salt: str | None = None
    """Cached KV is shared with requests of an equal salt only; 1 to 128 characters."""
    kv_transfer_params: dict[str, Any] | None = None
    """Where a router had the prompt computed, as vLLM's NixlConnector says it."""
    request_id: str | None = None
    """The client's id; the header X-Request-Id wins over it."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_placement: bool = False
    """Each choice ends with its placement. Only this service has it."""
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    resume: ResumeBody | None = None
    """Continue an answer whose stream broke. The response has only the new part."""
    queue_timeout_ms: Int32 | None = None
    """Answer with 504 if the request waits longer than this to be placed."""

    structured_outputs: StructuredOutputs | None = None

    def check_supported(self) -> None:
        """Raise ApiError naming a field that cannot be served."""
        for name, value in (self.model_extra or {}).items():
            if name in self.refused and value not in _NOTHING and value is not False:
                raise ApiError(
                    f"{name} is not supported; {self.refused[name]}. It is {value!r:.60}", name
                )
        num_choices = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of > num_choices:
            raise ApiError(
                f"best_of is {self.best_of}; it must be at most n ({num_choices}): choices are not "
                "ranked",
                "best_of",
            )
        if self.resume is not None and not self.stream:
            raise ApiError("resume is given; it needs stream to be true", "resume")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                "prompt_logprobs is given; it needs stream to be false", "prompt_logprobs"
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options is given; it needs stream to be true", "stream_options")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"examples": [_PROMPT]})

    refused = GenerationRequest.refused | dict.fromkeys(("suffix", "prompt_embeds"), _LEAVE_OUT)

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    """A text, token ids, or several of either."""
    echo: bool | None = False
    """The text and log probabilities begin with the prompt's; with max_tokens 0 they end there."""
    logprobs: Int32 | None = None
    """Number of most likely tokens, with log probabilities, beside each token."""

    @property
    def is_prompt_only(self) -> bool:
        """Return whether no output is returned."""
        return bool(self.echo) and self.max_tokens == 0


class TextPart(BaseModel):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    """Text of a part of type refusal, in a message of the assistant."""


class Message(BaseModel):
    """One message of a chat. The model's template reads other fields."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None


class TemplateFields(_Request):
    """Fields that the model's chat template reads, besides its own variables."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    """Documents for the template; refused if it does not read them."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """For a template with it, enable_thinking or thinking; otherwise refused."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """For a template that reads it; refused with another one, unless it is medium."""
    add_generation_prompt: bool | None = None
    """Absent: true unless the final message is to be continued."""
    continue_final_message: bool = False
    chat_template: str | None = None
    """A client's template is refused: only the model's own renders."""
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(TemplateFields, GenerationRequest):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [_CHAT]})

    refused = GenerationRequest.refused | dict.fromkeys(
        ("functions", "function_call", "echo", "audio", "modalities", "moderation",
         "web_search_options"),
        _LEAVE_OUT,
    )  # fmt: skip

    max_completion_tokens: int | None = None
    """Wins over max_tokens. Without both, the answer may fill the model's length."""
    logprobs: bool | None = False
    top_logprobs: Int32 | None = None
    tool_choice: Any = None
    """none, auto, required, or one function. Absent: auto if there are tools."""
    parallel_tool_calls: bool | None = None
    """false: at most one call is kept."""
    include_reasoning: bool = True
    """Whether the response has the model's reasoning."""

    def check_supported(self) -> None:
        super().check_supported()
        check_template_fields(self.chat_template)
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs is given; it needs logprobs to be true", "top_logprobs")
        for name, parameter in _CHAT_NAMES.items():
            if (value := getattr(self, name)) is not None:
                try:
                    BOUNDS[parameter].check(name, value)
                except ValueError as error:
                    raise ApiError(str(error), name) from error


def check_template_fields(chat_template: str | None) -> None:
    """Raise ApiError for a client's own template, which is a program."""
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


class TokenizeChatRequest(TemplateFields):
    """POST /tokenize, of a chat."""

    add_special_tokens: bool = False
    return_token_strs: bool | None = False


class DetokenizeRequest(_Request):
    """POST /detokenize."""

    tokens: list[TokenId]
