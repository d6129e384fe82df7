"""Triton's interpreter, with bfloat16 products as a GPU computes them.

Kernels are then Python functions of arrays, and need no GPU. Triton chooses between compiler and
interpreter when a kernel is decorated, so `interpret` comes before any import of one.
"""

import os


def interpret():
    """Interpret every kernel of this process that is imported from here on.

    The interpreter keeps bfloat16 as its 16 bits and would multiply those as integers; products of
    bfloat16 are computed in float32 instead, as tensor cores do.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    product = InterpreterBuilder.create_dot

    def widened(builder, handle):
        is_bfloat16 = handle.dtype.scalar == tl.bfloat16
        return builder.cast_impl(handle, tl.float32) if is_bfloat16 else handle

    InterpreterBuilder.create_dot = lambda builder, a, b, *rest: product(
        builder, widened(builder, a), widened(builder, b), *rest
    )
