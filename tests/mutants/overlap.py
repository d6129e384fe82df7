"""Mutants of nano-operations and of operators in another order."""

from mutant import Mutant

MUTANTS = [
    Mutant(
        name="freed-early",
        why="a value is freed one use before its last",
        path="data_plane/graph/overlap/engine.py",
        text="if not uses[number]:\n    values[number] = None",
        fault="if uses[number] <= 1:\n    values[number] = None",
        tests=("tests/data_plane/graph/overlap/test_engine.py",),
    ),
    Mutant(
        name="merge-slice",
        why="a micro-batch's part of a merged tensor begins one row late",
        path="data_plane/graph/overlap/engine.py",
        text="return self._buffers[number].narrow(0, begin, shape[0])",
        fault="return self._buffers[number].narrow(0, max(begin - 1, 0), shape[0])",
        tests=("tests/data_plane/graph/overlap/test_engine.py",),
    ),
    Mutant(
        name="counter-write-back",
        why="what micro-batches counted is not written back",
        path="data_plane/graph/overlap/engine.py",
        text="self._inputs[number].copy_(self._values[0][number])",
        fault="pass",
        tests=("tests/data_plane/graph/overlap/test_engine.py",),
    ),
    Mutant(
        name="whole-gpu-twice",
        why="nano-operations that run at once may have more than the whole GPU",
        path="nanocp/overlap/search.py",
        text="program.add(used <= 1)",
        fault="program.add(used <= 1.1)",
        tests=("tests/nanocp/overlap/test_search.py",),
    ),
    Mutant(
        name="range-test",
        why="nano-operations wait for those of other rows too",
        path="nanocp/overlap/operations.py",
        text="return self.begin < other.end and other.begin < self.end",
        fault="return True",
        tests=("tests/nanocp/overlap/test_search.py",),
    ),
]
