"""Faults in the compiled kernels, and in what they are built from."""

from mutant import Mutant

ROUTED = "tests/data_plane/kernels/test_routed_exchange.py"
STORED = "tests/data_plane/native/test_stored_bf16.py"

MUTANTS = [
    Mutant(
        name="bf16-pairs",
        why="with AVX2, the second k of a pair of bf16 weights is multiplied by the first value",
        path="data_plane/native/linear.h",
        text="return splat(x[step * 2 + part]);",
        fault="return splat(x[step * 2]);",
        tests=("tests/data_plane/native/test_kernels.py", "-k", "test_linear and bfloat16"),
    ),
    Mutant(
        name="instruction-set",
        why="cpu_kernels: avx2 runs AVX-512, so nothing measures or tests the other form",
        path="data_plane/native/build.py",
        text="for name in [wanted] if wanted else _SETS:",
        fault="for name in _SETS:",
        tests=("tests/data_plane/native/test_kernels.py", "-k", "gets_avx2"),
    ),
    Mutant(
        name="pairs-not-parted",
        why="a bf16 weight widened in a register keeps the bits of its neighbour below it",
        path="data_plane/native/avx512.h",
        text="is_second ? _mm512_and_si512(words, _mm512_set1_epi32(int(0xFFFF0000)))",
        fault="is_second ? words",
        tests=(STORED, "-k", "test_linear"),
    ),
    Mutant(
        name="fp8-latent-scale",
        why="a group of values of FP8 latent KV is multiplied by the scale of its neighbour",
        path="data_plane/attention/triton_mla.py",
        text="(STRIDE // 4) + group[None, :]",
        fault="(STRIDE // 4) + (group[None, :] ^ 1)",
        tests=("tests/data_plane/kernels/test_kernels_interpreted.py", "-k", "fp8"),
    ),
    Mutant(
        name="append-after-error",
        why="behind a wait that failed, a step writes over committed KV of earlier positions",
        path="data_plane/graph/triton_tables.py",
        text="tl.where(has_tail & is_live & is_right, frame",
        fault="tl.where(has_tail & is_live, frame",
        tests=("tests/data_plane/kernels/test_gpu_step.py", "-k", "behind_a_wait"),
    ),
    Mutant(
        name="one-matrix-in-fp32",
        why="a checkpoint of which some matrices are fp32 has those rounded to bf16",
        path="data_plane/model/weights.py",
        text="return all(reader.is_bf16(name)",
        fault="return any(reader.is_bf16(name)",
        tests=(STORED, "-k", "one_matrix"),
    ),
    Mutant(
        name="gpu-deaf-wait",
        why="a wait on a GPU does not see that its term is over (bounded waits)",
        path="data_plane/transport/triton_exchange.py",
        text="is_over = is_term_over(peer_ptr, num_instances)",
        fault="is_over = 0",
        tests=(ROUTED, "-k", "wait_ends_with_its_term and not polls"),
    ),
    Mutant(
        name="gpu-base-kept",
        why="a captured step writes to the memory of the term before (terms)",
        path="data_plane/transport/cuda_ipc.py",
        text="self.table.copy_(torch.tensor(words, dtype=torch.int64))",
        fault="self.table = torch.tensor(words, dtype=torch.int64)",
        tests=(ROUTED, "-k", "recorded_layer"),
    ),
    Mutant(
        name="gpu-absent-awaited",
        why="a step on a GPU awaits an instance that is not in the term (bounded waits)",
        path="data_plane/transport/triton_exchange.py",
        text="is_awaited = tl.where(error == 0, address, 0) != 0",
        fault="is_awaited = tl.where(error == 0, source, num_instances) < num_instances",
        tests=(ROUTED, "-k", "neither_written"),
    ),
    Mutant(
        name="fp8-scales-by-row",
        why="DeepGEMM launches a kernel that lays out the scales of a dense layer's rows",
        path="data_plane/kernels/fp8.py",
        text="return values_BX, scale_KB.T[:num_rows]",
        fault="return values_BX, scale_KB.T[:num_rows].contiguous()",
        tests=("tests/data_plane/kernels/test_dense_fp8.py", "-k", "within_the_error"),
    ),
    Mutant(
        name="fp8-broken-blocks",
        why="two weights of one layer share a block, and one of its scales is lost",
        path="data_plane/model/weights.py",
        text="and not any(self._shapes[name][0] % block[0] for name in names[:-1])",
        fault="and True",
        tests=("tests/data_plane/model/test_fp8_checkpoint.py", "-k", "broken_blocks"),
    ),
]
