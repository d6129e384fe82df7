"""Puts and waits with a fault of order each, which compiled_kernel.py must find."""

import triton
import triton.language as tl


@triton.jit
def put_kernel(source_ptr, target_ptr, flag_ptr, ORDER: tl.constexpr):
    lane = tl.arange(0, 1024)
    if ORDER == "flag first":
        tl.atomic_xchg(flag_ptr, 1, sem="release", scope="sys")
    tl.store(target_ptr + lane, tl.load(source_ptr + lane))
    tl.debug_barrier()
    if ORDER == "right":
        tl.atomic_xchg(flag_ptr, 1, sem="release", scope="sys")
    elif ORDER == "plain flag":
        tl.store(flag_ptr, 1)
    elif ORDER == "relaxed flag":
        tl.atomic_xchg(flag_ptr, 1, sem="relaxed", scope="sys")
    elif ORDER == "GPU scope":
        tl.atomic_xchg(flag_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait_kernel(flag_ptr, epoch, SEM: tl.constexpr, SCOPE: tl.constexpr):
    zero = epoch * 0
    while tl.atomic_add(flag_ptr, zero, sem=SEM, scope=SCOPE) < epoch:
        pass
