"""A stand-in for what vLLM's tests of tool parsers import, over this project's parsers.

Enters: `-p harness.vllm.vllm_tool_parsers` on the command line of a pytest that runs vLLM's files.
Leaves: modules named vllm.* in sys.modules. Does not know: what the tests expect.

Tokenizers are not fetched: one stands for all, with markers and words as its tokens.
"""

import re
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from control_plane.frontend.http.protocol import ChatRequest
from control_plane.frontend.http.tools.answer_parser import AnswerParser, AnswerPart, CallContext
from control_plane.frontend.http.tools.call_forms import CALL_FORMS
from control_plane.frontend.http.tools.chat_tools import ToolUse, read_tools

MESSAGES = [{"role": "user", "content": "x"}]


class Tokenizer:
    """Each marker, word and other character is a token."""

    pieces = re.compile(r"<[｜|]?[/\w▁]+[｜|]?>|\w+|.", re.DOTALL)

    def __init__(self) -> None:
        self.vocab: dict[str, int] = {}

    def tokenize(self, text: str) -> list[str]:
        return self.pieces.findall(text)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [self.vocab.setdefault(one, len(self.vocab)) for one in self.tokenize(text)]

    def decode(self, ids: list[int], **options: Any) -> str:
        names = list(self.vocab)
        return "".join(names[one] for one in ids)

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def detokenize_incrementally(
    tokenizer: Tokenizer, all_input_ids: list[int], **options: Any
) -> tuple[list[str], str, int, int]:
    text = tokenizer.decode(all_input_ids[-1:])
    return [text], text, 0, 0


@dataclass
class FunctionCall:
    name: str
    arguments: str


@dataclass
class ToolCall:
    function: FunctionCall
    id: str = ""
    type: str = "function"


@dataclass
class DeltaToolCall:
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


@dataclass
class DeltaMessage:
    content: str | None = None
    tool_calls: list[DeltaToolCall] = field(default_factory=list)
    role: str | None = None


@dataclass
class ExtractedToolCallInformation:
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None


@dataclass
class FunctionDefinition:
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@dataclass
class ChatCompletionToolsParam:
    function: Any
    type: str = "function"

    def __post_init__(self) -> None:
        if isinstance(self.function, dict):
            self.function = FunctionDefinition(**self.function)


@dataclass
class ChatCompletionNamedFunction:
    name: str


@dataclass
class ChatCompletionNamedToolChoiceParam:
    function: ChatCompletionNamedFunction
    type: str = "function"


@dataclass
class ChatCompletionRequest:
    messages: list[Any] = field(default_factory=list)
    model: str = ""
    seed: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    include_reasoning: bool = True
    skip_special_tokens: bool = True
    structured_outputs: Any = None


@dataclass
class StructuredOutputs:
    structural_tag: str


@dataclass
class StructuralTag:
    text: str


@dataclass
class ResponsesRequest:
    """A request of OpenAI's Responses API, which this project does not have."""

    tools: list[Any] = field(default_factory=list)
    model_validate = staticmethod(lambda body: ResponsesRequest())


def _tool(one: Any) -> dict[str, Any]:
    """A tool of the API, of whichever class it is."""
    if isinstance(one, dict):
        return one
    function = getattr(one, "function", one)
    words = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {word: getattr(function, word) for word in words}}


class ToolParser:
    """A parser of vLLM's interface over one form of calls."""

    form = ""

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        self.model_tokenizer = tokenizer
        self.vocab = tokenizer.get_vocab()
        self.tools = [_tool(one) for one in tools or ()]
        self._stream = self._new_parser()
        self._num_calls = 0

    def _new_parser(self) -> AnswerParser:
        functions = [one["function"] for one in self.tools]
        schemas = {one["name"]: one.get("parameters") or {} for one in functions}
        return AnswerParser(CallContext(CALL_FORMS[self.form], schemas))

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        parser = self._new_parser()
        content, calls = _taken(parser.feed(model_output) + parser.finish())
        return ExtractedToolCallInformation(bool(calls), calls, content or None)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *ids: Any, **fields: Any
    ) -> DeltaMessage | None:
        content, calls = _taken(self._stream.feed(delta_text))
        deltas = []
        for call in calls:
            deltas.append(DeltaToolCall(self._num_calls, call.id, call.type, call.function))
            self._num_calls += 1
        return DeltaMessage(content or None, deltas) if content or calls else None

    def _use(self, request: Any) -> ToolUse:
        tools = [_tool(one) for one in request.tools or ()] or None
        choice = request.tool_choice if tools else None
        if isinstance(choice, ChatCompletionNamedToolChoiceParam):
            choice = {"type": "function", "function": {"name": choice.function.name}}
        asked = ChatRequest(messages=MESSAGES, tools=tools, tool_choice=choice)
        return read_tools(asked, self.form, has_format=False)

    def adjust_request(self, request: Any) -> Any:
        use = self._use(request)
        if use.new_parser(None) is not None:
            request.skip_special_tokens = False
        if tag := use.constraint(is_free=True).get("structural_tag"):
            request.structured_outputs = StructuredOutputs(tag)
        return request

    def get_structural_tag(self, request: Any) -> StructuralTag | None:
        tag = self._use(request).constraint(is_free=True).get("structural_tag")
        return StructuralTag(tag) if tag else None


