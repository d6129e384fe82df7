"""The small kernels of a layer, compiled for sm_90 at DeepSeek-V3's widths.

See kernel_compilation.py. A batch has 64 rows; where rows travel there are 32 instances.
"""

from harness.kernels.compiled_kernel import compile_kernel


def numbers(*names):
    """The types of 32-bit arguments of these names."""
    return dict.fromkeys(names, "i32")


def layer_kernels():
    """Every kernel between a layer's products, and the products that gather their rows."""
    return {
        **norm_kernels(), **latent_kernels(), **gate_kernels(), **pair_kernels(),
        **product_kernels(), **sum_kernels(),
    }  # fmt: skip


def norm_kernels():
    """Sums with the norm that follows, of embeddings and of one or two addends; gated rows."""
    from data_plane.kernels import norm as norms

    def norm(has_rows, has_first, has_second):
        names = ("first_ptr", "second_ptr", "weight_ptr", "out_ptr", "normed_ptr")
        arguments = {"x_ptr": "*bf16", "row_ptr": "*i64", **dict.fromkeys(names, "*bf16")}
        arguments |= {"width": "i32", "eps": "fp32"}
        constants = {"HAS_ROWS": has_rows, "HAS_FIRST": has_first, "HAS_SECOND": has_second}
        constants |= {"BLOCK_X": 8192}
        return compile_kernel(norms.norm_kernel, arguments, constants, 8, aligned=["width"])

    def gated():
        arguments = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "width": "i32"}
        constants = {"BLOCK_I": 1024}
        return compile_kernel(norms.gated_kernel, arguments, constants, aligned=["width"])

    return {
        "norm of embeddings": lambda: norm(True, False, False),
        "norm of a sum": lambda: norm(False, True, False),
        "norm of three": lambda: norm(False, True, True),
        "gated rows": gated,
    }


