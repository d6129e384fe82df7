"""`nanocp make-checkpoint`: a small seeded checkpoint of a supported architecture."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_PRESETS = (
    *("tiny", "tiny-v2", "small", "tiny-qwen3-moe", "tiny-llama", "tiny-qwen2", "tiny-qwen3"),
    *("tiny-glm4-moe", "tiny-mixtral", "tiny-qwen3-next", "tiny-qwen3.5", "tiny-kimi-linear"),
    *("tiny-ling", "small-qwen3-moe", "small-llama"),
)
Preset = StrEnum("Preset", [(name, name) for name in _PRESETS])  # type: ignore[misc]
Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float8_e4m3fn"])
_TINY, _FLOAT32 = Preset("tiny"), Dtype("float32")


def make_checkpoint(
    path: Annotated[Path, typer.Argument(help="Folder to write; made if absent.")],
    preset: Annotated[
        Preset,
        typer.Option(
            help="tiny: DeepSeek-V3 with 7 million parameters; tiny-v2: DeepSeek-V2-Lite's rules; "
            "small*: about 150 million, for benchmarks; tiny-qwen3-next, -qwen3.5, -kimi-linear, "
            "-ling: with linear attention layers; the others: K/V heads in small."
        ),
    ] = _TINY,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Type of the weights; float8_e4m3fn has a scale per block, like DeepSeek-V3."
        ),
    ] = _FLOAT32,
) -> None:
    """Write a seeded checkpoint with random weights and a byte-level tokenizer."""
    if (path / "config.json").exists():
        raise ValueError(f"{path} already holds a checkpoint; remove it or choose another folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be a folder: {error.strerror}") from None
    import torch
    from rich.console import Console

    from data_plane.model.make_checkpoint import make_checkpoint as write

    try:
        with Console(stderr=True).status(f"making {preset.value} in {path}"):
            num_parameters = write(path, preset.value, dtype=getattr(torch, dtype.value))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"{path}: preset {preset.value}, {num_parameters / 1e6:.1f} million parameters")
