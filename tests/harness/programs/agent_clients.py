"""Talks to a service with client libraries of Anthropic's API and of OpenAI's Responses.

python agent_clients.py CLIENT URL MODEL
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Found = dict[str, Any]


class City(BaseModel):
    """A city of few: some clients drop bounds of lengths from a schema."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Rome", "Ulm"]
    people: Literal[1, 2]


ASK = "Tell me of a city."
TOO_LONG = "a long tale " * 4000
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Ulm"]}},
          "required": ["city"], "additionalProperties": False}  # fmt: skip
MESSAGE = [{"role": "user", "content": ASK}]


def weather(city: Literal["Rome", "Ulm"]) -> str:
    """Tell the weather of a city."""
    return f"It rains in {city}."


def of_anthropic(url: str, model: str) -> Found:
    """Text, a class, tools whole and streamed, the tool runner, counts, models, errors."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="EMPTY", max_retries=0)
    options: Any = {"model": model, "max_tokens": 200, "messages": MESSAGE}
    found: Found = {}
    with client.messages.stream(**options | {"max_tokens": 8}) as stream:
        found["text"] = "".join(stream.text_stream)
        found["text, final"] = stream.get_final_text()
        found["reason"] = stream.get_final_message().stop_reason
    city = client.messages.parse(output_format=City, **options).parsed_output
    found["schema"] = city.model_dump()
    choice = {"type": "any", "disable_parallel_tool_use": True}
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    forced = options | {"tools": tools, "tool_choice": choice}
    (call,) = client.messages.create(**forced).content
    found["tool"] = [call.name, call.input]
    with client.messages.stream(**forced) as stream:
        (call,) = stream.get_final_message().content
    found["tool, streamed"] = [call.name, call.input]
    runner = client.beta.messages.tool_runner(
        **options | {"tools": [anthropic.beta_tool(weather)]}, tool_choice=choice, max_iterations=2
    )
    sent = [message.usage.input_tokens + message.usage.cache_read_input_tokens
            for message in runner]  # fmt: skip
    # The second request has the first one's messages too.
    found["runner"] = len(sent) == 2 and sent[1] > sent[0]
    found["count"] = client.messages.count_tokens(model=model, messages=MESSAGE).input_tokens
    found["models"] = [one.id for one in client.models.list()]
    try:
        client.messages.create(**options | {"messages": [{"role": "user", "content": TOO_LONG}]})
    except anthropic.BadRequestError as error:
        found["too long"] = error.body["error"]["message"]
    return found


def of_litellm(url: str, model: str) -> Found:
    """The Messages API by its own client for it."""
    import litellm

    options: Any = {"model": f"anthropic/{model}", "api_base": url, "api_key": "EMPTY",
                    "max_tokens": 100, "messages": MESSAGE}  # fmt: skip
    found: Found = {}
    chunks = list(litellm.completion(stream=True, **options | {"max_tokens": 8}))
    found["text"] = litellm.stream_chunk_builder(chunks).choices[0].message.content
    function = {"name": "weather", "parameters": SCHEMA}
    forced = {"tools": [{"type": "function", "function": function}], "tool_choice": "required",
              "parallel_tool_calls": False}  # fmt: skip
    for name, is_stream in (("tool", False), ("tool, streamed", True)):
        answer: Any = litellm.completion(stream=is_stream, **forced, **options)
        if is_stream:
            answer = litellm.stream_chunk_builder(list(answer))
        called = answer.choices[0].message.tool_calls[0].function
        found[name] = [called.name, json.loads(called.arguments)]
    return found


def of_langchain(url: str, model: str) -> Found:
    """Text, a class and tools by LangChain's client of the Messages API."""
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(model=model, base_url=url, api_key="EMPTY", max_tokens=200, max_retries=0)
    return _by_langchain(chat, chat.bind(max_tokens=8), ("json_schema", "function_calling"))


def _by_langchain(chat: Any, brief: Any, methods: tuple[str, ...]) -> Found:
    found: Found = {}
    found["text"] = "".join(chunk.text for chunk in brief.stream(ASK))
    for method in methods:
        city = chat.with_structured_output(City, method=method).invoke(ASK)
        found[f"schema, {method}"] = city.model_dump()
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    bound = chat.bind_tools(tools, tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(ASK).tool_calls
    found["tool"] = [call["name"], call["args"]]
    whole = None
    for chunk in bound.stream(ASK):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    found["tool, streamed"] = [call["name"], call["args"]]
    return found


def of_pydantic_ai(url: str, model: str) -> Found:
    """An agent whose output is a class, whole and streamed."""
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    def new_model() -> Any:
        # Each event loop needs a client of its own.
        client = AsyncAnthropic(base_url=url, api_key="EMPTY", max_retries=0)
        return AnthropicModel(model, provider=AnthropicProvider(anthropic_client=client))

    # It knows which of Anthropic's models take a schema.
    return _by_pydantic_ai(new_model, ["tool"])


def _by_pydantic_ai(new_model: Callable[[], Any], ways: list[str]) -> Found:
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    async def streamed(agent: Any) -> Any:
        async with agent.run_stream(ASK) as stream:
            return (await stream.get_output()).model_dump()

    found: Found = {}
    outputs: dict[str, Any] = {"tool": ToolOutput(City), "schema": NativeOutput(City)}
    for name in ways:
        output = outputs[name]
        agents = [Agent(new_model(), output_type=output, model_settings={"max_tokens": 400})
                  for _ in range(2)]  # fmt: skip
        found[f"class by {name}"] = agents[0].run_sync(ASK).output.model_dump()
        found[f"class by {name}, streamed"] = asyncio.run(streamed(agents[1]))
    return found


CLIENTS: dict[str, Callable[[str, str], Found]] = {
    "anthropic": of_anthropic, "litellm": of_litellm, "langchain": of_langchain,
    "pydantic-ai": of_pydantic_ai,
}  # fmt: skip


if __name__ == "__main__":
    client, url, model = sys.argv[1:]
    print(json.dumps(CLIENTS[client](url, model)))
