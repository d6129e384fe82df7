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


def of_openai_responses(url: str, model: str) -> Found:
    """Text, a class, tools whole and streamed, a chain of two, counts, errors."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0)
    options: Any = {"model": model, "input": ASK, "max_output_tokens": 200}
    found: Found = {}
    with client.responses.stream(**options | {"max_output_tokens": 8}) as stream:
        found["text"] = "".join(
            one.delta for one in stream if one.type == "response.output_text.delta"
        )
    city = client.responses.parse(text_format=City, **options)
    found["schema"] = city.output_parsed.model_dump()
    with client.responses.stream(text_format=City, **options) as stream:
        found["schema, streamed"] = stream.get_final_response().output_parsed.model_dump()
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    forced = options | {
        "tools": tools, "tool_choice": "required", "parallel_tool_calls": False
    }  # fmt: skip
    first = client.responses.create(**forced)
    with client.responses.stream(**forced) as stream:
        last = stream.get_final_response()
    for name, answer in (("tool", first), ("tool, streamed", last)):
        (call,) = answer.output
        found[name] = [call.name, json.loads(call.arguments)]
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "Rain."}
    second = client.responses.create(**options | {"input": [output]}, previous_response_id=first.id)
    found["chain"] = second.usage.input_tokens > first.usage.input_tokens
    found["kept"] = client.responses.retrieve(second.id).output_text == second.output_text
    found["count"] = client.responses.input_tokens.count(model=model, input=ASK).input_tokens
    try:
        client.responses.create(**options | {"input": TOO_LONG})
    except openai.BadRequestError as error:
        found["too long"] = [error.code, error.param]
    return found


def of_litellm_responses(url: str, model: str) -> Found:
    """The Responses API by its own client for it."""
    import litellm

    options: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "EMPTY",
                    "input": ASK}  # fmt: skip
    found: Found = {}
    chunks = litellm.responses(stream=True, max_output_tokens=8, **options)
    found["text"] = "".join(getattr(one, "delta", "") for one in chunks)
    forced = {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
              "tool_choice": "required", "parallel_tool_calls": False}  # fmt: skip
    answer: Any = litellm.responses(**forced, **options)
    (call,) = answer.output
    found["tool"] = [call.name, json.loads(call.arguments)]
    return found


def of_langchain_responses(url: str, model: str) -> Found:
    """Text, a class and tools by LangChain's client of the Responses API."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="EMPTY", max_retries=0,
                      use_responses_api=True)  # fmt: skip
    methods = ("json_schema", "function_calling")
    return _by_langchain(chat, chat.bind(max_output_tokens=8), methods)


def of_pydantic_ai_responses(url: str, model: str) -> Found:
    """An agent whose output is a class, whole and streamed, by the Responses API."""
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def new_model() -> Any:
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="EMPTY")
        return OpenAIResponsesModel(model, provider=provider)

    return _by_pydantic_ai(new_model, ["tool", "schema"])


def of_openai_agents(url: str, model: str) -> Found:
    """Agents that answer a text and a class, and call a tool, whole and streamed."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    found: Found = {}
    called: list[str] = []

    @agents.function_tool
    def weather(city: Literal["Rome", "Ulm"]) -> str:
        """Tell the weather of a city."""
        called.append(city)
        return "It rains."

    def new_model() -> Any:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0)
        return agents.OpenAIResponsesModel(model, client)

    # It raises at an answer that max_tokens cuts.
    brief = agents.ModelSettings(extra_body={"structured_outputs": {"choice": ["A tale."]}})
    agent = agents.Agent("brief", model=new_model(), model_settings=brief)
    found["text"] = agents.Runner.run_sync(agent, ASK).final_output
    agent = agents.Agent("city", model=new_model(), output_type=City)
    found["class"] = agents.Runner.run_sync(agent, ASK).final_output.model_dump()

    async def streamed() -> Any:
        agent = agents.Agent("city", model=new_model(), output_type=City)
        result = agents.Runner.run_streamed(agent, ASK)
        async for _ in result.stream_events():
            pass
        return result.final_output.model_dump()

    found["class, streamed"] = asyncio.run(streamed())
    must = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)
    agent = agents.Agent("caller", model=new_model(), tools=[weather], model_settings=must,
                         tool_use_behavior="stop_on_first_tool")  # fmt: skip
    agents.Runner.run_sync(agent, ASK)
    found["tool"] = ["weather", {"city": called[0]}]
    return found


CLIENTS: dict[str, Callable[[str, str], Found]] = {
    "anthropic": of_anthropic, "litellm": of_litellm, "langchain": of_langchain,
    "pydantic-ai": of_pydantic_ai, "openai": of_openai_responses,
    "litellm-responses": of_litellm_responses, "langchain-responses": of_langchain_responses,
    "pydantic-ai-responses": of_pydantic_ai_responses, "openai-agents": of_openai_agents,
}  # fmt: skip


if __name__ == "__main__":
    client, url, model = sys.argv[1:]
    print(json.dumps(CLIENTS[client](url, model)))
