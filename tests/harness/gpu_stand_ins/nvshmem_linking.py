"""Compiles the put between nodes for sm_90, with NVSHMEM's own library linked in, without a GPU.

`python tests/harness/gpu_stand_ins/nvshmem_linking.py` prints one JSON object. It takes half a
minute, and is a process of its own, because the interpreter (TRITON_INTERPRET) is chosen when a
kernel is decorated.
"""

import json
import re
import time

from harness.kernels.compiled_kernel import resource_usage


def linked():
    """Compile and link; what came out of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from data_plane.startup.experimental.nvshmem_put import forward_kernel, link_options

    kinds = dict.fromkeys(("peer_ptr", "epoch_ptr", "error_ptr"), "*i64")
    kinds |= {"count_ptr": "*i32", "place_ptr": "*i64", "instance": "i32", "ahead": "i32"}
    assert [*kinds] == forward_kernel.arg_names
    begin_s = time.monotonic()
    compiled = triton.compile(
        ASTSource(fn=forward_kernel, signature=kinds),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, **link_options()},
    )
    ptx = compiled.asm["ptx"]
    entry = ptx[ptx.index(".entry forward_kernel") :]
    return {
        "triton": triton.__version__,
        "seconds": round(time.monotonic() - begin_s, 1),
        "cubin_bytes": len(compiled.asm["cubin"]),
        "unresolved": re.findall(r"^\.extern \.func.*?(\w+)\s*\(?$", ptx, re.MULTILINE),
        "has_device_state": "nvshmemi_device_state_d" in ptx,
        "barriers": len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|red)\b", entry)),
        **resource_usage(compiled.asm["cubin"], "forward_kernel"),
    }


if __name__ == "__main__":
    print(json.dumps(linked()))
