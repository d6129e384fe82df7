"""Mutants of the pipeline: of passes, of stages, and of layers that change their stage."""

from mutant import Mutant

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
]
