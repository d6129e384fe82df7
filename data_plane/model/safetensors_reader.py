"""Tensors of a checkpoint folder, one at a time: one safetensors file, or several with an index.

Enters: a folder, a tensor's name, the tensor to fill. Leaves: its values, converted. A shard is opened when a tensor of
it is asked for, and only that tensor's bytes are read: an instance pays for its own experts. Does not know: the model.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class SafetensorsReader:
    """The tensors of a checkpoint folder. Raises ValueError naming a file that is missing, truncated or malformed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._file_of = _read_index(folder)
        if self._file_of is None:
            self._file_of = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)

    def num_elements(self) -> int:
        """Elements of all tensors, by the headers."""
        assert self._file_of is not None
        return sum(math.prod(self._file(file).get_slice(name).get_shape()) for name, file in self._file_of.items())

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill `target` with the tensor, converted to target's dtype. Raises ValueError if it is missing or has another
        shape than target."""
        assert self._file_of is not None
        if name not in self._file_of:
            raise ValueError(f"{self._folder}: the tensor {name} is missing from the checkpoint")
        file_name = self._file_of[name]
        try:
            tensor = self._file(file_name).get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self._folder / file_name}: the tensor {name} cannot be read ({error})") from None
        if tensor.shape != target.shape:
            raise ValueError(
                f"{self._folder / file_name}: the tensor {name} has shape {list(tensor.shape)}; by config.json it must "
                f"have {list(target.shape)}"
            )
        target.copy_(tensor)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._folder / name
            try:
                self._open[name] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise ValueError(f"{path} is missing, but the checkpoint needs it") from None
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is truncated or not a safetensors file ({error})") from None
        return self._open[name]


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor -> file name; None if one file holds everything."""
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}; one of them must hold the weights")
        return None
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error})") from None
    return weight_map
