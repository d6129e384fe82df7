"""The checkpoint's chat template, which `transformers` renders in a sandbox, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from nanocp.files.tokenizer import special_tokens

_RESERVED = {
    "conversations", "messages", "tools", "chat_template", "tokenize",
    "return_assistant_tokens_mask", "add_generation_prompt", "continue_final_message",
}  # fmt: skip
"""Variables that the template, or the function that renders it, gets from the service."""


class ChatTemplate:
    """One model's template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        # The import takes a second: now, and not while tokens stream.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        self.source = source
        self.variables = _variables(source) - _RESERVED
        """Variables that a client may set."""
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text. arguments: further variables of the template.

        Takes long: call it in a thread. Raises ValueError.
        """
        if reserved := _RESERVED.intersection(arguments or {}):
            raise ValueError(
                f"chat_template_kwargs has {min(reserved)}, which the service sets; leave it out"
            )
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "add_generation_prompt and continue_final_message are both true; one must be false"
            )
        try:
            rendered = self._render(
                [list(messages)],
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._special_tokens, **(arguments or {})},
            )
        except Exception as error:  # A template is a program: it can raise anything.
            raise ValueError(
                f"messages cannot be rendered by the model's chat template: {error}"
            ) from error
        text: str = rendered[0][0]
        # Arguments of a call can have escaped halves of characters, which no tokenizer reads.
        return text.encode(errors="replace").decode()


class _Generation(Extension):
    """The block that marks the model's own text in a template; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _variables(source: str) -> frozenset[str]:
    environment = Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
    except TemplateError:
        return frozenset()
    # Those that whoever renders defines.
    return frozenset(names) - {"raise_exception", "strftime_now", *environment.globals}


def load_chat_template(checkpoint: Path) -> ChatTemplate | None:
    """Load chat_template.jinja, else the template in tokenizer_config.json; None without one.

    Raises ValueError, naming the unreadable file.
    """
    path = checkpoint / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text()) if path.is_file() else {}
        file = checkpoint / "chat_template.jinja"
        source = file.read_text() if file.is_file() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise ValueError(f"the chat template of {checkpoint} cannot be read: {error}") from error
    if isinstance(source, list):
        # There are several, by name: clients get the default one.
        source = {one["name"]: one["template"] for one in source}.get("default")
    if not source:
        return None
    return ChatTemplate(source, special_tokens(checkpoint))
