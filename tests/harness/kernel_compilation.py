"""Compiles kernels for sm_90 without a GPU, and reads what the compiler made of them.

`python tests/harness/kernel_compilation.py` prints one JSON object: kernel -> resources. It is a
process of its own because the interpreter (TRITON_INTERPRET) is chosen when a kernel is decorated.
"""

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass

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
    unordered_releases: list
    """What the function of that name finds."""
    num_unordered_without_barriers: int
    """How many unordered releases it finds once the barriers are struck out."""
    unannounced_stores: list
    """What the function of that name finds."""
    num_system_acquires: int
    """Instructions that acquire what another GPU released."""


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


def compile_kernel(kernel, arguments, constants, num_warps=4, num_stages=2, aligned=()):
    """Compile a kernel for sm_90 and read its PTX and SASS.

    arguments: name -> Triton type, in order. aligned: names of numbers that are multiples of 16, as
    all pointers are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    assert [*arguments, *constants] == names, (names, [*arguments, *constants])
    signature = {name: arguments.get(name, "constexpr") for name in names}
    aligned = {*aligned, *(name for name in arguments if signature[name][0] == "*")}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
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
        unordered_releases=unordered_releases(ptx),
        num_unordered_without_barriers=len(unordered_releases(re.sub(r"\bbar\.sync\b.*", "", ptx))),
        unannounced_stores=unannounced_stores(ptx),
        num_system_acquires=len(
            re.findall(r"^(?=.*\.sys\b).*\.(?:acquire|acq_rel)\b", ptx, re.MULTILINE)
        ),
    )


def spills_in_loop(sass):
    """Count local loads and stores in innermost loops with a wgmma.

    A loop is what lies between a backward branch and its target.
    """
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


def kernels():
    """List every kernel, at DeepSeek-V3's widths: name -> what compiles it."""
    from data_plane.attention import triton_mla as mla
    from data_plane.attention.triton_merge import merge_kernel, merge_routed_kernel
    from data_plane.graph import triton_tables as tables_kernels
    from data_plane.moe import triton_gemm as moe
    from data_plane.moe import triton_rows as rows_kernels
    from data_plane.transport import triton_exchange as exchange_kernels

    tables = {"frame_ptr": "*i32", "length_ptr": "*i32", "begin_ptr": "*i32", "slot_ptr": "*fp32"}
    scalars = {"scale_log2": "fp32", "max_pages": "i32", "num_heads": "i32"}

    def decode(dtype, tiles):
        outputs = {"slot_lse_ptr": "*fp32", "out_ptr": f"*{dtype}", "lse_ptr": "*fp32"}
        arguments = {"q_ptr": f"*{dtype}", "kv_ptr": f"*{dtype}", **tables, **outputs, **scalars}
        widths = {"RANK": 512, "ROPE": 64, "PAGE": 64}
        blocks = {"BLOCK_H": tiles.block_heads, "BLOCK_T": tiles.block_tokens}
        return compile_kernel(
            mla.decode_kernel, arguments, widths | blocks, tiles.num_warps, tiles.num_stages
        )

    def decode_fp8():
        tiles = mla.TILES_FP8
        frames = {"value_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "k_rope_ptr": "*bf16"}
        outputs = {"slot_lse_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
        arguments = {"q_ptr": "*bf16", **frames, **tables, **outputs, **scalars}
        widths = {"RANK": 512, "ROPE": 64, "TOKEN_BYTES": 656, "PAGE": 64}
        blocks = {"BLOCK_H": tiles.block_heads, "BLOCK_T": tiles.block_tokens}
        return compile_kernel(
            mla.decode_fp8_kernel, arguments, widths | blocks, tiles.num_warps, tiles.num_stages
        )

    def exchange():
        # DeepSeek-V3, latent form. Q: position, live, q latent, latent KV. RES: partials, lse.
        q, res = ("*i32", "*u8", "*i32", "*i32"), ("*i32", "*i32")
        offsets = [f"{letter}_offset" for letter in "abcd"]

        def build(kernel, types, widths, head, constants):
            types, widths = (*types, *types[:1] * 2)[:4], (*widths, 0, 0)[:4]
            fields = {f"{letter}_ptr": type for letter, type in zip("abcd", types, strict=True)}
            flag = (
                {"flag_offset": "i64", "cell_offset": "i64"}
                if kernel is exchange_kernels.put_kernel
                else {}
            )
            scalars = {
                **flag,
                **dict.fromkeys(offsets, "i64"),
                "instance": "i32",
                "num_slots": "i32",
            }
            sizes = dict(zip("ABCD", widths, strict=True)) | {"BLOCK": 1024, "BLOCK_N": 32}
            return compile_kernel(
                kernel, {**head, **fields, **scalars}, constants | sizes, aligned=[*flag, *offsets]
            )

        counts = {"epoch_ptr": "*i64", "error_ptr": "*i64", "count_ptr": "*i32"}
        head = {"peer_ptr": "*i64", **counts, "row_ptr": "*i32", "done_ptr": "*i32"}
        flags = {"flag_ptr": "*i64", **counts, "cell_ptr": "*i32"}
        flags |= dict.fromkeys(("num_instances", "channel", "max_polls"), "i32")
        take = {"peer_ptr": "*i64", "epoch_ptr": "*i64", "count_ptr": "*i32"}
        put_kernel, take_kernel = exchange_kernels.put_kernel, exchange_kernels.take_kernel
        # A dispatch carries eight experts, their weights, a hidden state.
        q_widths, res_widths, dispatched = (
            (2, 1, 768, 288),
            (8192, 128),
            (("*i32",) * 3, (16, 8, 3584)),
        )
        counted = {"AHEAD": 1, "HAS_ROWS": True, "COUNTED": True}

        def wait(is_counted):
            constants = {"COUNTED": is_counted, "BLOCK_N": 32}
            return compile_kernel(exchange_kernels.wait_kernel, flags, constants, num_warps=1)

        return {
            "put q": lambda: build(put_kernel, q, q_widths, head, {**counted, "COUNTED": False}),
            "put res": lambda: build(
                put_kernel, res, res_widths, head, {"AHEAD": 0, "HAS_ROWS": False, "COUNTED": False}
            ),
            "put dispatch": lambda: build(put_kernel, *dispatched, head, counted),
            "wait": lambda: wait(False),
            "wait counted": lambda: wait(True),
            "take q": lambda: build(take_kernel, q, q_widths, take, {}),
            "take res": lambda: build(take_kernel, res, res_widths, take, {}),
        }

    def step():
        # 256 rows, 32 instances, top-8 of 256 experts, 7168 wide, a million tokens.
        x = {"width": "i32", "per_row": "i32"}
        wide = {"BLOCK_X": 1024, "BLOCK_N": 32}
        counts = {"source_count_ptr": "*i32"}
        pages = {
            "num_pages_ptr": "*i32",
            "page_ptr": "*i32",
            "frame_ptr": "*i32",
            "position_ptr": "*i64",
        }
        return {
            "adopt": (
                tables_kernels.adopt_kernel,
                {"parity_ptr": "*i64", "staged_ptr": "*i32", "live_ptr": "*i32"}
                | dict.fromkeys(
                    ("table_words", "small_words", "first_pages", "num_rows", "max_pages"), "i32"
                ),
                {"BLOCK": 1024},
            ),
            "locate": (
                tables_kernels.locate_kernel,
                {**pages, "live_ptr": "*u8", "slot_ptr": "*i64", "length_ptr": "*i32"}
                | {"num_rows": "i32", "max_pages": "i32", "scratch_slot": "i32"},
                {"PAGE": 64, "NUM_HALVINGS": 15, "BLOCK": 64},
            ),
            "route": (
                tables_kernels.route_kernel,
                {
                    "count_ptr": "*i32",
                    "row_ptr": "*i32",
                    "slot_ptr": "*i32",
                    "num_rows": "i32",
                    "num_links": "i32",
                },
                {"BLOCK_B": 256, "BLOCK_L": 64},
            ),
            "target": (
                rows_kernels.target_kernel,
                {
                    "expert_ptr": "*i64",
                    "live_ptr": "*u8",
                    **dict.fromkeys(("count_ptr", "row_ptr", "slot_ptr"), "*i32"),
                }
                | dict.fromkeys(("num_rows", "num_slots", "per_instance", "per_row"), "i32"),
                {"BLOCK_B": 256, "BLOCK_K": 8},
            ),
            "slot": (
                rows_kernels.slot_kernel,
                {"expert_ptr": "*i64", **counts, "slot_ptr": "*i32", "count_ptr": "*i32"}
                | dict.fromkeys(("num_instances", "num_arrived", "per_row", "first_expert"), "i32"),
                {"BLOCK_T": 128, "BLOCK_K": 8, "BLOCK_N": 32},
            ),
            "group": (
                rows_kernels.group_kernel,
                {
                    "x_ptr": "*bf16",
                    "slot_ptr": "*i32",
                    **counts,
                    "grouped_ptr": "*bf16",
                    "num_instances": "i32",
                    **x,
                },
                wide,
            ),
            "ungroup": (
                rows_kernels.ungroup_kernel,
                {
                    "y_ptr": "*bf16",
                    "slot_ptr": "*i32",
                    "weight_ptr": "*fp32",
                    **counts,
                    "sum_ptr": "*bf16",
                }
                | {"num_instances": "i32", **x},
                wide,
            ),
            "sum": (
                rows_kernels.sum_kernel,
                {"part_ptr": "*bf16", "count_ptr": "*i32", "slot_ptr": "*i32", "sum_ptr": "*bf16"}
                | {"num_instances": "i32", "width": "i32"},
                wide,
            ),
            "merge routed": (
                merge_routed_kernel,
                {
                    "out_ptr": "*bf16",
                    "lse_ptr": "*fp32",
                    "partial_ptr": "*bf16",
                    "partial_lse_ptr": "*fp32",
                }
                | {"count_ptr": "*i32", "slot_ptr": "*i32", "num_instances": "i32"},
                {"WIDTH": 128, "BLOCK_V": 128, "BLOCK_N": 32},
            ),
        }

    def plan():
        pointers = dict.fromkeys(("length_ptr", "begin_ptr", "row_parts_ptr"), "*i32")
        arguments = {**pointers, "num_rows": "i32", "num_parts": "i32"}
        return compile_kernel(
            mla.plan_kernel, arguments, {"ROW_COST": 5, "PAGE": 64, "BLOCK_A": 1024}
        )

    def merge(is_split, dtype):
        arguments = {
            "partial_ptr": "*fp32" if is_split else f"*{dtype}",
            "lse_ptr": "*fp32",
            "row_parts_ptr": "*i32",
        }
        arguments |= {"out_ptr": f"*{dtype}", "out_lse_ptr": "*fp32", "num_partials": "i32"}
        return compile_kernel(
            merge_kernel, arguments, {"IS_SPLIT": is_split, "WIDTH": 512, "BLOCK_V": 512}
        )

    def gemm(dtype, num_stages, is_fp8=False):
        weight, block = ("fp8e4nv", 128) if is_fp8 else (dtype, 0)
        pointers = {"x_ptr": f"*{dtype}", "weight_ptr": f"*{weight}", "scale_ptr": "*fp32"}
        pointers |= {"count_ptr": "*i32", "y_ptr": f"*{dtype}"}
        blocks = {
            "SCALE_N": block,
            "SCALE_X": block,
            "BLOCK_S": moe.BLOCK_S,
            "BLOCK_N": moe.BLOCK_N,
        }
        blocks |= {"BLOCK_X": moe.BLOCK_X}
        sizes = {"num_slots": "i32", "num_columns": "i32", "width": "i32"}
        return compile_kernel(
            moe.grouped_gemm_kernel,
            pointers | sizes,
            blocks,
            moe.NUM_WARPS,
            num_stages,
            aligned=sizes,
        )

    return {
        "grouped gemm bf16": lambda: gemm("bf16", moe.NUM_STAGES),
        "grouped gemm fp8": lambda: gemm("bf16", moe.NUM_STAGES, is_fp8=True),
        "grouped gemm fp32": lambda: gemm("fp32", moe.NUM_STAGES_FP32),
        "decode bf16": lambda: decode("bf16", mla.TILES_16_BIT),
        "decode fp16": lambda: decode("fp16", mla.TILES_16_BIT),
        "decode fp32": lambda: decode("fp32", mla.TILES_FP32),
        "decode fp8": decode_fp8,
        **exchange(),
        **{
            name: lambda arguments=arguments: compile_kernel(*arguments)
            for name, arguments in step().items()
        },
        "plan": plan,
        "merge splits": lambda: merge(True, "bf16"),
        "merge partials": lambda: merge(False, "bf16"),
    }


def controls():
    """List kernels that the lint must find faults in, and some that are right: name -> compiler."""
    from harness import unordered_kernels as unordered

    pointers = {"source_ptr": "*i32", "target_ptr": "*i32", "flag_ptr": "*i64"}
    puts = {
        f"put, {order}": lambda order=order: compile_kernel(
            unordered.put_kernel, pointers, {"ORDER": order}
        )
        for order in ("right", "plain flag", "relaxed flag", "GPU scope", "flag first")
    }
    waits = {
        f"wait, {sem} {scope}": lambda sem=sem, scope=scope: compile_kernel(
            unordered.wait_kernel,
            {"flag_ptr": "*i64", "epoch": "i64"},
            {"SEM": sem, "SCOPE": scope},
        )
        for sem, scope in (("acquire", "sys"), ("relaxed", "sys"), ("acquire", "gpu"))
    }
    return puts | waits


if __name__ == "__main__":
    compiled = {name: asdict(build()) for name, build in (kernels() | controls()).items()}
    print(json.dumps(compiled))
