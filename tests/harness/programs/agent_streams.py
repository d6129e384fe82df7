"""Reads streams with a client's own accumulator: what each became, or the error it raised.

python agent_streams.py CLIENT URL MODEL NUM_STREAMS, one line of JSON for each.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

TOOLS: dict[str, Any] = {"name": "weather", "description": "The weather."}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def of_anthropic(url: str, model: str) -> Callable[[], Any]:
    """Parts of a message, by the stream helper of anthropic."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="EMPTY", max_retries=0)

    def ask() -> Any:
        with client.messages.stream(
            model=model,
            max_tokens=4000,
            messages=[{"role": "user", "content": "x"}],
            tools=[TOOLS | {"input_schema": SCHEMA}],
        ) as stream:
            return [
                [block.type, getattr(block, "input", None) or getattr(block, block.type, "")]
                for block in stream.get_final_message().content
            ]

    return ask


def of_openai(url: str, model: str) -> Callable[[], Any]:
    """Parts of a response, by the stream helper of openai."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0)

    def ask() -> Any:
        with client.responses.stream(
            model=model, input="x", tools=[TOOLS | {"type": "function", "parameters": SCHEMA}]
        ) as stream:
            return [_part(item) for item in stream.get_final_response().output]

    return ask


def _part(item: Any) -> list[Any]:
    if item.type == "message":
        return ["text", "".join(part.text for part in item.content)]
    if item.type == "reasoning":
        return ["thinking", "".join(part.text for part in item.content)]
    return ["tool_use", json.loads(item.arguments)]


def main() -> None:
    """Print a line for each stream: its parts, or the name and text of the error."""
    client, url, model, num_streams = sys.argv[1:]
    ask = {"anthropic": of_anthropic, "openai": of_openai}[client](url, model)
    for _ in range(int(num_streams)):
        try:
            found = {"parts": ask()}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
