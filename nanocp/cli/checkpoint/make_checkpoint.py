"""`nanocp make-checkpoint`: a small seeded checkpoint of a supported architecture.

Enters: options. Leaves: a folder that `nanocp serve`, `transformers` and others read; exit status 2
if it cannot be written. Does not know: how it is made.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer


class Preset(StrEnum):
    """Shapes to choose from."""

    tiny = "tiny"
    tiny_v2 = "tiny-v2"
    small = "small"
    tiny_qwen3_moe = "tiny-qwen3-moe"
    tiny_llama = "tiny-llama"
    tiny_qwen2 = "tiny-qwen2"
    tiny_qwen3 = "tiny-qwen3"
    tiny_glm4_moe = "tiny-glm4-moe"
    tiny_mixtral = "tiny-mixtral"
    tiny_qwen3_next = "tiny-qwen3-next"
    tiny_qwen3_5 = "tiny-qwen3.5"
    tiny_kimi_linear = "tiny-kimi-linear"
    tiny_ling = "tiny-ling"
    small_qwen3_moe = "small-qwen3-moe"
    small_llama = "small-llama"


class Dtype(StrEnum):
    """Types of the weights in the file."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float8_e4m3fn = "float8_e4m3fn"


def make_checkpoint(
    path: Annotated[Path, typer.Argument(help="Folder to write; made if absent.")],
    preset: Annotated[
        Preset,
        typer.Option(
            help="tiny: DeepSeek-V3 with 7 million parameters; tiny-v2: DeepSeek-V2-Lite's rules; "
            "small*: about 150 million, for benchmarks; tiny-qwen3-next, -qwen3.5, -kimi-linear, "
            "-ling: with linear attention layers; the others: K/V heads in small."
        ),
    ] = Preset.tiny,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.", min=0)] = 0,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Type of the weights; float8_e4m3fn has a scale per block, like DeepSeek-V3."
        ),
    ] = Dtype.float32,
) -> None:
    """Write a seeded checkpoint with random weights and a byte-level tokenizer."""
    if (path / "config.json").exists():
        _fail(f"{path} already holds a checkpoint; remove it or choose another folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"{path} cannot be a folder: {error.strerror}")
    import torch
    from rich.console import Console

    from data_plane.model.make_checkpoint import make_checkpoint as write

    try:
        with Console(stderr=True).status(f"making {preset.value} in {path}"):
            num_parameters = write(path, preset.value, seed, getattr(torch, dtype.value))
    except OSError as error:
        _fail(f"{path} cannot be written: {error.strerror}")
    typer.echo(
        f"{path}: preset {preset.value}, seed {seed}, {num_parameters / 1e6:.1f} million parameters"
    )


def _fail(sentence: str) -> NoReturn:
    print(f"nanocp make-checkpoint: {sentence}", file=sys.stderr)
    raise typer.Exit(2)
