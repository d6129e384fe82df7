"""Faults in the launches of a captured layer, and in what a step without links leaves out."""

from mutant import Mutant

_LAYER = "tests/data_plane/kernels/test_gpu_layer.py"
_STEP = "tests/data_plane/kernels/test_gpu_step.py"
_TOKENS = (_STEP, "-k", "wherever_pages and exchange")
_PAIRS, _SUMS = "data_plane/moe/gpu/pairs.py", "data_plane/moe/gpu/sums.py"
_LATENT = "data_plane/kv/triton_latent.py"

OF_LAYER = [
    Mutant(
        name="norm-unrounded",
        why="a norm reads the sum before it is rounded, which no later layer sees",
        path="data_plane/kernels/norm.py",
        text="x = rounded.to(tl.float32)",
        fault="pass",
        tests=(_LAYER, "-k", "sums_and_norms"),
    ),
    Mutant(
        name="latent-eps",
        why="norms of latents take the model's epsilon, which is not theirs",
        path="data_plane/step/gpu_rows.py",
        text="slot_B, self._slots(place), LATENT_NORM_EPS, keeps_kv,",
        fault="slot_B, self._slots(place), 1e-5, keeps_kv,",
        tests=(_LAYER, "-k", "as_plain_ones"),
    ),
    Mutant(
        name="rotate-halves",
        why="queries are rotated in halves where the checkpoint has pairs side by side",
        path=_LATENT,
        text="IS_INTERLEAVED=rope.is_interleaved, BLOCK_H=_BLOCK_H,",
        fault="IS_INTERLEAVED=False, BLOCK_H=_BLOCK_H,",
        tests=(_LAYER, "-k", "absorbed_queries"),
    ),
    Mutant(
        name="latent-scale",
        why="a group of FP8 latent KV gets the scale of its neighbour",
        path=_LATENT,
        text="tl.store(scale_ptr + slot * (TOKEN // 4) + group, scale)",
        fault="tl.store(scale_ptr + slot * (TOKEN // 4) + (group ^ 1), scale)",
        tests=(_LAYER, "-k", "test_latent_rows"),
    ),
    Mutant(
        name="gate-low",
        why="the last of a weight's three parts is left out: scores lose fp32's precision",
        path="data_plane/moe/gpu/gate.py",
        text="acc = tl.dot(x, low, acc)",
        fault="pass",
        tests=(_LAYER, "-k", "precision"),
    ),
    Mutant(
        name="gate-best-alone",
        why="groups are chosen by their best expert where their best two count",
        path="data_plane/moe/gpu/gate.py",
        text='group_score += tl.max(tl.where(others, choice, float("-inf")), 1)',
        fault="pass",
        tests=(_LAYER, "-k", "gate_chooses"),
    ),
    Mutant(
        name="pairs-dead",
        why="a row that is not live visits its experts",
        path=_PAIRS,
        text="is_live = is_row & (tl.load(live_ptr + t, mask=is_row, other=0) != 0)",
        fault="is_live = is_row",
        tests=(_LAYER, "-k", "live_rows"),
    ),
    Mutant(
        name="pairs-nowhere",
        why="a pair whose expert is elsewhere keeps the slot of an earlier layer",
        path=_PAIRS,
        text="if e == 0:",
        fault="if e < 0:",
        tests=(_LAYER, "-k", "live_rows"),
    ),
    Mutant(
        name="pairs-parity",
        why="rows are read in the other half of the regions",
        path=_PAIRS,
        text="first_row = (tl.load(epoch_ptr) & 1).to(tl.int32) * num_instances * num_rows",
        fault="first_row = 0",
        tests=_TOKENS,
    ),
    Mutant(
        name="return-parity",
        why="sums are put into the other half of the regions",
        path=_SUMS,
        text="parity = (epoch & 1) * num_instances",
        fault="parity = 0",
        tests=_TOKENS,
    ),
    Mutant(
        name="sum-parity",
        why="returned sums are read in the other half of the regions",
        path=_SUMS,
        text="first_region = (tl.load(epoch_ptr) & 1).to(tl.int32) * num_instances",
        fault="first_region = 0",
        tests=_TOKENS,
    ),
    Mutant(
        name="merge-parity",
        why="returned partials are read in the other half of the regions",
        path="data_plane/step/triton_returned.py",
        text="first_region = (tl.load(epoch_ptr) & 1).to(tl.int32) * num_instances",
        fault="first_region = 0",
        tests=(_STEP, "-k", "returned_partials"),
    ),
    Mutant(
        name="return-counter",
        why="programs of a return are counted with those of a dispatch",
        path=_SUMS,
        text="exchange.done(Channel.COMBINE)",
        fault="exchange.done(Channel.DISPATCH)",
        tests=("tests/data_plane/kernels/test_routed_exchange.py", "-k", "counted_apart"),
    ),
    Mutant(
        name="skip-epochs",
        why="a step without links does not count its layers, and instances' epochs part",
        path="data_plane/transport/gpu/cuda_ipc.py",
        text="self.epoch_C[Channel.Q : Channel.RES + 1].add_(num_layers)",
        fault="pass",
        tests=(_LAYER, "-k", "equal_epochs"),
    ),
    Mutant(
        name="shared-twice",
        why="a shared expert that lies among the experts runs apart too",
        path="data_plane/moe/gpu/gpu_weights.py",
        text="shared = None if joins else layer.moe.shared",
        fault="shared = layer.moe.shared",
        tests=(_LAYER, "-k", "one_instance_alone"),
    ),
    Mutant(
        name="scale-order",
        why="scales of rows lie row by row, and DeepGEMM would transpose them in each layer",
        path=_PAIRS,
        text="scale.transpose(1, 2)[:, :num_slots]",
        fault="scale.transpose(1, 2)[:, :num_slots].contiguous()",
        tests=(_LAYER, "-k", "deep_gemm"),
    ),
]
