"""Triton's interpreter, with bfloat16 products as a GPU computes them.

Kernels are then Python functions of arrays, and need no GPU. Triton chooses between compiler and
interpreter when a kernel is decorated, so `interpret` comes before any import of one.
"""

import inspect
import math
import os
import threading
import time
from contextlib import contextmanager
from functools import cache


def interpret():
    """Interpret every kernel of this process that is imported from here on.

    The interpreter keeps bfloat16 as its 16 bits and would multiply those as integers; products of
    bfloat16 are computed in float32 instead, as tensor cores do. It would also patch Triton's
    language anew for each call of a function of a kernel, and take the patch back after a launch,
    which other threads may still need; the language is patched once instead.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    builder, patch, patched = interpreter.InterpreterBuilder, interpreter._patch_lang, set()
    if getattr(patch, "is_lasting", False):
        return
    product = builder.create_dot

    def widened(builder, handle):
        is_bfloat16 = handle.dtype.scalar == tl.bfloat16
        return builder.cast_impl(handle, tl.float32) if is_bfloat16 else handle

    def patch_once(fn):
        if fn not in patched:
            modules = {
                value.__name__
                for value in fn.__globals__.values()
                if inspect.ismodule(value) and value in (tl, tl.core)
            }
            if not modules <= patched:
                patch(fn)
            patched.update((fn, *modules))
        return LastingPatch

    def patch_attr(owner, name, member, _, scope):
        def call(*args, **keys):
            keys["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **keys)

        scope.set_attr(owner, name, call)

    builder.create_dot = lambda builder, a, b, *rest: product(
        builder, widened(builder, a), widened(builder, b), *rest
    )
    patch_once.is_lasting = True
    interpreter._patch_lang = patch_once
    interpreter._patch_attr = patch_attr
    # For each operation it would make a table of all types.
    plain, known = interpreter._get_np_dtype, {}

    def np_dtype(kind):
        name = kind.scalar.name
        if name not in known:
            known[name] = plain(kind)
        return known[name]

    interpreter._get_np_dtype = np_dtype
    # It would compute each sum and product of integers once more, and assert nothing about them.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    _know_shapes(tl)
    interpreter._convert_float = _rounding(interpreter._convert_float)


def _know_shapes(tl):
    """Let what each tensor says of its shape be made once a shape, not once a tensor."""
    plain = tl.block_type.__init__

    @cache
    def of_tensor(sizes):
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    of_block = {}

    def init_tensor(tensor, handle, kind):
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        sizes = tuple(kind.shape.values) if kind.is_block() else ()
        tensor.shape, tensor.numel = of_tensor(sizes)

    def init_block(block, element, shape):
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in of_block:
            plain(block, element, shape)
            of_block[key] = block.shape, block.numel, block.name
        block.element_ty = element
        block.shape, block.numel, block.name = of_block[key]

    tl.tensor.__init__, tl.block_type.__init__ = init_tensor, init_block


def _rounding(convert):
    """Let fp32 become bf16 and e4m3 as a GPU rounds, to the nearest.

    The interpreter would cut bf16 off, and lose the carry of an e4m3 that rounds up.
    """
    import numpy as np
    import torch
    import triton.language as tl

    kinds = {
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
    }

    def convert_float(data, source, target, mode):
        if source != tl.float32 or target not in kinds:
            return convert(data, source, target, mode)
        kind, bits, unsigned = kinds[target]
        values = torch.from_numpy(np.array(data, dtype=np.float32))
        return values.to(kind).view(bits).numpy().view(unsigned).reshape(data.shape)

    return convert_float


class LastingPatch:
    """A patch of Triton's language that stays."""

    @staticmethod
    def restore():
        """Keep it."""


_CHANGE_S = 0.0002
"""How long a thread leaves the interpreter to others."""


@contextmanager
def shared_by_threads():
    """Let threads interpret kernels that wait for each other: they change at atomic accesses.

    The interpreter has one grid for the whole process.
    """
    from triton.runtime import interpreter

    function, builder = interpreter.InterpretedFunction, interpreter.InterpreterBuilder
    run, access, lock = function.run, builder.create_atomic_rmw, threading.Lock()

    def one_by_one(kernel, *args, **keys):
        with lock:
            return run(kernel, *args, **keys)

    def changing(self, *args):
        found, place = access(self, *args), (self.grid_dim, self.grid_idx)
        lock.release()
        time.sleep(_CHANGE_S)
        lock.acquire()
        self.grid_dim, self.grid_idx = place
        return found

    function.run, builder.create_atomic_rmw = one_by_one, changing
    try:
        yield
    finally:
        function.run, builder.create_atomic_rmw = run, access


@contextmanager
def products_in_order():
    """Let a product's element depend on its row and column alone: it is summed by ascending depth.

    NumPy sums a row's products in an order that depends on the row's place in its tile, which no
    GPU does.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    product = builder.create_dot

    def in_order(self, a, b, d, *rest):
        total = d.data.copy()
        for depth in range(a.data.shape[1]):
            total += a.data[:, depth, None] * b.data[None, depth, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    builder.create_dot = in_order
    try:
        yield
    finally:
        builder.create_dot = product
