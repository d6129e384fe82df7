"""Tensors of a checkpoint folder, one at a time, from one safetensors file or indexed ones.

It reads only headers and the asked tensors. (A mapped file would read neighbours ahead.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # imported where it is needed: what reads headers alone does without
    import torch
    from torch import Tensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_FP8 = "F8_E4M3"
_SCALE = "_scale_inv"
_OTHER_FORMS = (".qweight", ".weight_packed", ".weight_scale")
"""Suffixes of weights by AWQ, GPTQ, compressed-tensors and ModelOpt."""
_EXPERT = re.compile(r"(.*experts\.)(\d+)\.(gate|up|down)_proj\.weight")
"""One expert's weight, perhaps a part of one tensor of all experts."""
_WRAPPED = ((r"^model\.", "model.language_model."), ("^", "language_model."))
"""Beginnings of a text model's names, and what they are in models that read pictures too."""
_NAMED = 4
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsReader:
    """The tensors of a checkpoint folder.

    Every method raises ValueError naming a missing, truncated or malformed file.
    """

    def __init__(self, folder: Path, fp8_block: tuple[int, int] | None = None) -> None:
        """Read the index, or the header of the only file.

        fp8_block: rows and columns of an FP8 weight's scale; None refuses FP8.
        """
        self._folder = folder
        self._fp8_block = fp8_block
        self._headers: dict[str, dict[str, _Entry]] = {}
        index = _read_index(folder)
        self._file_of = dict.fromkeys(self._header(_SINGLE), _SINGLE) if index is None else index

    def check(self, names: Iterable[str]) -> None:
        """Raise ValueError naming the tensors that the folder lacks."""
        missing = list(filter(None, map(self._missing, names)))
        if missing:
            self._refuse_other_forms(missing)
            few = ", ".join(missing[:_NAMED]) + (
                f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            )
            count = "1 tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
            raise ValueError(f"{self._folder}: {count} missing from the checkpoint: {few}")

    def check_dtypes(self, names: Iterable[str]) -> None:
        """Raise ValueError naming the first of these tensors in an unsupported form."""
        for name in names:
            stored = self._stored(name)
            if (file := self._file_of.get(stored)) is None:
                continue  # `check` names what is missing
            if (entry := self._header(file).get(stored)) is None:
                continue
            if entry.dtype == _FP8:
                self._check_fp8(stored, entry)
            elif entry.dtype not in _DTYPES:
                raise ValueError(_wrong_dtype(self._path_of(name), stored, entry.dtype))

    def _check_fp8(self, name: str, entry: _Entry) -> None:
        path = self._path_of(name)
        if self._fp8_block is None or len(entry.shape) < 2:
            raise ValueError(
                f"{path}: the tensor {name} is {_FP8}, which only a matrix may be, and only with a "
                "quantization_config in config.json; else it must be one of "
                f"{', '.join(_DTYPES)}"
            )
        if (file := self._file_of.get(name + _SCALE)) is None:
            self._refuse_other_forms([name])
        elif (scale := self._header(file).get(name + _SCALE)) and scale.dtype not in _DTYPES:
            raise ValueError(_wrong_dtype(self._folder / file, name + _SCALE, scale.dtype))

    def _refuse_other_forms(self, names: Iterable[str]) -> None:
        for name in names:
            stem = name.removesuffix(_SCALE).removesuffix(".weight")
            other = next((stem + end for end in _OTHER_FORMS if stem + end in self._file_of), None)
            if other is not None:
                raise ValueError(
                    f"{self._path_of(other)}: the weight of {stem} is quantized, as {other} says; "
                    f"it must be one of {', '.join(_DTYPES)}, or {_FP8} with one scale for each "
                    f"block ({stem}.weight{_SCALE})"
                )

    @property
    def num_tensors(self) -> int:
        """Tensors of the folder; one of all experts counts as one for each."""
        return sum(
            self._header(file)[name].shape[0] if name.endswith("experts.down_proj") else 1
            for name, file in self._file_of.items()
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the stored shape of a tensor."""
        return self._entry(name).shape

    def _missing(self, name: str) -> str | None:
        stored = self._stored(name)
        file = self._file_of.get(stored)
        if file is None:
            return name
        entry = self._header(file).get(stored)
        if entry is None:
            return f"{stored} (not in {file}, where {_INDEX} has it)"
        has_scales = entry.dtype == _FP8 and len(entry.shape) == 2 and self._fp8_block is not None
        return self._missing(name + _SCALE) if has_scales else None

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill `target` (on the CPU, contiguous) with the tensor, converted to target's dtype.

        An FP8 weight is multiplied with its scales in fp32. Raises ValueError if either is missing
        or of a wrong shape, or the dtype is no float.
        """
        entry, path = self._entry(name), self._path_of(name)
        self.check_dtypes([name])
        _check_shape(path, name, entry, target)
        read = self._read_fp8_into if entry.dtype == _FP8 else self._read_float_into
        read(name, entry, target)
        # What is not a number stays none in a sum, and an infinity no finite number.
        _check_finite(path, name, bool(target.sum().isfinite()))

    def _read_float_into(self, name: str, entry: _Entry, target: Tensor) -> None:
        import torch

        path, dtype = self._path_of(name), getattr(torch, _DTYPES[entry.dtype])
        values = target if target.dtype == dtype else staging_tensor(entry.shape, dtype)
        _check_bytes(path, name, entry, values.nbytes)
        _read_bytes(path, entry.begin, values)
        if values is not target:
            target.copy_(values)

    def is_fp8(self, name: str) -> bool:
        """True for FP8 with scales; raises ValueError if it is missing."""
        return self._fp8_block is not None and self._entry(name).dtype == _FP8

    def is_bf16(self, name: str) -> bool:
        """True for bf16; raises ValueError if it is missing."""
        return self._entry(name).dtype == "BF16"

    def read_fp8_into(self, name: str, values: Tensor, scale: Tensor) -> None:
        """Fill `values` [N, X] and `scale` [rows of blocks, columns of blocks] fp32 as stored.

        Both are on the CPU and contiguous. Raises ValueError as read_into does.
        """
        entry, path = self._entry(name), self._path_of(name)
        import torch

        assert entry.dtype == _FP8, (name, entry.dtype)
        _check_shape(path, name, entry, values)
        _check_bytes(path, name, entry, values.numel())
        _read_bytes(path, entry.begin, values)
        # e4m3 has no infinity, and two bytes that are no number: 0x7f and 0xff.
        magnitude = staging_tensor(values.shape, torch.uint8)
        torch.bitwise_and(values.view(torch.uint8), 0x7F, out=magnitude)
        _check_finite(path, name, int(magnitude.max()) < 0x7F)
        self.read_into(name + _SCALE, scale)

    def _read_fp8_into(self, name: str, entry: _Entry, target: Tensor) -> None:
        """De-quantise a row of blocks at a time, so no fp32 copy stands beside `target`."""
        import torch

        assert self._fp8_block is not None, "check_dtypes refuses it"
        path = self._path_of(name)
        _check_bytes(path, name, entry, target.numel())
        (block_rows, block_columns), width = self._fp8_block, target.shape[1]
        scale = torch.empty(scale_shape(target.shape, self._fp8_block))
        self.read_into(name + _SCALE, scale)
        for index, rows in enumerate(torch.split(target, block_rows)):
            values = staging_tensor(rows.shape, torch.float8_e4m3fn)
            _read_bytes(path, entry.begin + index * block_rows * width, values)
            rows.copy_(values.float().mul_(scale[index].repeat_interleave(block_columns)[:width]))

    def _entry(self, name: str) -> _Entry:
        self.check([name])
        stored = self._stored(name)
        entry, of_expert = self._header(self._file_of[stored])[stored], _EXPERT.fullmatch(name)
        if of_expert is None or stored.endswith(".weight"):
            return entry
        if len(entry.shape) != 3 or int(of_expert[2]) >= entry.shape[0]:
            raise ValueError(
                f"{self._path_of(name)}: the tensor {stored} has shape {list(entry.shape)}; it "
                f"must be of all experts, and have expert {of_expert[2]}"
            )
        return _part(entry, int(of_expert[2]), of_expert[3])

    def _path_of(self, name: str) -> Path:
        return self._folder / self._file_of[self._stored(name)]

    def _stored(self, name: str) -> str:
        """Return a tensor's name in the folder; Kimi-Linear and Qwen3.5 have several."""
        if name in self._file_of:
            return name
        others = [name, name.replace(".mlp.", ".block_sparse_moe.")]
        if part := _EXPERT.fullmatch(name):
            others.append(f"{part[1]}{'down' if part[3] == 'down' else 'gate_up'}_proj")
        others += [re.sub(text, inner, other) for text, inner in _WRAPPED for other in others]
        return next((other for other in others if other in self._file_of), name)

    def _header(self, file_name: str) -> dict[str, _Entry]:
        if file_name not in self._headers:
            self._headers[file_name] = _read_header(self._folder / file_name)
        return self._headers[file_name]


def _part(entry: _Entry, expert: int, which: str) -> _Entry:
    """Return one expert's weight in a tensor of all: [E, 2I, X] gate, then up; down."""
    _, rows, width = entry.shape
    begin = entry.begin + expert * (num_bytes := (entry.end - entry.begin) // entry.shape[0])
    if which != "down":
        rows, num_bytes = rows // 2, num_bytes // 2
        begin += num_bytes * (which == "up")
    return _Entry(entry.dtype, (rows, width), begin, begin + num_bytes)


def scale_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of an FP8 weight's scales [N, X]: (rows, columns) of blocks."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def staging_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make zeros in a mapping of their own, for passing values; no dimension may be 0."""
    import torch

    count = math.prod(shape)
    return torch.frombuffer(mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(*shape)


def _read_header(path: Path) -> dict[str, _Entry]:
    """Read a shard's header: 8 bytes of length, then JSON; tensors follow without gaps."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise ValueError(
                    f"{path} is truncated or not a safetensors file: "
                    "its header does not fit the file"
                )
            text = file.read(header_bytes)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, but the checkpoint needs it") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    try:
        raw: dict[str, Any] = json.loads(text)
        raw.pop("__metadata__", None)
        data = 8 + header_bytes
        entries = {
            name: _Entry(
                info["dtype"],
                tuple(info["shape"]),
                *(data + offset for offset in info["data_offsets"]),
            )
            for name, info in raw.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a safetensors file (its header: {error!r})") from None
    needed_bytes = max((entry.end for entry in entries.values()), default=data)
    if file_bytes != needed_bytes:
        kind = "truncated" if file_bytes < needed_bytes else "malformed"
        raise ValueError(
            f"{path} is {kind}: it has {file_bytes} bytes, but its header describes {needed_bytes}"
        )
    return entries


def _wrong_dtype(path: Path, name: str, dtype: str) -> str:
    return f"{path}: the tensor {name} is {dtype}; it must be one of {', '.join(_DTYPES)}"


def has_fp8(folder: Path) -> bool | None:
    """True if a tensor of the folder is FP8; None if weights are missing."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    index = _read_index(folder) if (folder / _INDEX).exists() else None
    if not names or not {*(index or {}).values()} <= {*names}:
        return None
    headers = (_read_header(folder / name) for name in names)
    return any(entry.dtype == _FP8 for header in headers for entry in header.values())


def _check_finite(path: Path, name: str, is_finite: bool) -> None:
    if not is_finite:
        raise ValueError(
            f"{path}: the tensor {name} has values that are no finite numbers; download or write "
            "the checkpoint again"
        )


def _check_shape(path: Path, name: str, entry: _Entry, target: Tensor) -> None:
    if entry.shape != tuple(target.shape):
        raise ValueError(
            f"{path}: the tensor {name} has shape {list(entry.shape)}; "
            f"by config.json it must have {list(target.shape)}"
        )


def _check_bytes(path: Path, name: str, entry: _Entry, num_bytes: int) -> None:
    if entry.end - entry.begin != num_bytes:
        raise ValueError(
            f"{path} is malformed: {name} has {entry.end - entry.begin} bytes, not {num_bytes}"
        )


def _read_bytes(path: Path, begin: int, target: Tensor) -> None:
    import torch

    assert target.is_contiguous()
    view = target.view(-1).view(torch.uint8).numpy().data
    done = 0
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while done < len(view):  # a call reads at most 2 GiB
            count = file.readinto(view[done:])
            if not count:
                raise ValueError(f"{path} is truncated: it ended while it was read")
            done += count


def _read_index(folder: Path) -> dict[str, str] | None:
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise ValueError(
                f"{folder} has neither {_SINGLE} nor {_INDEX}; one of them must hold the weights"
            )
        return None
    try:
        weight_map: dict[str, str] = dict(
            json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        )
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError("its weight_map must have the name of a file for each tensor")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error})") from None
    return weight_map