def latent_kernels():
    """Latent rows into frames, own and received, bf16 and FP8; rotated queries."""
    from data_plane.kv import triton_latent as latent

    def frames(is_fp8):
        kinds = ("*fp8e4nv", "*fp32", "*bf16") if is_fp8 else ("*bf16",) * 3
        return dict(zip(("value_ptr", "scale_ptr", "key_ptr"), kinds, strict=True))

    def start(is_fp8):
        arguments = dict.fromkeys(("down_ptr", "q_norm_ptr", "kv_norm_ptr"), "*bf16")
        arguments |= dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
        arguments |= dict.fromkeys(("position_ptr", "slot_ptr"), "*i64")
        arguments |= {"q_ptr": "*bf16", "kv_ptr": "*bf16", **frames(is_fp8), "eps": "fp32"}
        constants = {"C": 1536, "R": 512, "P": 64, "TOKEN": 656 if is_fp8 else 576}
        constants |= {"HAS_Q": True, "KEEPS_KV": True, "IS_FP8": is_fp8, "IS_INTERLEAVED": True}
        constants |= {"BLOCK_C": 2048, "BLOCK_G": 128, "BLOCK_P": 32}
        return compile_kernel(latent.latent_kernel, arguments, constants, 4)

    def append(is_fp8):
        arguments = {"kv_ptr": "*bf16", "slot_ptr": "*i64", **frames(is_fp8)}
        constants = {"R": 512, "P": 64, "TOKEN": 656 if is_fp8 else 576, "IS_FP8": is_fp8}
        constants |= {"BLOCK_G": 128, "BLOCK_P": 64}
        return compile_kernel(latent.append_kernel, arguments, constants, 2)

    def rotate():
        arguments = {"q_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
        arguments |= {"position_ptr": "*i64", "out_ptr": "*bf16", "num_heads": "i32"}
        constants = {"N": 128, "P": 64, "R": 512, "IS_INTERLEAVED": True}
        constants |= {"BLOCK_H": 16, "BLOCK_P": 32}
        return compile_kernel(latent.rotate_kernel, arguments, constants, 2, aligned=["num_heads"])

    return {
        "latent rows bf16": lambda: start(False),
        "latent rows fp8": lambda: start(True),
        "append bf16": lambda: append(False),
        "append fp8": lambda: append(True),
        "rotate": rotate,
    }


def gate_kernels():
    """The gate's scores of rows in bf16 and fp32, and the choice among 256 experts in 8 groups."""
    from data_plane.moe.gpu import gate as gate

    def scores(is_split):
        tiles = gate.TILES_BF16 if is_split else gate.TILES_FP32
        arguments = {"x_ptr": "*bf16" if is_split else "*fp32"}
        arguments |= {"weight_ptr": "*fp32", "score_ptr": "*fp32"}
        arguments |= numbers("num_rows", "num_experts", "width", "depth")
        constants = {"IS_SPLIT": is_split, "BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns}
        constants |= {"BLOCK_K": tiles.depth}
        aligned = ["num_experts", "width", "depth"]
        return compile_kernel(
            gate.scores_kernel, arguments, constants, tiles.num_warps, tiles.num_stages, aligned
        )

    def choose():
        arguments = {"score_ptr": "*fp32", "bias_ptr": "*fp32", "live_ptr": "*u8"}
        arguments |= {"table_ptr": "*i32", "number_ptr": "*i64", "weight_ptr": "*fp32"}
        arguments |= {**numbers("num_rows", "seat"), "routed_scale": "fp32"}
        constants = {"PARTS": 14, "E": 256, "K": 8, "G": 8, "GROUPS_A_ROW": 4}
        constants |= {"IS_SOFTMAX": False, "HAS_BIAS": True, "IS_NORMALISED": True}
        constants |= {"BLOCK_G": 8, "BLOCK_P": 32, "BLOCK_K": 8}
        return compile_kernel(gate.choose_kernel, arguments, constants, 1)

    return {
        "scores bf16": lambda: scores(True),
        "scores fp32": lambda: scores(False),
        "choose": choose,
    }


def pair_kernels():
    """Tables of pairs, of rows here and of rows that arrived; rows laid out in FP8."""
    from data_plane.moe.gpu import pairs as pairs

    def find(in_region):
        arguments = dict.fromkeys(("number_ptr", "peer_ptr", "epoch_ptr"), "*i64")
        names = ("source_count_ptr", "row_ptr", "slot_ptr", "count_ptr")
        arguments |= {**dict.fromkeys(names, "*i32"), "load_ptr": "*i64", "number_offset": "i64"}
        arguments |= numbers("instance", "num_instances", "num_rows", "num_slots", "num_routed")
        arguments |= numbers("per_row", "id_stride", "num_shared")
        constants = {"IN_REGION": in_region, "BLOCK_T": 128, "BLOCK_K": 8}
        constants |= {"BLOCK_N": 32 if in_region else 1}
        aligned = ["number_offset", "num_rows", "num_slots"]
        return compile_kernel(pairs.pairs_kernel, arguments, constants, aligned=aligned)

    def lay_out(gathers, in_region, is_gated):
        arguments = {"x_ptr": "*bf16", "peer_ptr": "*i64", "row_ptr": "*i32"}
        arguments |= {"count_ptr": "*i32", "out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
        arguments |= {"offset": "i64", **numbers("instance", "num_experts", "num_slots")}
        arguments |= numbers("scale_slots", "width", "stride")
        constants = {"GATHERS": gathers, "IN_REGION": in_region, "IS_GATED": is_gated}
        constants |= {"IS_FP8": True, "BLOCK_G": 8, "GROUP": 128, "BLOCK_E": 16}
        aligned = ["offset", "num_slots", "width", "stride"]
        return compile_kernel(pairs.lay_out_kernel, arguments, constants, aligned=aligned)

    return {
        "pairs here": lambda: find(False),
        "pairs that arrived": lambda: find(True),
        "rows laid out in fp8": lambda: lay_out(True, True, False),
        "gated rows laid out in fp8": lambda: lay_out(False, False, True),
    }


def product_kernels():
    """The grouped GEMM: gated over gathered rows, and plain, for each dtype and number of rows."""
    from data_plane.kernels import fp8
    from data_plane.moe.gpu import gemm

    def product(tiles, is_gated, dtype="bf16", is_fp8=False):
        arguments = {"x_ptr": f"*{dtype}", "peer_ptr": "*i64", "row_ptr": "*i32"}
        arguments |= {"weight_ptr": "*fp8e4nv" if is_fp8 else f"*{dtype}", "scale_ptr": "*fp32"}
        arguments |= {"count_ptr": "*i32", "y_ptr": f"*{dtype}", "offset": "i64"}
        names = "instance", "num_experts", "num_slots", "num_columns", "width", "stride"
        arguments |= numbers(*names)
        block = 128 if is_fp8 else 0
        constants = {"GATHERS": is_gated, "IN_REGION": is_gated, "IS_GATED": is_gated}
        constants |= {"SCALE_N": block, "SCALE_X": block, "BLOCK_S": tiles.rows}
        constants |= {"BLOCK_N": tiles.columns, "BLOCK_X": gemm.DEPTH, "BLOCK_E": 16}
        aligned = ["offset", "num_slots", "num_columns", "width", "stride"]
        return compile_kernel(
            gemm.grouped_gemm_kernel, arguments, constants, tiles.num_warps, tiles.num_stages,
            aligned,
        )  # fmt: skip

    def quantise():
        arguments = {"x_ptr": "*bf16", "value_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
        arguments |= numbers("num_blocks", "scale_rows")
        constants = {"BLOCKS": 8, "BLOCK": fp8.BLOCK}
        return compile_kernel(fp8.quantise_kernel, arguments, constants, 4)

    return {
        "rows to FP8": quantise,
        "gated gemm bf16": lambda: product(gemm.GATED, True),
        "gated gemm bf16, many rows": lambda: product(gemm.GATED_MANY, True),
        "gated gemm fp8": lambda: product(gemm.GATED_FP8, True, is_fp8=True),
        "gated gemm fp32": lambda: product(gemm.GATED_FP32, True, "fp32"),
        "grouped gemm bf16": lambda: product(gemm.PLAIN, False),
        "grouped gemm bf16, many rows": lambda: product(gemm.PLAIN_MANY, False),
        "grouped gemm fp8": lambda: product(gemm.PLAIN_FP8, False, is_fp8=True),
        "grouped gemm fp32": lambda: product(gemm.PLAIN_FP32, False, "fp32"),
    }


def sum_kernels():
    """Sums of pairs back to their sources and into rows, and the merge of returned partials."""
    from data_plane.moe.gpu import sums as sums
    from data_plane.step import triton_returned as returned

    def send_back(is_packed=False):
        names = ("peer_ptr", "epoch_ptr", "error_ptr")
        arguments = {**dict.fromkeys(names, "*i64"), "count_ptr": "*i32", "done_ptr": "*i32"}
        arguments |= {"y_ptr": "*bf16", "slot_ptr": "*i32", "weight_ptr": "*fp32"}
        offsets = ["flag_offset", "hidden_offset", "weight_offset"]
        arguments |= {**dict.fromkeys(offsets, "i64"), **numbers("instance", "num_rows", "width")}
        arguments |= numbers("hidden_stride", "weight_stride", "stage")
        constants = {"IS_PACKED": is_packed, "K": 8, "BLOCK_X": 2048}
        aligned = [*offsets, "num_rows", "width", "hidden_stride"]
        return compile_kernel(sums.return_kernel, arguments, constants, 8, aligned=aligned)

    rows = dict.fromkeys(("shared_ptr", "norm_ptr", "out_ptr", "normed_ptr"), "*bf16")

    def sum_pairs():
        arguments = {"x_ptr": "*bf16", "y_ptr": "*bf16", "slot_ptr": "*i32"}
        arguments |= {"weight_ptr": "*fp32", **rows, "width": "i32", "eps": "fp32"}
        constants = {"K": 8, "V": 1, "HAS_SHARED": False, "BLOCK_X": 8192}
        return compile_kernel(sums.sum_pairs_kernel, arguments, constants, 8, aligned=["width"])

    def sum_returned():
        arguments = {"x_ptr": "*bf16", "peer_ptr": "*i64", "epoch_ptr": "*i64"}
        arguments |= {"slot_ptr": "*i32", **rows, "offset": "i64"}
        names = "instance", "num_instances", "num_slots", "stride", "width"
        arguments |= {**numbers(*names), "eps": "fp32"}
        constants = {"HAS_SHARED": True, "BLOCK_X": 8192}
        aligned = ["offset", "num_slots", "stride", "width"]
        return compile_kernel(sums.sum_returned_kernel, arguments, constants, 8, aligned=aligned)

    def merge():
        arguments = {"out_ptr": "*bf16", "lse_ptr": "*fp32", "peer_ptr": "*i64"}
        arguments |= {"epoch_ptr": "*i64", "slot_ptr": "*i32"}
        offsets = ["partial_offset", "lse_offset"]
        arguments |= dict.fromkeys(offsets, "i64")
        arguments |= numbers("instance", "num_instances", "num_slots")
        arguments |= numbers("partial_stride", "lse_stride")
        constants = {"WIDTH": 128, "BLOCK_V": 128, "BLOCK_N": 32}
        aligned = [*offsets, "num_slots", "partial_stride"]
        return compile_kernel(
            returned.merge_returned_kernel, arguments, constants, 1, aligned=aligned
        )

    return {
        "return sums": send_back, "return sums packed": lambda: send_back(is_packed=True),
        "sum pairs": sum_pairs, "sum returned": sum_returned, "merge returned": merge,
    }  # fmt: skip