def _taken(parts: list[AnswerPart]) -> tuple[str, list[ToolCall]]:
    calls = [
        ToolCall(FunctionCall(one.call.name, one.call.arguments), one.call.id)
        for one in parts
        if one.call
    ]
    return "".join(part.text for part in parts), calls


def _parser_class(name: str, form: str, base: type[ToolParser] = ToolParser) -> type[ToolParser]:
    return type(name, (base,), {"form": form})


HERMES = _parser_class("Hermes2ProToolParser", "hermes")
GLM = _parser_class("Glm47MoeModelToolParser", "glm47")
PARSERS = {
    "hermes": HERMES,
    # IBM's models write as hermes does.
    "granite4": _parser_class("Granite4ToolParser", "hermes", HERMES),
    "deepseek_v3": _parser_class("DeepSeekV3ToolParser", "deepseek_v3"),
    "deepseek_v31": _parser_class("DeepSeekV31ToolParser", "deepseek_v31"),
    "kimi_k2": _parser_class("KimiK2ToolParser", "kimi_k2"),
    "glm45": GLM if CALL_FORMS["glm45"] is CALL_FORMS["glm47"] else None,
    "glm47": GLM,
    "qwen3_coder": _parser_class("Qwen3EngineToolParser", "qwen3_coder"),
}
"""By vLLM's names of parsers."""
FILES = {"granite4": "granite4", "hermes": "hermes", "deepseek_v3": "deepseekv3",
         "deepseek_v31": "deepseekv31", "kimi_k2": "kimi_k2", "glm47": "glm47_moe",
         "qwen3_coder": "qwen3_engine"}  # fmt: skip


class ToolParserManager:
    get_tool_parser = staticmethod(PARSERS.__getitem__)


class DelegatingParser:
    tool_parser_cls: type[ToolParser]

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        self._parser = self.tool_parser_cls(tokenizer, tools)

    def adjust_request(self, request: Any) -> Any:
        return self._parser.adjust_request(request)


def _say(name: str, **content: Any) -> None:
    """Make a module, and the packages that it is in."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = sys.modules.setdefault(
            ".".join(parts[:depth]), ModuleType(".".join(parts[:depth]))
        )
        module.__path__ = []
    vars(module).update(content)


def _install() -> None:
    protocol = [ChatCompletionRequest, ChatCompletionToolsParam, FunctionDefinition,
                ChatCompletionNamedFunction, ChatCompletionNamedToolChoiceParam]  # fmt: skip
    base = [ToolCall, FunctionCall, DeltaMessage, DeltaToolCall, ExtractedToolCallInformation]
    _say(
        "vllm.entrypoints.openai.chat_completion.protocol",
        **{one.__name__: one for one in protocol},
    )
    _say(
        "vllm.entrypoints.generate.base.protocol",
        DeltaFunctionCall=FunctionCall,
        **{one.__name__: one for one in base},
    )
    _say("vllm.entrypoints.openai.responses.protocol", ResponsesRequest=ResponsesRequest)
    _say("vllm.entrypoints.openai.responses.utils", build_response_output_items=None)
    _say("vllm.parser.abstract_parser", DelegatingParser=DelegatingParser)
    _say(
        "vllm.tokenizers", TokenizerLike=Tokenizer, get_tokenizer=lambda *a, **options: Tokenizer()
    )
    _say("vllm.tokenizers.detokenizer_utils", detokenize_incrementally=detokenize_incrementally)
    _say("vllm.tool_parsers", ToolParser=ToolParser, ToolParserManager=ToolParserManager)
    _say("vllm.tool_parsers.abstract_tool_parser", ToolParser=ToolParser)
    for name, file in FILES.items():
        one = PARSERS[name]
        _say(f"vllm.tool_parsers.{file}_tool_parser", **{one.__name__: one})
    _say("xgrammar", StructuralTag=StructuralTag)


_install()
