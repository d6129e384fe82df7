#!/usr/bin/env bash
# openai-agents 0.24.0: a response that max_output_tokens cuts raises, and its text is lost.
# Guess: an agent with max_tokens returns the text so far, as it does over chat completions.
# Seen: over chat completions finish_reason "length" gives the text as final_output. Over Responses
# the same cut, status "incomplete" in a whole answer of status 200, raises ModelBehaviorError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openai-agents==0.24.0 openai==3.57.0
"$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import agents
from openai import AsyncOpenAI

TEXT = "Once upon a"
CHAT = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "length",
                 "message": {"role": "assistant", "content": TEXT}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
}
PART = {"type": "output_text", "text": TEXT, "annotations": []}
RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "incomplete",
    "incomplete_details": {"reason": "max_output_tokens"}, "error": None, "instructions": None,
    "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto",
    "tools": [], "top_p": 1.0,
    "output": [{"type": "message", "id": "msg_1", "role": "assistant", "status": "incomplete",
                "content": [PART]}],
    "usage": {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 3,
              "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 6},
}


class Answering(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps(RESPONSE if self.path.endswith("/responses") else CHAT).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Answering)
threading.Thread(target=server.serve_forever, daemon=True).start()
agents.set_tracing_disabled(True)
seen = []
for model in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="key")
    settings = agents.ModelSettings(max_tokens=3)
    agent = agents.Agent("teller", model=model("m", client), model_settings=settings)
    try:
        seen.append(agents.Runner.run_sync(agent, "A tale.").final_output)
    except agents.ModelBehaviorError as error:
        seen.append(f"{type(error).__name__}: {error}")
    print(f"{model.__name__}: {seen[-1]}")
assert seen[0] == TEXT and seen[1].startswith("ModelBehaviorError"), "this has changed"
PY
