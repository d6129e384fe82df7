"""Bodies of OpenAI's Responses API: those that the service reads, and those that it writes.

Unknown fields are ignored; those without which an answer would be wrong are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from control_plane.frontend.http.protocol import MAX_MESSAGES
from nanocp.values.sampling_fields import CONTROLS

Item = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

REFUSED = {
    "prompt": "send its text as `instructions` or `input`",
    "conversation": "send all items as `input`, or the last answer's id as previous_response_id",
    "context_management": "leave it out, and send a shorter input",
    "max_tool_calls": "leave it out: the client runs the tools",
    "moderation": "leave it out",
    "image": "leave it out",
    "top_logprobs": "leave it out: /v1/chat/completions has log probabilities",
}
"""Fields without which an answer would be wrong, with what to do instead."""
CHAT_FIELDS = (
    *CONTROLS, "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "logit_bias", "bad_words", "structured_outputs", "chat_template_kwargs",
    "parallel_tool_calls", "cache_salt", "priority", "queue_timeout_ms",
)  # fmt: skip
"""Fields that mean the same in chats; most are this service's own."""
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
"""Values of include that change the answer."""


def is_writable(value: Any) -> bool:
    """Return whether an answer can have the value: it is Unicode, and not nested too deeply."""
    try:
        # Answers have it some levels below their top.
        to_json([[[[[[value]]]]]])
    except ValueError:
        return False
    return True


class TextFormat(BaseModel):
    """The form of the text: free, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextConfig(BaseModel):
    """The form of the text."""

    format: TextFormat | None = None


class ReasoningConfig(BaseModel):
    """The effort for a template that reads it, and the form of reasoning in the answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Given: the whole reasoning is the summary, and has no other content."""


class ResponsesRequest(BaseModel):
    """POST /v1/responses, and /v1/responses/input_tokens."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)] | None = None
    """A text of the user, or items in order."""
    instructions: str | None = None
    """A system message before all items."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    """none, auto, required, a tool with its type and name, or allowed_tools."""
    parallel_tool_calls: bool | None = None
    """false: at most one call is kept."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of the answer; more than what is left means what is left."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = None
    """Comes back in the answer."""
    user: str | None = None
    """Tenant, in a service without API keys."""
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    """false: the response is not kept."""
    previous_response_id: str | None = None
    """A response that is kept: its items stand before the input."""
    background: bool | None = None
    """true: the response comes at once, queued, and is computed while nobody waits."""


class ResponsesAnswer(BaseModel):
    """The answer to POST /v1/responses; it has fields of the request too."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    """Seconds since the epoch."""
    status: Status
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[Item]
    """Items of reasoning, messages and calls, in order."""
    usage: dict[str, Any] | None
    previous_response_id: str | None
    background: bool
    store: bool


class InputTokenCount(BaseModel):
    """The answer to POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
