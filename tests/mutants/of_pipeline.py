"""Mutants of the pipeline: of passes, of stages, and of layers that change their stage."""

from mutant import Mutant

MOVES = (
    "tests/data_plane/fake/test_hash_pipeline.py::test_every_token_is_right_while_layers_move",
)
# Torch's kernels: a gate of the compiled ones that gets NaN ends the process.
SPLITS = ("tests/data_plane/step/test_stage.py", "-k", "with_kv_heads and 2-torch")
SCHEDULER = ("tests/control_plane/scheduler/pipeline/test_pipeline_scheduler.py", "-k")

OF_PIPELINE = [
    Mutant(
        name="racing-head",
        why="the first stage races ahead of the last with ever smaller passes",
        path="control_plane/scheduler/pipeline/pipeline_scheduler.py",
        text="self.num_in_flight <= self._pipeline.num_stages",
        fault="self.num_in_flight <= 10 * self._pipeline.num_stages",
        tests=(*SCHEDULER, "one_more_waits"),
    ),
    Mutant(
        name="unknown-token",
        why="a pass begins before the token that one of its rows begins with is known",
        path="control_plane/scheduler/pipeline/pipeline_scheduler.py",
        text="max(sampled, number - self._pipeline.num_stages, -1)",
        fault="max(number - self._pipeline.num_stages, -1)",
        tests=(*SCHEDULER, "a_row_alone"),
    ),
    Mutant(
        name="unplanned-prefix",
        why="pages of a prompt are shared before a pass is planned that writes them",
        path="control_plane/scheduler/pipeline/pipeline_scheduler.py",
        text="self.prefix_sharing.written(row.request, row.next)",
        fault="self.prefix_sharing.written(row.request)",
        tests=(*SCHEDULER, "a_shared_prefix"),
    ),
    Mutant(
        name="filled-twice",
        why="a layer that runs twice over the same tokens is not seen",
        path="data_plane/instance/stage_edge.py",
        text="if before[-1] != offset or not (before[:-1] == PAGE_SIZE).all():",
        fault="if False:",
        tests=("tests/data_plane/instance/test_stage_edge.py",),
    ),
    Mutant(
        name="frames-under-a-send",
        why="frames are reused while a stage still sends a layer's KV from them (quarantine)",
        path="control_plane/scheduler/pipeline/pipeline_scheduler.py",
        text="self._quarantine.hold(frames, row.last_pass, (0,), None, ())",
        fault="self._quarantine.hold(frames, None, (0,), None, ())",
        tests=(*SCHEDULER, "a_row_that_stopped"),
    ),
    Mutant(
        name="stale-copy",
        why="a copy of a layer's KV counts as good though its frame holds another page",
        path="control_plane/scheduler/pipeline/layer_places.py",
        text="self.good[key] &= kept",
        fault="pass",
        tests=MOVES,
    ),
    Mutant(
        name="open-page-ahead",
        why="a page that is still written goes ahead of the mark and not with it",
        path="control_plane/scheduler/pipeline/pipeline_scheduler.py",
        text="num_full = row.next // PAGE_SIZE - run.first_page",
        fault="num_full = num_pages(row.next) - run.first_page",
        tests=MOVES,
    ),
    Mutant(
        name="open-page-left",
        why="the last page of a row is left out at the mark",
        path="control_plane/scheduler/pipeline/pipeline_scheduler.py",
        text="num_live = num_pages(row.next) - run.first_page",
        fault="num_live = row.next // PAGE_SIZE - run.first_page",
        tests=MOVES,
    ),
    Mutant(
        name="cached-pages-left",
        why="pages that nobody has but that can be shared stay behind when their layer moves",
        path="control_plane/scheduler/pipeline/pipeline_scheduler.py",
        text="frames_in((frame, 1) for frame, *_ in self._state.frames[0].cached_pages())",
        fault="0",
        tests=MOVES,
    ),
    Mutant(
        name="no-wait",
        why="a stage runs a layer that it got before all of its KV is there",
        path="data_plane/instance/stage_edge.py",
        text="return layer not in self._num_missing",
        fault="return True",
        tests=MOVES,
    ),
    Mutant(
        name="late-page",
        why="KV that was meant for an earlier page of a frame is taken",
        path="data_plane/instance/stage_edge.py",
        text="self._coming[key] = False",
        fault="pass",
        tests=("tests/data_plane/instance/test_stage_edge.py",),
    ),
    Mutant(
        name="layout-ignored",
        why="hidden rows of another layout or layer are run",
        path="data_plane/instance/stage_edge.py",
        text="if received[0][:3] != expected:",
        fault="if received[0][0] != expected[0]:",
        tests=("tests/data_plane/instance/test_stage_edge.py",),
    ),
    Mutant(
        name="window-kept",
        why="another wish in between does not begin the window again",
        path="control_plane/scheduler/pipeline/layout_changes.py",
        text="self._wish, self._num_wished = wish, 0",
        fault="self._wish = wish",
        tests=("tests/control_plane/scheduler/pipeline/test_layout_changes.py",),
    ),
    Mutant(
        name="deaf-wait-for-rows",
        why="a stage takes no KV while it waits, and two stages can wait for each other",
        path="data_plane/instance/stage_edge.py",
        text="""while not is_here():
            self.progress()
            if is_here():
                break
            self.awaited""",
        fault="while not is_here():\n    self.awaited",
        tests=("tests/data_plane/instance/test_stage_edge.py",),
    ),
    Mutant(
        name="weights-of-another-layer",
        why="a layer that comes to a stage runs with another layer's weights",
        path="data_plane/model/stage_weights.py",
        text="self._thread.submit(self._read, layer)",
        fault="self._thread.submit(self._read, layer - 1)",
        tests=SPLITS,
    ),
    Mutant(
        name="place-off-by-one",
        why="a layer reads the KV of the place before its own",
        path="data_plane/step/stage.py",
        text="pool_FSW = self._kernels, self._frames.layers[place]",
        fault="pool_FSW = self._kernels, self._frames.layers[place - 1]",
        tests=SPLITS,
    ),
    Mutant(
        name="chunk-without-prefix",
        why="a chunk of a prompt attends to its own tokens only",
        path="data_plane/step/stage.py",
        text="flatten(0, 1)[:num_tokens]",
        fault="flatten(0, 1)[num_tokens - part.stop + part.start : num_tokens]",
        tests=("tests/data_plane/step/test_stage.py", "-k", "kv_of_chunks"),
    ),
    Mutant(
        name="hidden-rows-without-layout",
        why="hidden rows do not say in which layout they were made",
        path="data_plane/kv/stage_rings.py",
        text="rows.layout << 32 | rows.next_layer",
        fault="rows.next_layer",
        tests=("tests/data_plane/kv/test_stage_rings.py",),
    ),
    Mutant(
        name="policy-against-operator",
        why="a policy takes back the layout that an operator asked for",
        path="control_plane/scheduler/pipeline/layout_changes.py",
        text="if self._asked is not None:\n    return",
        fault="pass",
        tests=("tests/control_plane/scheduler/pipeline/test_layout_changes.py",),
    ),
    Mutant(
        name="simulated-kv-not-awaited",
        why="a simulated stage runs a layer before its KV has come",
        path="nanocp/simulator/pipeline/stages.py",
        text="if stage.expected.get(stage.next_layer, 0) > 0:",
        fault="if False:",
        tests=("tests/nanocp/simulator/pipeline/test_stages.py", "-k", "waits_there"),
    ),
    Mutant(
        name="cached-prefix-forgotten",
        why="the predictor does not know what a chunk's cached prefix costs",
        path="control_plane/scheduler/pipeline/predictor.py",
        text="cached += first",
        fault="cached += 0",
        tests=("tests/nanocp/simulator/pipeline/test_fit.py", "-k", "what_a_pass_holds"),
    ),
]
