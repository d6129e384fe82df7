"""Talks to a service with a client library, as its users do, in the libraries' own Python.

python client_libraries.py LIBRARY URL MODEL
"""

import asyncio
import json
import sys

from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city, whose fields are short: nothing but a bound ends the text of a small model."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=9_999_999)


ASK = [{"role": "user", "content": "Tell me of a city."}]
TOO_LONG = [{"role": "user", "content": "a long tale " * 4000}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city.",
                 "parameters": {"type": "object",
                                "properties": {"city": {"type": "string", "maxLength": 12}},
                                "required": ["city"], "additionalProperties": False}},
}  # fmt: skip


def of_instructor(url: str, model: str) -> dict[str, object]:
    """A class by a named tool and by a schema, whole, streamed and as a list."""
    import instructor
    from openai import OpenAI

    found: dict[str, object] = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="EMPTY"), mode=mode)
        options = {"model": model, "messages": ASK, "max_retries": 0, "seed": 1}
        city = client.chat.completions.create(response_model=City, **options)
        found[mode.value] = city.model_dump()
        *_, last = client.chat.completions.create_partial(response_model=City, **options)
        found[f"{mode.value}, streamed"] = last.model_dump()
    return found


def of_pydantic_ai(url: str, model: str) -> dict[str, object]:
    """An agent whose output is a class, by tools and by a schema, whole and streamed."""
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="EMPTY"))
    found: dict[str, object] = {}
    for name, output in (("tool", ToolOutput(City)), ("schema", NativeOutput(City))):
        agent = Agent(chat, output_type=output, model_settings={"seed": 1})
        answer = agent.run_sync("Tell me of a city.")
        found[name] = answer.output.model_dump()
        found[f"{name}, tokens"] = answer.usage.output_tokens

        async def streamed(agent: Agent = agent) -> object:
            async with agent.run_stream("Tell me of a city.") as stream:
                return (await stream.get_output()).model_dump()

        found[f"{name}, streamed"] = asyncio.run(streamed())
    return found


def of_litellm(url: str, model: str) -> dict[str, object]:
    """A class, tools whole and streamed, and a prompt that is too long."""
    import litellm

    options = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "EMPTY", "seed": 1}
    found: dict[str, object] = {}
    answer = litellm.completion(messages=ASK, response_format=City, **options)
    found["schema"] = json.loads(answer.choices[0].message.content)
    found["tokens"] = answer.usage.completion_tokens
    forced = {"tools": [WEATHER], "tool_choice": "required"}
    answer = litellm.completion(messages=ASK, **forced, **options)
    (call, *_) = answer.choices[0].message.tool_calls
    found["tool"] = [call.function.name, json.loads(call.function.arguments)]
    chunks = list(litellm.completion(messages=ASK, stream=True, **forced, **options))
    whole = litellm.stream_chunk_builder(chunks, messages=ASK)
    (call, *_) = whole.choices[0].message.tool_calls
    found["tool, streamed"] = [call.function.name, json.loads(call.function.arguments)]
    try:
        litellm.completion(messages=TOO_LONG, **options)
    except litellm.ContextWindowExceededError as error:
        found["too long"] = str(error)
    return found


def of_langchain(url: str, model: str) -> dict[str, object]:
    """A class by either method, tools whole and streamed, and a prompt that is too long."""
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="EMPTY", seed=1, max_retries=0)
    found: dict[str, object] = {}
    for method in ("json_schema", "function_calling"):
        city = chat.with_structured_output(City, method=method).invoke("Tell me of a city.")
        found[method] = city.model_dump()
    bound = chat.bind_tools([WEATHER], tool_choice="any")
    (call, *_) = bound.invoke("Is it raining?").tool_calls
    found["tool"] = [call["name"], call["args"]]
    whole = None
    for chunk in bound.stream("Is it raining?"):
        whole = chunk if whole is None else whole + chunk
    (call, *_) = whole.tool_calls
    found["tool, streamed"] = [call["name"], call["args"]]
    text = "".join(chunk.content for chunk in chat.bind(max_tokens=8).stream("Once upon a time"))
    found["text"] = text
    try:
        chat.invoke(TOO_LONG[0]["content"])
    except ContextOverflowError as error:
        found["too long"] = str(error)
    return found


LIBRARIES = {
    "instructor": of_instructor, "pydantic-ai": of_pydantic_ai, "litellm": of_litellm,
    "langchain-openai": of_langchain,
}  # fmt: skip


if __name__ == "__main__":
    library, url, model = sys.argv[1:]
    print(json.dumps(LIBRARIES[library](url, model)))
