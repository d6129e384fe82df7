"""Bodies of Anthropic's Messages API: those that the service reads, and those that it writes.

Unknown fields are ignored; those without which an answer would be wrong are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from control_plane.frontend.http.protocol import MAX_MESSAGES, Int32

Blocks = list[dict[str, Any]]

REFUSED = {
    "container": "leave it out: no code runs here",
    "mcp_servers": "connect to the servers in the client, and send their tools as `tools`",
    "compaction": "leave it out: send a shorter history",
    "fallbacks": "leave it out: one model is served",
}
"""Fields without which an answer would be wrong, with what to do instead."""


class InputMessage(BaseModel):
    """One message; a system message stands where it counts."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ToolChoice(BaseModel):
    """Which tools the model calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False
    """True: at most one call is kept."""


class Thinking(BaseModel):
    """The switch of reasoning, for a template that has one."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    """Checked, and then ignored: reasoning has no length of its own."""
    display: str | None = None
    """omitted: thinking blocks have no text."""


class OutputFormat(BaseModel):
    """The schema that the text follows."""

    model_config = ConfigDict(protected_namespaces=())

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """The form of the output, and the effort for a template that reads it."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(BaseModel):
    """Whose request it is, in a service without keys."""

    user_id: str | None = None


class MessagesPrompt(BaseModel):
    """POST /v1/messages/count_tokens, and the part of a request that makes the prompt."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older name of output_config.format."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template. Only this service has it."""


class MessagesRequest(MessagesPrompt):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    """Most tokens of the answer; more than what is left means what is left."""
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    metadata: Metadata | None = None
    cache_salt: str | None = None
    """Prompts share their KV only with those of the same salt."""
    priority: Int32 = 0
    """Lower numbers go first. Only this service has it."""


class TextBlock(BaseModel):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(BaseModel):
    """Reasoning before the answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str
    """A constant: reasoning that comes back is taken as it is."""


class ToolUseBlock(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessagesUsage(BaseModel):
    """Tokens of a call."""

    input_tokens: int
    """Tokens of the prompt whose KV was computed."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    """Tokens of the prompt whose KV was in the cluster."""
    output_tokens: int


class MessagesAnswer(BaseModel):
    """The answer to POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(BaseModel):
    """The answer to POST /v1/messages/count_tokens."""

    input_tokens: int


class ModelInfo(BaseModel):
    """The served model, in Anthropic's form."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    """A time of RFC 3339."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(BaseModel):
    """GET /v1/models, in Anthropic's form."""

    data: list[ModelInfo]
    first_id: str
    last_id: str
    has_more: bool = False
