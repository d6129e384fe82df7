"""Mutants of nano-operations and of operators in another order."""

from mutant import Mutant

LANES = ("tests/data_plane/fake/test_hash_lanes.py", "-k", "without_experts or links")

MUTANTS = [
    Mutant(
        name="lanes-share-regions",
        why="both lanes use the regions and epochs of lane 0 (equal epochs)",
        path="data_plane/transport/exchange.py",
        text="return _CHANNELS[self + lane * _LANE_OFFSET]",
        fault="return self",
        tests=LANES,
    ),
    Mutant(
        name="lane-of-the-slot",
        why="the receiver takes a row's lane from its slot, not from the plan",
        path="data_plane/instance/lanes.py",
        text="lanes.append(WindowLane(number, [*rows[begin:end]], lane.q_route, lane.res_route))",
        fault="res_route = [requests[number::2] for requests in table.res_route]\n"
        "lanes.append(WindowLane(number, [*rows[begin:end]], lane.q_route, res_route))",
        tests=LANES,
    ),
    Mutant(
        name="lane-of-a-new-link",
        why="a link that a running row gets is in lane 0, whatever the row's lane is",
        path="control_plane/scheduler/lowering.py",
        text="self.routes.add_links(request.request_id, request.moe_binding, (holder,), lane)",
        fault="self.routes.add_links(request.request_id, request.moe_binding, (holder,))",
        tests=("tests/data_plane/fake/test_hash_lanes.py", "-k", "chaos and always"),
    ),
    Mutant(
        name="one-lane-awaited",
        why="a step of two lanes waits for a put of one lane only: a deadlock",
        path="data_plane/instance/lanes.py",
        text="yield tuple(put for put in awaited.values() if put is not None)",
        fault="yield tuple(put for put in awaited.values() if put is not None)[:1]",
        tests=("tests/data_plane/instance/test_lanes.py", "-k", "goes_first"),
    ),
    Mutant(
        name="a-lane-on-its-own",
        why="an instance decides by its own rows whether it runs two lanes",
        path="data_plane/instance/window_edge.py",
        text="window_lanes(self._table, rows, plan.two_lanes)",
        fault="window_lanes(self._table, rows, plan.two_lanes and len(rows) > 1)",
        tests=LANES,
    ),
    Mutant(
        name="freed-early",
        why="a value is freed after its first use",
        path="data_plane/graph/overlap/recording.py",
        text="last[op.micro_batch, value] = place",
        fault="last.setdefault((op.micro_batch, value), place)",
        tests=("tests/data_plane/graph/overlap/test_engine.py", "-k", "any_order"),
    ),
    Mutant(
        name="merge-slice",
        why="a micro-batch's part of a merged tensor begins one row late",
        path="data_plane/graph/overlap/engine.py",
        text="return self._merged_tensors[number].narrow(0, begin, shape[0])",
        fault="return self._merged_tensors[number].narrow(0, max(begin - 1, 0), shape[0])",
        tests=("tests/data_plane/graph/overlap/test_engine.py", "-k", "bits_of_the_whole"),
    ),
    Mutant(
        name="counter-write-back",
        why="what micro-batches counted is not written back",
        path="data_plane/graph/overlap/engine.py",
        text="self._inputs[number].copy_(self._values[0][number])",
        fault="pass",
        tests=("tests/data_plane/graph/overlap/test_engine.py", "-k", "counter"),
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
    Mutant(
        name="sent-late",
        why="both halves compute before one of them sends: nothing runs beside communication",
        path="nanocp/overlap/policies/orders.py",
        text="if op.tag == NETWORK])",
        fault="if op.tag == None])",
        tests=("tests/data_plane/graph/overlap/test_engine.py", "-k", "leaves_before"),
    ),
    Mutant(
        name="stream-not-awaited",
        why="an operator begins before what it reads has come on another stream",
        path="data_plane/graph/overlap/recording.py",
        text="after=after[place],",
        fault="after=(),",
        tests=("tests/data_plane/graph/overlap/test_streams.py", "-k", "reads_waits and NanoFlow"),
    ),
    Mutant(
        name="schedule-without-layers",
        why="a searched schedule forgets which layer a part of the batch is in",
        path="nanocp/overlap/policies/scheduled.py",
        text="layer * self._period_us + start_us",
        fault="start_us",
        tests=("tests/data_plane/graph/overlap/test_scheduled.py",),
    ),
]
