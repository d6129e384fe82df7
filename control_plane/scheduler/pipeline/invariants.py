"""A slow check that all that a pipeline's scheduler keeps up to date follows from its requests."""

from __future__ import annotations

from control_plane.scheduler.invariants import check_commitments, check_frames, check_loads
from control_plane.scheduler.pipeline.layer_policies import stages_of
from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineScheduler
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.table import InstanceTable


def check_pipeline(scheduler: PipelineScheduler, table: InstanceTable) -> None:
    """Check frames, counts and rows, and that the table has what started requests need."""
    state, rows = scheduler._state, scheduler._rows.by_id
    check_frames(state, scheduler._quarantine.frames())
    check_loads(state)
    check_commitments(state)
    assert rows.keys() == state.requests.keys(), "a placed request has no row"
    assert scheduler._starved.keys() <= rows.keys(), "a row starves that is gone"
    assert scheduler.num_in_flight <= scheduler._rows.max_in_flight + 1
    for request_id, row in rows.items():
        request = row.request
        assert not row.is_planned, f"request {request_id} has no token left and is still placed"
        assert request.is_started == (row.last_pass is not None), row
        assert row.next <= request.num_pages * PAGE_SIZE, f"{row} has tokens without a page"
    _check_places(scheduler)
    assert table.digest == scheduler._lowering.digests[0], "a digest is not that of its table"
    if not scheduler._lowering.has_pending:
        frames = {request_id: table.frames(request_id) for request_id in table.pages}
        needed = {
            request_id: {
                run.first_page + i: run.frame + i
                for run in row.request.runs
                for i in range(run.num_pages)
            }
            for request_id, row in rows.items()
            if row.request.is_started
        }
        assert frames == needed, f"the table has {frames}, the requests need {needed}"


def _check_places(scheduler: PipelineScheduler) -> None:
    """Every layer has a place at its stage, no two share one, and all others are copies."""
    places = scheduler.layouts.places
    owners = stages_of(places.split)
    for stage, taken in enumerate(places.places):
        assert len(set(taken.values())) == len(taken) <= scheduler._pipeline.num_places, taken
        assert all(layer in taken for layer, owner in enumerate(owners) if owner == stage), taken
        copies = {layer for layer in taken if owners[layer] != stage}
        assert copies == {layer for other, layer in places.good if other == stage}, taken
