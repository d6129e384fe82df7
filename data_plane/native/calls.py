"""The C interface of the compiled kernels: every function's arguments, and a layer's fields.

Arguments, which kernels.cpp explains, go by place for speed (docs/decisions/0014,
benchmarks/cpu/decode_cpu.py).
"""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_INT = ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "packed_elements": (LONG, LONG),
    "pack": (POINTER, LONG, LONG, POINTER),
    "linear": (POINTER, LONG, POINTER, LONG, LONG, LONG, POINTER),
    "logits": (POINTER, POINTER, _INT, FLOAT, POINTER, LONG, LONG, LONG, POINTER),
    "attention_rows": (*(POINTER,) * 5, LONG, *(POINTER,) * 3),
    "absorbed_q": (*(POINTER,) * 5, LONG, POINTER),
    "heads_rows": (*(POINTER,) * 5, LONG, *(POINTER,) * 3),
    "heads_queries": (*(POINTER,) * 5, LONG, POINTER),
    "after_attention": (*(POINTER,) * 3, LONG, POINTER, POINTER),
    "append": (*(POINTER,) * 3, LONG, LONG),
    "heads_linear": (POINTER, POINTER, *(LONG,) * 4, POINTER),
    "mlp": (*(POINTER,) * 3, *(LONG,) * 3, FLOAT, POINTER),
    "visit_experts": (
        *(POINTER,) * 4,
        *(LONG,) * 3,
        *(POINTER,) * 4,
        *(LONG,) * 4,
        FLOAT,
        *(POINTER,) * 3,
    ),
    "gate": (*(POINTER,) * 3, *(LONG,) * 6, _INT, _INT, FLOAT, POINTER, POINTER),
    "name_slots": (*(POINTER,) * 3, *(LONG,) * 3),
    "pack_rows": (*(POINTER,) * 3, *(LONG,) * 5, *(POINTER,) * 3),
    "combine_sums": (*(POINTER,) * 6, *(LONG,) * 3, POINTER),
    "new_mixture": (POINTER, *(LONG,) * 3),
    "delete_mixture": (POINTER,),
    "run_mixture": (*(POINTER,) * 5, LONG, POINTER, LONG, LONG, *(POINTER,) * 3),
    "resume_mixture": (*(POINTER,) * 3,),
    "finish_mixture": (POINTER,),
    "attention": (*(POINTER,) * 3, LONG, POINTER, *(LONG,) * 7, FLOAT, POINTER, POINTER),
    "delta": (
        *(POINTER, POINTER, LONG),
        *(*(POINTER,) * 3, LONG),
        *(POINTER, POINTER, LONG),
        *(POINTER, LONG) * 2,
        POINTER,
    ),
}
_RESULTS = {
    "packed_elements": LONG,
    "new_mixture": POINTER,
    "run_mixture": LONG,
    "resume_mixture": LONG,
    "delta": LONG,
}


class LayerFields(ctypes.Structure):
    """A layer's fields for the kernels: struct Layer of kernels.cpp."""

    _fields_ = [
        *(
            (name, POINTER)
            for name in ("input_norm", "q_norm", "kv_norm", "post_norm", "down", "q", "k_up", "o")
        ),
        *(
            (name, LONG)
            for name in ("hidden", "q_latent", "rank", "rope", "heads", "nope", "value")
        ),
        *(("norm_eps", FLOAT), ("latent_eps", FLOAT)),
        *(("is_interleaved", _INT), ("norms_are_fp32", _INT)),
    ]


class HeadsFields(ctypes.Structure):
    """Fields of a layer's K/V heads: struct Heads of heads.h."""

    _fields_ = [
        *(
            (name, POINTER)
            for name in ("input_norm", "q_norm", "k_norm", "q_bias", "kv_bias", "q", "kv")
        ),
        *((name, LONG) for name in ("hidden", "heads", "kv_heads", "head_dim", "rope")),
        *(("norm_eps", FLOAT), ("head_eps", FLOAT)),
        *(("is_interleaved", _INT), ("norms_are_fp32", _INT)),
    ]


class DeltaFields(ctypes.Structure):
    """Fields of a linear attention layer: struct Delta of delta.h."""

    _fields_ = [
        *((name, POINTER) for name in ("conv", "norm", "rate", "bias")),
        *(
            (name, LONG)
            for name in ("key_heads", "heads", "key_dim", "value_dim", "decays", "conv_size")
        ),
        *((name, LONG) for name in ("state", "decay", "key", "u", "channels", "folded")),
        *((name, FLOAT) for name in ("key_eps", "norm_eps", "decay_bound")),
        ("has_sigmoid_gate", _INT),
    ]


class MixtureFields(ctypes.Structure):
    """Fields of a layer's MoE part: struct MixtureLayer of mixture.h."""

    _fields_ = [
        *(
            (name, POINTER)
            for name in (
                "gate",
                "gate_bias",
                "gate_up",
                "down",
                "shared_gate_up",
                "shared_down",
                "table",
                "loads",
            )
        ),
        *(
            (name, LONG)
            for name in (
                "hidden",
                "experts",
                "groups",
                "groups_per_token",
                "experts_per_token",
                "slots",
                "first",
                "inner",
                "shared_inner",
            )
        ),
        *(("scale", FLOAT), ("is_softmax", _INT), ("is_normalised", _INT)),
        *(("limit", FLOAT), ("shared_limit", FLOAT)),
    ]


_ON_PROCESSORS = (
    "linear",
    "logits",
    "attention_rows",
    "absorbed_q",
    "heads_rows",
    "heads_queries",
    "after_attention",
    "heads_linear",
    "mlp",
    "attention",
    "delta",
)
"""Functions whose first argument is the processors."""


_FORMS = {
    (torch.float32, torch.float32): "f32",
    (torch.bfloat16, torch.bfloat16): "bf16",
    (torch.float32, torch.bfloat16): "f32_bf16",
}


def calls_of(
    library: ctypes.CDLL, dtype: torch.dtype, weight_dtype: torch.dtype, processors: int
) -> SimpleNamespace:
    """Return the library's functions for rows and packed weights, by the names of kernels.cpp.

    Weights are no wider than rows, and for AMX no narrower. processors: their address.
    """
    calls, form = SimpleNamespace(), _FORMS[dtype, weight_dtype]
    for name, arguments in _SIGNATURES.items():
        function = library[f"nanocp_{name}_{form}"]
        is_shared = name in _ON_PROCESSORS
        function.argtypes = (POINTER, *arguments) if is_shared else arguments
        function.restype = _RESULTS.get(name)
        setattr(calls, name, partial(function, processors) if is_shared else function)
    return calls
