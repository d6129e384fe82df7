#!/usr/bin/env bash
# transformers 5.24.0: which layers of Kimi-Linear have full attention if the configuration names none.
# Guess: those of the published model, whose lists count from 1: 4, 8, 12, ... (every fourth layer).
# Seen: by index from 0, layers 4, 8, 12, ... which are the fifth, ninth, thirteenth. So a folder
# without the lists is another model than the published one, and nothing says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
import os

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoConfig

config = AutoConfig.for_model("kimi_linear", num_hidden_layers=13)
full = [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"]
print("full attention by index from 0:", full)
assert full == [4, 8, 12], "this has changed"
PY
