#!/usr/bin/env bash
# langchain-openai 1.7.4 with openai 3.57.0: a prompt that is too long is no ContextOverflowError.
# Guess: it is one for every error whose code is context_length_exceeded, the code of OpenAI's API.
# Seen: it searches the text of the exception for the code. With openai 2.54.0 that text has the
# whole body, and the class is right; with 3.57.0 it has the message alone, and the class is
# OpenAIInvalidRequestError, in chats and in Responses. Both versions are allowed by its metadata.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/ask.py" <<'PY'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

ERROR = {"message": "Your input has too many tokens for this model.", "param": "messages",
         "type": "invalid_request_error", "code": "context_length_exceeded"}


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"error": ERROR}).encode()
        self.send_response(400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Refusing)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
for uses_responses in (False, True):
    chat = ChatOpenAI(model="m", base_url=url, api_key="key", max_retries=0,
                      use_responses_api=uses_responses)
    try:
        chat.invoke("Hello")
    except openai.BadRequestError as error:
        is_overflow = isinstance(error, ContextOverflowError)
        print(f"openai {openai.__version__}, Responses {uses_responses}: {type(error).__name__}")
        assert error.code == ERROR["code"]
        assert is_overflow == (sys.argv[1] == "found"), "this has changed"
PY
for version in "2.54.0 found" "3.57.0 missed"; do
  set -- $version
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check langchain-openai==1.7.4 "openai==$1"
  "$folder/$1/bin/python" "$folder/ask.py" "$2"
done
