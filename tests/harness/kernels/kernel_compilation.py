"""Compiles every kernel for sm_90 without a GPU, at DeepSeek-V3's widths.

`python tests/harness/kernels/kernel_compilation.py [NAME...]` prints one JSON object: kernel ->
resources, of all kernels if none is named. It is a process of its own because the interpreter
(TRITON_INTERPRET) is chosen when a kernel is decorated.
"""

import json
import sys
from dataclasses import asdict

from harness.kernels.compiled_kernel import compile_kernel
from harness.kernels.layer_compilation import layer_kernels, numbers


def kernels():
    """List every kernel: name -> what compiles it."""
    return {
        **layer_kernels(), **attention_kernels(), **exchange_kernels(), **table_kernels(),
        **row_kernels(), **merge_kernels(), **linear_kernels(),
    }  # fmt: skip


def attention_kernels():
    """Paged attention over each dtype and over FP8 frames, and its plan."""
    from data_plane.attention import triton_gqa as gqa
    from data_plane.attention import triton_mla as mla
    from data_plane.attention.triton_split import plan_kernel

    names = ("frame_ptr", "length_ptr", "query_length_ptr", "begin_ptr")
    tables = {**dict.fromkeys(names, "*i32"), "slot_ptr": "*fp32"}
    scalars = {"scale_log2": "fp32", **numbers("page_stride", "num_heads")}

    def decode(kernel, tiles, dtype, frames, widths, num_queries=1):
        outputs = {"slot_lse_ptr": "*fp32", "out_ptr": f"*{dtype}", "lse_ptr": "*fp32"}
        arguments = {"q_ptr": f"*{dtype}", **frames, **tables, **outputs, **scalars}
        constants = {
            **widths, "PAGE": 64, "QUERIES": num_queries, "BLOCK_H": tiles.block_heads,
            "BLOCK_T": tiles.block_tokens,
        }  # fmt: skip
        return compile_kernel(kernel, arguments, constants, tiles.num_warps, tiles.num_stages)

    def latent(dtype, tiles, views, strides, num_queries=1):
        names = ("value_ptr", "scale_ptr", "k_rope_ptr")
        frames = {name: f"*{kind}" for name, kind in zip(names, views, strict=True)}
        widths = {"RANK": 512, "ROPE": 64, "STRIDE": strides[0], "ROPE_STRIDE": strides[1]}
        widths["SCALES"] = 4
        return decode(mla.decode_kernel, tiles, dtype, frames, widths, num_queries)

    def plain(dtype, tiles, num_queries=1):
        return latent(dtype, tiles, [dtype] * 3, (576, 576), num_queries)

    def fp8(dtype="bf16", tiles=mla.TILES_16_BIT, num_queries=1):
        return latent(dtype, tiles, ("fp8e4nv", "fp32", "bf16"), (656, 328), num_queries)

    def heads(dtype, tiles, num_queries=1, group=16):
        # Qwen3-235B-A22B: 64 query heads over 4 K/V heads of 128; GLM-4.5: 96 over 8.
        widths = {"GROUPS": 64 // group, "GROUP": group, "HEAD_DIM": 128}
        frames = {"kv_ptr": f"*{dtype}"}
        return decode(gqa.decode_heads_kernel, tiles, dtype, frames, widths, num_queries)

    def plan():
        pointers = dict.fromkeys(("length_ptr", "begin_ptr", "row_parts_ptr"), "*i32")
        constants = {"ROW_COST": 5, "PAGE": 64, "BLOCK_A": 1024}
        return compile_kernel(plan_kernel, pointers | numbers("num_rows", "num_parts"), constants)

    return {
        "decode bf16": lambda: plain("bf16", mla.TILES_16_BIT),
        "decode bf16, two queries": lambda: plain("bf16", mla.TILES_16_BIT, 2),
        "decode fp16": lambda: plain("fp16", mla.TILES_16_BIT),
        "decode fp32": lambda: plain("fp32", mla.TILES_FP32),
        "decode fp8": fp8,
        "decode fp8, fp16 queries": lambda: fp8("fp16"),
        "decode fp8, fp32 queries": lambda: fp8("fp32", mla.TILES_FP32),
        "decode fp8, two queries": lambda: fp8(num_queries=2),
        "decode K/V heads bf16": lambda: heads("bf16", gqa.TILES_16_BIT),
        "decode K/V heads bf16, two queries": lambda: heads("bf16", gqa.TILES_16_BIT, 2),
        "decode K/V heads bf16, four queries": lambda: heads("bf16", gqa.TILES_16_BIT, 4, 12),
        "decode K/V heads fp32": lambda: heads("fp32", gqa.TILES_FP32),
        "plan": plan,
    }


def exchange_kernels():
    """Put, wait and take, with the fields of each channel in the latent form."""
    from data_plane.transport.gpu import triton_exchange as exchange

    counts = {"epoch_ptr": "*i64", "error_ptr": "*i64", "count_ptr": "*i32"}
    put_head = {"peer_ptr": "*i64", **counts, "row_ptr": "*i32", "done_ptr": "*i32"}
    take_head = {"peer_ptr": "*i64", "epoch_ptr": "*i64", "count_ptr": "*i32"}
    q = ("*i32", "*u8", "*i32", "*i32"), (2, 1, 768, 288)
    res = ("*i32", "*i32"), (8192, 128)
    dispatch = ("*i32",) * 3, (16, 8, 3584)
    field_offsets = [f"{letter}_offset" for letter in "abcd"]

    def build(kernel, head, offsets, fields, constants, names=(), row_bytes=0):
        types, widths = fields
        types, widths = (*types, *types[:1] * 2)[:4], (*widths, 0, 0)[:4]
        pointers = {f"{letter}_ptr": type for letter, type in zip("abcd", types, strict=True)}
        scalars = dict.fromkeys(offsets, "i64") | numbers("instance", "num_slots", *names)
        sizes = dict(zip("ABCD", widths, strict=True))
        sizes |= {"ROW_BYTES": row_bytes, "BLOCK": 1024, "BLOCK_N": 32}
        return compile_kernel(
            kernel, {**head, **pointers, **scalars}, constants | sizes, aligned=offsets
        )

    def put(fields, ahead, has_rows, is_counted=False, row_bytes=0):
        offsets = ["flag_offset", "cell_offset", *field_offsets]
        constants = {"AHEAD": ahead, "HAS_ROWS": has_rows, "COUNTED": is_counted}
        names = "num_listed", "cell_stride", "stage"
        return build(exchange.put_kernel, put_head, offsets, fields, constants, names, row_bytes)

    def take(fields, row_bytes=0):
        return build(
            exchange.take_kernel, take_head, field_offsets, fields, {}, row_bytes=row_bytes
        )

    def wait(is_counted):
        offsets = ["flag_offset", "cell_offset"]
        arguments = {"peer_ptr": "*i64", **counts, **dict.fromkeys(offsets, "i64")}
        arguments |= numbers("instance", "num_instances", "channel", "max_polls", "cell_stride")
        constants = {"COUNTED": is_counted, "BLOCK_N": 32}
        return compile_kernel(
            exchange.wait_kernel, arguments, constants, num_warps=1, aligned=offsets
        )

    return {
        "put q": lambda: put(q, ahead=1, has_rows=True),
        "put res": lambda: put(res, ahead=0, has_rows=False),
        "put dispatch": lambda: put(dispatch, ahead=1, has_rows=True, is_counted=True),
        "put q packed": lambda: put(q, ahead=1, has_rows=True, row_bytes=4_352),
        "put dispatch packed": lambda: put(
            dispatch, ahead=1, has_rows=True, is_counted=True, row_bytes=14_464
        ),
        "wait": lambda: wait(False),
        "wait counted": lambda: wait(True),
        "take q": lambda: take(q),
        "take q packed": lambda: take(q, row_bytes=4_352),
        "take res": lambda: take(res),
    }


def table_kernels():
    """What a step does with its tables: 256 rows, 64 links, a million tokens."""
    from data_plane.graph import triton_tables as tables
    from data_plane.step import triton_turns as turns

    def adopt():
        arguments = {"parity_ptr": "*i64", "staged_ptr": "*i32", "live_ptr": "*i32"}
        arguments |= numbers("table_words", "small_words", "first_pages", "num_rows", "max_pages")
        return compile_kernel(tables.adopt_kernel, arguments, {"BLOCK": 1024})

    def locate():
        arguments = dict.fromkeys(("num_pages_ptr", "page_ptr", "frame_ptr"), "*i32")
        arguments |= {"position_ptr": "*i64", "live_ptr": "*u8", "error_ptr": "*i64"}
        arguments |= {"slot_ptr": "*i64", "length_ptr": "*i32"}
        arguments |= numbers("num_rows", "max_pages", "scratch_slot")
        return compile_kernel(
            tables.locate_kernel, arguments, {"PAGE": 64, "NUM_HALVINGS": 15, "BLOCK": 64}
        )

    def route():
        arguments = dict.fromkeys(("count_ptr", "row_ptr", "slot_ptr"), "*i32")
        arguments |= numbers("num_rows", "num_links")
        return compile_kernel(tables.route_kernel, arguments, {"BLOCK_B": 256, "BLOCK_L": 64})

    def next_turn():
        arguments = dict.fromkeys(("by_host_ptr", "turn_ptr", "ids_ptr", "token_ptr"), "*i64")
        arguments |= {"position_ptr": "*i64", "live_ptr": "*u8", "last_ptr": "*i64"}
        arguments |= {"after_ptr": "*i64", "hidden_ptr": "*bf16", "drafted_ptr": "*bf16"}
        arguments |= numbers("ids_stride", "hidden_size")
        constants = {"WIDTH": 2, "BLOCK_W": 2, "BLOCK_X": 1024}
        return compile_kernel(turns.next_turn_kernel, arguments, constants)

    return {"adopt": adopt, "locate": locate, "route": route, "next turn": next_turn}


def row_kernels():
    """Where rows go: 256 rows, 32 instances, top-8 of 256 experts."""
    from data_plane.moe.gpu import rows as rows

    def target():
        arguments = {"number_ptr": "*i64"}
        arguments |= dict.fromkeys(("count_ptr", "row_ptr", "slot_ptr"), "*i32")
        arguments |= numbers("num_rows", "num_slots", "per_row", "num_here")
        return compile_kernel(rows.target_kernel, arguments, {"BLOCK_B": 256, "BLOCK_K": 8})

    return {"target": target}


def merge_kernels():
    """The LSE merges: of an attention's parts, and of partials."""
    from data_plane.attention.triton_merge import merge_kernel

    def merge(is_split, dtype):
        arguments = {
            "partial_ptr": "*fp32" if is_split else f"*{dtype}", "lse_ptr": "*fp32",
            "row_parts_ptr": "*i32", "out_ptr": f"*{dtype}", "out_lse_ptr": "*fp32",
            **numbers("num_partials"),
        }  # fmt: skip
        return compile_kernel(
            merge_kernel, arguments, {"IS_SPLIT": is_split, "WIDTH": 512, "BLOCK_V": 512}
        )

    return {
        "merge splits": lambda: merge(True, "bf16"),
        "merge partials": lambda: merge(False, "bf16"),
    }


def linear_kernels():
    """Steps of linear attention layers: of Qwen3-Next, and of Kimi-Linear, with states in fp32."""
    from data_plane.kv import triton_carry as delta

    def step(dtype, key_heads, by_channel):
        given = ("channels_ptr", "gate_ptr", "decay_ptr", "beta_ptr", "conv_ptr")
        kept = ("state_ptr", "decays_ptr", "keys_ptr", "u_ptr")
        arguments = dict.fromkeys(given, f"*{dtype}")
        arguments |= {"rate_ptr": "*fp32", "bias_ptr": "*fp32", "norm_ptr": f"*{dtype}"}
        arguments |= {"frame_ptr": "*i32", "position_ptr": "*i64", "live_ptr": "*u8"}
        arguments |= {"error_ptr": "*i64", **dict.fromkeys(kept, "*fp32")}
        arguments |= {"ring_ptr": f"*{dtype}", "folded_ptr": "*i32", "raw_ptr": "*fp32"}
        arguments |= {"out_ptr": f"*{dtype}"}
        strides = [f"{name}_stride" for name in ("channels", "gate", "decay", "beta")]
        arguments |= numbers(*strides, "frame_words", "frame_channels")
        arguments |= dict.fromkeys(("key_eps", "norm_eps", "decay_bound"), "fp32")
        constants = {"HEADS": 32, "KEY_HEADS": key_heads, "KEY": 128, "VALUE": 128, "CONV": 4}
        constants |= {"PLACES": 2, "BY_CHANNEL": by_channel, "IS_BOUND": False}
        constants |= {"BLOCK_K": 128, "BLOCK_V": delta.BLOCK_V}
        return compile_kernel(delta.delta_step_kernel, arguments, constants)

    return {
        "delta rule bf16": lambda: step("bf16", 16, False),
        "delta rule fp32": lambda: step("fp32", 16, False),
        "delta rule by channel bf16": lambda: step("bf16", 32, True),
    }


def controls():
    """List kernels that the lint must find faults in, and some without a fault."""
    from harness.kernels import unordered_kernels as unordered

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
    known = kernels() | controls()
    print(json.dumps({name: asdict(known[name]()) for name in sys.argv[1:] or known}))
