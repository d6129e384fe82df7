"""Counts the launches of a layer on a GPU, without one: tensors are meta tensors, nothing runs.

`python tests/harness/gpu/launch_counts.py` prints one JSON object: case -> the launches of a MoE
layer, by name, at DeepSeek-V3's widths; and `order`, the names of one layer in order. It is a
process of its own because the interpreter is chosen when a kernel is decorated. What only makes
views or allocates launches nothing.
"""

import collections
import json
from dataclasses import replace

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from benchmarks.gpu import gpu_shapes, gpu_step
from data_plane.graph.buckets import Bucket
from harness.gpu.launch_compilation import META, stand_in_for_a_card

FREE = {
    *("view", "_unsafe_view", "transpose", "t", "slice", "select", "expand", "split", "permute"),
    *("split_with_sizes", "unbind", "as_strided", "unsqueeze", "squeeze", "alias", "detach"),
    *("empty", "new_empty", "empty_like", "empty_strided", "chunk", "_reshape_alias", "narrow"),
}
MAYBE_FREE = {"flatten", "reshape", "contiguous"}
"""They launch a copy where a view cannot do."""
CASES = {
    "alone": (1, Bucket(64, 0, has_links=False)),
    "two, no links": (2, Bucket(64, 0, has_links=False)),
    "two, sends": (2, Bucket(64, 0)),
    "two, sends and receives": (2, Bucket(64, 32)),
}


def storage_of(tensor):
    """What tells apart tensors that share memory and others."""
    return tensor.untyped_storage()._cdata


class Launches(TorchDispatchMode):
    """Names of what torch's operators and Triton's kernels launch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, found = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        is_view = name in MAYBE_FREE and storage_of(found) == storage_of(args[0])
        if name not in FREE and not is_view:
            self.names.append(name)
        return found


def launches_of_step(num_layers, num_instances, bucket):
    """List the launches of a step of one instance, in order."""
    model = gpu_shapes.deepseek_v3(num_layers=num_layers)
    model = replace(model, num_experts=num_instances * model.num_experts)
    card = gpu_step.Card(replace(gpu_step.FULL, model=model))
    card.device, card.num_parts = META, None
    parts, *_ = card.parts(model, num_instances, 64, 4096)
    with Launches() as found:
        JITFunction.run = lambda kernel, *args, **keys: found.names.append(kernel.__name__)
        for _ in parts.step.phases(parts.pool.context(bucket)):
            pass
    return found.names


def main():
    stand_in_for_a_card()
    JITFunction.run = lambda *args, **keys: None
    counts = {}
    for case, (num_instances, bucket) in CASES.items():
        four, five = (
            collections.Counter(launches_of_step(num_layers, num_instances, bucket))
            for num_layers in (4, 5)
        )
        counts[case] = dict(five - four)
    # The last layer's, in order; what comes before its attention is of the layer before.
    last = launches_of_step(4, *CASES["two, sends and receives"])
    counts["order"] = last[-last[::-1].index("latent_kernel") :]
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
