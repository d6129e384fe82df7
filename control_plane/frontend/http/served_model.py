"""The model as the HTTP API serves it: name, chat template, default sampling."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from control_plane.frontend.http.tools.answer_parser import THINK
from control_plane.frontend.http.tools.chat_template import ChatTemplate, load_chat_template
from control_plane.frontend.http.tools.template_habits import habits_of
from control_plane.frontend.text.default_sampling import default_sampling


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under one name."""

    name: str
    root: str
    """The checkpoint."""
    chat_template: ChatTemplate | None = None
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """Defaults of sampling fields from generation_config.json; the others are OpenAI's."""
    call_form: str = ""
    """Form of tool calls, a name of call_forms.CALL_FORMS; empty: unknown."""
    has_reasoning: bool = False
    """True: reasoning is marked in the text, and separated from the content."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since the epoch."""


def open_model(
    checkpoint: Path, name: str, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> ServedModel:
    """Open a checkpoint's model. name: clients' name for it; empty: the checkpoint's path.

    The parsers: see ServiceConfig. Raises ValueError, naming the file, if one cannot be read.
    """
    template = load_chat_template(checkpoint)
    source = template.source if template else ""
    shown = habits_of(template).call_form if template else ""
    form = shown if tool_call_parser == "auto" else tool_call_parser
    return ServedModel(
        name or str(checkpoint),
        str(checkpoint),
        template,
        default_sampling(checkpoint),
        call_form="" if form == "none" else form,
        has_reasoning=reasoning_parser == "think"
        or (reasoning_parser == "auto" and THINK[1] in source),
    )
