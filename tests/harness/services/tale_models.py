"""models/tale with another tokenizer or chat template, made when a test needs it.

Enters: a name of MODELS. Leaves: a checkpoint folder, and a service of it. The weights are those of
models/tale, so answers are cheap and their sense is none; structured output forces a text.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.paths import ROOT
from harness.services.hash_service import CONFIG, forked_service
from harness.services.kit import started
from nanocp.config.cluster import ClusterConfig
from nanocp.serve.service import Service, open_checkpoint

TALE = ROOT / "models/tale"
TEMPLATES = ROOT / "tests/cases/templates"
Json = dict[str, Any]


@dataclass(frozen=True)
class TaleModel:
    """How a model differs from models/tale."""

    template: str = ""
    """A file of tests/cases/templates."""
    change_tokenizer: Callable[[Json], None] = lambda tokenizer: None
    """Changes what tokenizer.json says."""
    options: dict[str, str] = field(default_factory=dict)
    """Fields of ServiceConfig."""
    files: dict[str, Json] = field(default_factory=dict)
    """Files of JSON that are others than those of models/tale, whole."""


def _with_bos(tokenizer: Json) -> None:
    """Texts begin with <bos>, as with most real tokenizers."""
    begin = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 1}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, other],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [0], "tokens": ["<bos>"]}},
    }


def _with_likely_bytes(tokenizer: Json) -> None:
    """Exchange comma and full stop with two bytes of characters: pieces are often likely."""
    vocabulary = tokenizer["model"]["vocab"]
    for mark, piece in ((",", "ð"), (".", "Ł")):
        vocabulary[mark], vocabulary[piece] = vocabulary[piece], vocabulary[mark]


MODELS = {
    "tale": TaleModel(),
    "qwenish": TaleModel("hermes.jinja", _with_bos),
    "glmish": TaleModel("glm.jinja", _with_bos),
    "coderish": TaleModel("qwen3_coder.jinja", _with_bos),
    "kimiish": TaleModel("kimi_k2.jinja", _with_bos),
    "thinking": TaleModel("thinking.jinja", _with_bos),
    **{
        name: TaleModel(f"{name}.jinja", _with_bos)
        for name in ("late_kept", "late_refused", "late_lost", "late_hoisted")
    },
    "swapped": TaleModel("", _with_likely_bytes),
    "effort": TaleModel("effort.jinja"),
    "ends": TaleModel("bos.jinja", files={
        # The model's own ends are others than the tokenizer's, as in Kimi-K2's folder.
        "generation_config.json": {"eos_token_id": [300, 301], "max_new_tokens": 3,
                                   "presence_penalty": 1.5, "frequency_penalty": 0.5},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "special_tokens_map.json": {"bos_token": {"content": "<bos>", "lstrip": False,
                                                  "special": True},
                                    "eos_token": "<eos>"},
    }),
}  # fmt: skip
"""The models that a case can name."""


def make_folder(name: str, folder: Path) -> Path:
    """Make the checkpoint folder of a model of MODELS, below `folder`."""
    model, folder = MODELS[name], folder / name
    folder.mkdir()
    for path in TALE.glob("*.*"):
        (folder / path.name).symlink_to(path)
    tokenizer = json.loads((TALE / "tokenizer.json").read_text())
    model.change_tokenizer(tokenizer)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for file, content in model.files.items():
        (folder / file).unlink(missing_ok=True)
        (folder / file).write_text(json.dumps(content))
    if model.template:
        (folder / "chat_template.jinja").symlink_to(TEMPLATES / model.template)
    return folder


@contextmanager
def tale_service(name: str, folder: Path) -> Iterator[Service]:
    """One instance of the model `name` of MODELS; its folder is made below `folder`."""
    config = replace(
        CONFIG,
        cluster=ClusterConfig(num_instances=1, instances_per_node=1, max_model_len=4096),
        service=replace(CONFIG.service, **MODELS[name].options),
    )
    checkpoint = open_checkpoint(config, make_folder(name, folder))
    with started(forked_service(config, checkpoint)) as service:
        yield service
