"""Checkpoints of random weights get an MTP layer, some of whose drafts are right."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_SCALE = 50
"""Factor of the embedding with which a quarter to half of the drafts are right."""


def add_mtp_layer(path: Path) -> None:
    """Add an MTP layer: the last decoder layer, over the next token's embedding alone.

    The model's embedding becomes much larger: then a token depends on the one before it more than
    on all others, and so does a draft.
    """
    config = json.loads((path / "config.json").read_text())
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= _SCALE
    prefix, mtp = f"model.layers.{last}.", f"model.layers.{last + 1}."
    for name in [name for name in tensors if name.startswith(prefix)]:
        tensors[mtp + name.removeprefix(prefix)] = tensors[name].clone()
    norm = tensors["model.norm.weight"]
    eye = torch.eye(hidden, dtype=norm.dtype)
    tensors[mtp + "eh_proj.weight"] = torch.cat((eye, 0 * eye), dim=1)
    tensors[mtp + "enorm.weight"] = torch.ones_like(norm)
    tensors[mtp + "hnorm.weight"] = torch.ones_like(norm)
    tensors[mtp + "shared_head.norm.weight"] = norm.clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
