"""`nanocp make-checkpoint`: a seeded checkpoint of DeepSeek-V3's architecture to try things on.

Enters: options. Leaves: a folder that `nanocp serve`, `transformers` and others read. Does not know: how it is made.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Preset(StrEnum):
    """Shapes to choose from."""

    tiny = "tiny"
    small = "small"


class Dtype(StrEnum):
    """Of the weights in the file."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def make_checkpoint(
    path: Annotated[Path, typer.Argument(help="Folder to write; made if absent.")],
    preset: Annotated[Preset, typer.Option(help="tiny: 7 million parameters; small: about 160 million.")] = Preset.tiny,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.", min=0)] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights in the file.")] = Dtype.float32,
) -> None:
    """Write a seeded checkpoint with random weights and a byte-level tokenizer."""
    if (path / "config.json").exists():
        raise typer.BadParameter(f"{path} already holds a checkpoint; remove it or choose another folder")
    import torch
    from rich.console import Console

    from data_plane.model.make_checkpoint import make_checkpoint as write

    with Console(stderr=True).status(f"making {preset.value} in {path}"):
        num_parameters = write(path, preset.value, seed, getattr(torch, dtype.value))
    typer.echo(f"{path}: preset {preset.value}, seed {seed}, {num_parameters / 1e6:.1f} million parameters")
