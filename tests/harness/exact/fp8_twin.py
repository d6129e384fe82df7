"""The fp32 twin of an FP8 checkpoint, for `transformers`, which reads no FP8 on a CPU."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn


def dequantised(values, scale, block=(128, 128)):
    """Multiply each element with the scale of the block that it is in."""
    row = torch.arange(values.shape[0]) // block[0]
    column = torch.arange(values.shape[1]) // block[1]
    return values.float() * scale.float()[row][:, column]


def make_twin(checkpoint, path):
    """Write the checkpoint to `path` in fp32."""
    shutil.copytree(checkpoint, path)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    stored = load_file(path / "model.safetensors")
    plain = {
        name: dequantised(tensor, stored[name + "_scale_inv"])
        if tensor.dtype == FP8
        else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    save_file(plain, path / "model.safetensors", metadata={"format": "pt"})
    return path
