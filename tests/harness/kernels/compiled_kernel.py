"""Compiles one kernel for sm_90 without a GPU, and reads what the compiler made of it.

Spilled registers and shared memory come from the binary; the order of flags and stores comes from
the PTX.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass

SHARED_LIMIT = 232_448
"""Bytes of shared memory that one program may have on sm_90."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel."""

    registers: int
    stack_bytes: int
    """Spilled registers of a thread, in bytes."""
    num_spills_in_loop: int
    """Loads and stores of spilled registers in loops with a wgmma; others cost little."""
    shared_bytes: int
    num_wgmma: int
    num_async_copies: int
    num_narrow: int
    """Accesses of a thread to global memory of one or two bytes."""
    unordered_releases: list
    """What the function of that name finds."""
    num_unordered_without_barriers: int
    """How many unordered releases it finds once the barriers are struck out."""
    unannounced_stores: list
    """What the function of that name finds."""
    num_system_acquires: int
    """Instructions that acquire what another GPU released."""
    num_gpu_acquires: int
    """Instructions that acquire what another program of this GPU released."""


def unordered_releases(ptx):
    """Find releases to which a store to global memory leads without a program-wide barrier between.

    The thread that releases has ordered its own stores only; the others' stores need the barrier
    before it. The interpreter runs one thread, and cannot see that a barrier is missing.
    """
    faults, stored = [], False
    for line in ptx.splitlines():
        if re.search(r"\bbar(rier)?\.(cta\.)?sync\b", line):
            stored = False
        elif re.search(r"\.(release|acq_rel)\b", line):
            faults += [line.strip()] if stored else []
        elif re.search(r"\bst\.(\w+\.)*global\b", line):
            stored = True
    return faults


def unannounced_stores(ptx):
    """Find stores to global memory after which nothing is released to the whole system.

    A peer that sees the flag may not see such stores: a kernel that puts must have none.
    """
    stores = []
    for line in ptx.splitlines():
        if re.search(r"\.(release|acq_rel)\b", line) and re.search(r"\.sys\b", line):
            stores = []
        elif re.search(r"\bst\.(\w+\.)*global\b", line):
            stores.append(line.strip())
    return stores


def num_acquires(ptx, scope):
    """Count the instructions that acquire at a scope: sys or gpu."""
    pattern = rf"^(?=.*\.{scope}\b).*\.(?:acquire|acq_rel)\b"
    return len(re.findall(pattern, ptx, re.MULTILINE))


def compile_kernel(kernel, arguments, constants, num_warps=4, num_stages=2, aligned=()):
    """Compile a kernel for sm_90 and read its PTX and SASS.

    arguments: name -> Triton type, or a NamedTuple of types, in order. aligned: names of numbers
    that are multiples of 16, as all pointers are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    assert [*arguments, *constants] == names, (names, [*arguments, *constants])
    signature = {name: arguments.get(name, "constexpr") for name in names}
    paths = {(names.index(name),) for name in aligned}
    for index, kind in enumerate(signature.values()):
        if isinstance(kind, tuple):
            paths |= {(index, field) for field in range(len(kind))}
        elif kind[0] == "*":
            paths.add((index,))
    attributes = {path: [["tt.divisibility", 16]] for path in paths}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    usage = _cuobjdump("--dump-resource-usage", compiled.asm["cubin"])
    return Compiled(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        num_spills_in_loop=spills_in_loop(_cuobjdump("-sass", compiled.asm["cubin"])),
        shared_bytes=compiled.metadata.shared,
        num_wgmma=ptx.count("wgmma.mma_async"),
        num_async_copies=ptx.count("cp.async.cg"),
        num_narrow=len(re.findall(r"\b(?:ld|st)\.(?:\w+\.)*global\.b(?:8|16)\b", ptx)),
        unordered_releases=unordered_releases(ptx),
        num_unordered_without_barriers=len(unordered_releases(re.sub(r"\bbar\.sync\b.*", "", ptx))),
        unannounced_stores=unannounced_stores(ptx),
        num_system_acquires=num_acquires(ptx, "sys"),
        num_gpu_acquires=num_acquires(ptx, "gpu"),
    )


def resource_usage(cubin, name):
    """Read a kernel's registers and bytes of a thread's stack, in a binary of several functions."""
    text = _cuobjdump("--dump-resource-usage", cubin)
    usage = text[text.index(f"Function {name}") :]
    names = {"registers": "REG", "stack_bytes": "STACK"}
    return {key: int(re.search(rf"{found}:(\d+)", usage)[1]) for key, found in names.items()}


def spills_in_loop(sass):
    """Count local loads and stores in innermost loops with a wgmma."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    jumps = ((at, re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)) for at, text in lines)
    loops = [(int(jump[1], 16), at) for at, jump in jumps if jump and int(jump[1], 16) <= at]
    loops = [
        loop
        for loop in loops
        if any("HGMMA" in text for at, text in lines if loop[0] <= at <= loop[1])
    ]
    inner = {a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)}
    spills = re.compile(r"\b(STL|LDL)\b")
    return sum(
        bool(spills.search(text))
        for at, text in lines
        if any(low <= at <= high for low, high in inner)
    )


def _cuobjdump(option, cubin):
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
