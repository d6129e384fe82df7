"""Changes of an instance's table <-> protobuf, both ways, exactly.

Enters: values of nanocp.values.table_changes, or messages of nanocp.wire.v1. Leaves: the other of
the two. Does not know: plans, what the changes mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanocp.values.table_changes import (
    HolderChange,
    PageClear,
    PageRun,
    RouteChange,
    RowChange,
    TableChanges,
)
from nanocp.wire.v1 import cluster_pb2 as pb


def table_changes_to_wire(changes: TableChanges) -> pb.TableChanges:
    """The changes as columns, so that a plan is a few packed arrays."""
    return pb.TableChanges(
        forgotten=changes.forgotten,
        row_index=[change.row for change in changes.rows],
        row_request=[_request_or_zero(change.request_id) for change in changes.rows],
        row_lane=_lanes_to_wire(changes.rows),
        q_route=_route_to_wire(changes.q_route),
        res_route=_route_to_wire(changes.res_route),
        page_request=[run.request_id for run in changes.pages],
        page_first=[run.first_page for run in changes.pages],
        page_count=[run.num_pages for run in changes.pages],
        page_frame=[run.frame for run in changes.pages],
        holders_forgotten=changes.holders_forgotten,
        holder_request=[change.request_id for change in changes.holders],
        holder_first_page=[change.first_page for change in changes.holders],
        holder_instance=[change.instance for change in changes.holders],
        cleared_request=[clear.request_id for clear in changes.cleared],
        cleared_first_page=[clear.first_page for clear in changes.cleared],
        cleared_count=[clear.num_pages for clear in changes.cleared],
    )


def table_changes_from_wire(message: pb.TableChanges) -> TableChanges:
    """The changes in the message.

    Raises ValueError if columns that belong together differ in length.
    """
    pages = zip(
        message.page_request,
        message.page_first,
        message.page_count,
        message.page_frame,
        strict=True,
    )
    holders = zip(
        message.holder_request, message.holder_first_page, message.holder_instance, strict=True
    )
    cleared = zip(
        message.cleared_request, message.cleared_first_page, message.cleared_count, strict=True
    )
    return TableChanges(
        forgotten=tuple(message.forgotten),
        rows=tuple(
            RowChange(row, request or None, lane)
            for row, request, lane in zip(
                message.row_index,
                message.row_request,
                message.row_lane or [0] * len(message.row_index),
                strict=True,
            )
        ),
        q_route=_route_from_wire(message.q_route),
        res_route=_route_from_wire(message.res_route),
        cleared=tuple(PageClear(*clear) for clear in cleared),
        pages=tuple(PageRun(*run) for run in pages),
        holders_forgotten=tuple(message.holders_forgotten),
        holders=tuple(HolderChange(*change) for change in holders),
    )


def _route_to_wire(route: Sequence[RouteChange]) -> pb.RouteChanges:
    return pb.RouteChanges(
        peer=[change.peer for change in route],
        slot=[change.slot for change in route],
        request=[_request_or_zero(change.request_id) for change in route],
        lane=_lanes_to_wire(route),
    )


def _route_from_wire(message: pb.RouteChanges) -> tuple[RouteChange, ...]:
    lanes = message.lane or [0] * len(message.peer)
    columns = zip(message.peer, message.slot, message.request, lanes, strict=True)
    return tuple(
        RouteChange(peer, slot, request or None, lane) for peer, slot, request, lane in columns
    )


def _lanes_to_wire(changes: Sequence[RowChange] | Sequence[RouteChange]) -> list[int]:
    """The column of lanes; empty if every change is in lane 0."""
    lanes = [change.lane for change in changes]
    return lanes if any(lanes) else []


def _request_or_zero(request_id: int | None) -> int:
    # 0 clears an entry on the wire, so that no request may have it.
    assert request_id != 0, "request ids are positive"
    return request_id or 0
