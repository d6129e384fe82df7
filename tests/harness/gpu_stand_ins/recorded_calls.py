"""Records what a step launches, to run it again over the same memory, as a captured graph does.

For kernels under the interpreter: every launch and every operation of torch is run again with the
same tensors, so nothing that the host computed on the way is computed anew.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from harness.gpu_stand_ins.nixl_ep_stand_in import Kernels

_LEFT_OUT = ("aten::empty", "aten::new_empty")


class _Recorder(TorchDispatchMode):
    def __init__(self, calls):
        super().__init__()
        self._calls, self.is_in_kernel = calls, False

    @contextmanager
    def inside_a_kernel(self):
        """What is done inside is the kernel's own."""
        self.is_in_kernel = True
        try:
            yield
        finally:
            self.is_in_kernel = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        keys = kwargs or {}
        found = func(*args, **keys)
        if self.is_in_kernel or func._schema.name.startswith(_LEFT_OUT):
            return found
        assert "_local_scalar_dense" not in func._schema.name, "the host read a number"
        if func._schema.is_mutable:
            self._calls.append(lambda: func(*args, **keys))
        else:
            # A view says the same as what it is of. Some operations make one or a copy.
            of = {_memory(tensor) for tensor in _tensors(tree_leaves((args, keys)))}
            tensors = _tensors(found)
            if tensors and not {*map(_memory, tensors)} <= of:
                self._calls.append(lambda: _copy(tensors, _tensors(func(*args, **keys))))
        return found


def _tensors(found):
    parts = found if isinstance(found, tuple | list) else [found]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def _copy(tensors, values):
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


@contextmanager
def recorded(calls):
    """Append to `calls` all that is launched inside."""
    recorder, run = _Recorder(calls), InterpretedFunction.run

    def noted(kernel, *args, **keys):
        calls.append(lambda: run(kernel, *args, **keys))
        with recorder.inside_a_kernel():
            return run(kernel, *args, **keys)

    def noted_call(call):
        calls.append(call)
        with recorder.inside_a_kernel():
            call()

    InterpretedFunction.run, of_package = noted, Kernels.run
    Kernels.run = noted_call
    try:
        with recorder:
            yield
    finally:
        InterpretedFunction.run, Kernels.run = run, of_package


class RecordedSteps:
    """Steps by phases: the first of an instance in a bucket is recorded, later ones are that one.

    Where a step waits for peers, the generator yields, as GpuStep.phases does.
    """

    def __init__(self):
        self.phases_of = {}
        """(instance, bucket) -> for each phase, its calls"""

    def phases(self, instance, context):
        """Run the step of an instance."""
        key = instance, context.bucket
        if key in self.phases_of:
            return self._again(self.phases_of[key])
        return self._first(key, instance.step.phases(context))

    def _first(self, key, step):
        phases, is_running = [], True
        while is_running:
            phases.append([])
            with recorded(phases[-1]):
                is_running = next(step, StopIteration) is not StopIteration
            if is_running:
                yield
        self.phases_of[key] = phases

    def _again(self, phases):
        for number, calls in enumerate(phases):
            if number:
                yield
            with torch.inference_mode():
                for call in calls:
                    call()
