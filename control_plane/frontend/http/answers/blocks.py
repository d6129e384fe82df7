"""Responses made of blocks: reasoning, text and calls in their order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from control_plane.frontend.http.answers.chat import ChatAnswer
from control_plane.frontend.http.answers.deltas import Delta, UsageCount
from control_plane.frontend.http.answers.response_bodies import Usage
from control_plane.frontend.http.answers.responses import Writer
from control_plane.frontend.http.answers.token_names import TokenNames
from control_plane.frontend.http.tools.answer_parser import AnswerParser, CallContext, PartKind
from control_plane.frontend.http.tools.call_readers import ToolCall
from control_plane.frontend.http.tools.forced_calls import Parser
from control_plane.frontend.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Block:
    """A part of an answer, whole when the next one begins."""

    number: int
    kind: PartKind
    call: ToolCall | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; for a call its arguments, as JSON."""
        return self.call.arguments if self.call else "".join(self.texts)


class StreamEvent(BaseModel):
    """An event of a stream; `type` is its name too."""

    model_config = ConfigDict(extra="allow")

    type: str

    @classmethod
    def of(cls, kind: str, **fields: Any) -> StreamEvent:
        """Return an event with these fields, which are not checked."""
        return cls.model_construct(type=kind, **fields)


class BlockWriter(Writer):
    """Makes a response of blocks; one for each call, which has one choice."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        new_parser: Callable[[], Parser] | None,
        has_many_calls: bool,
    ) -> None:
        """new_parser: makes the parser of the text; None: the text is the content.

        has_many_calls: False keeps the first call.
        """
        parser = new_parser() if new_parser else AnswerParser(CallContext())
        self._answer = ChatAnswer(parser, True, has_many_calls)
        self._usage_count = UsageCount(None, TokenNames(tokenizer, False).spelled)
        if parser.is_reasoning is not None:
            self._usage_count.begin_reasoning(0, parser, 0)
        self.blocks: list[Block] = []
        self.last: Delta | None = None
        """The latest delta."""

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return self._usage_count.total

    @property
    def num_calls(self) -> int:
        """The calls so far."""
        return self._answer.num_calls

    def chunks(self, delta: Delta) -> list[BaseModel]:
        is_first, open_block = self.last is None, self.blocks[-1] if self.blocks else None
        updates = [*self._updates(delta)]
        events = self.began() if is_first else []
        for block, text in updates:
            if block is not open_block:
                events += self.closed(open_block) if open_block else []
                events += self.opened(block)
                open_block = block
            events += self.grew(block, text)
        if delta.finish_reason and open_block:
            events += self.closed(open_block)
        return events

    def event(self, chunk: BaseModel) -> bytes:
        """Return an event behind its name, without which clients drop it."""
        name: str = getattr(chunk, "type", "error")
        return b"event: %b\n%b" % (name.encode(), super().event(chunk))

    def add(self, delta: Delta) -> None:
        for _ in self._updates(delta):
            pass

    def _updates(self, delta: Delta) -> Iterator[tuple[Block, str]]:
        """Take a delta; yield each block with the text that it gets."""
        self.last = delta
        self._answer.add(delta.text, delta.finish_reason)
        self._usage_count.add(delta)
        for part in self._answer.new_parts:
            if part.call or not self.blocks or self.blocks[-1].kind is not part.kind:
                self.blocks.append(Block(len(self.blocks), part.kind, part.call))
            block = self.blocks[-1]
            if part.call is None:
                block.texts.append(part.text)
            yield block, part.call.arguments if part.call else part.text

    @abstractmethod
    def began(self) -> list[BaseModel]:
        """Return the chunks before the first block."""

    @abstractmethod
    def opened(self, block: Block) -> list[BaseModel]:
        """Return the chunks that begin a block."""

    @abstractmethod
    def grew(self, block: Block, text: str) -> list[BaseModel]:
        """Return the chunks for new text of a block, or for the arguments of a call."""

    @abstractmethod
    def closed(self, block: Block) -> list[BaseModel]:
        """Return the chunks that end a block."""
