"""Running rows with links, in the order in which policies look at them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from control_plane.scheduler.state.request import Request
from nanocp.values.plan import TargetRun


class LinkedRows:
    """The running rows whose KV binding is more than their MoE binding."""

    def __init__(self, num_instances: int) -> None:
        self.by_degree: list[tuple[int, int]] = []
        """(CP degree, request id), ascending."""
        self.runs: list[list[tuple[int, int, TargetRun]]] = [[] for _ in range(num_instances)]
        """By instance: (-pages, request id, run), ascending, so that the longest comes first."""

    def update(
        self, request: Request, cut: Sequence[TargetRun] = (), added: Sequence[TargetRun] = ()
    ) -> None:
        """Record a row that starts, or whose bindings or runs changed while it runs.

        cut, added: runs that it lost or gained since the last call.
        """
        degree = len(request.pages_on)
        if degree > 1 or request.moe_binding not in request.pages_on:
            self._list(request, (degree, request.request_id), cut, added)
        elif request.linked_key is not None:
            self._list(request, None, cut, added)

    def remove(self, request: Request) -> None:
        """Remove a row that stops. A row without links is ignored."""
        if request.linked_key is not None:
            self._list(request, None, (), ())

    def _list(
        self,
        request: Request,
        key: tuple[int, int] | None,
        cut: Sequence[TargetRun],
        added: Sequence[TargetRun],
    ) -> None:
        old, request.linked_key = request.linked_key, key
        if old != key:
            if old is not None:
                del self.by_degree[bisect_left(self.by_degree, old)]
            if key is not None:
                insort(self.by_degree, key)
        if old is None:
            cut, added = (), request.runs
        elif key is None:
            cut, added = [*cut, *(run for run in request.runs if run not in added)], ()
        for run in cut:
            runs = self.runs[run.instance]
            del runs[bisect_left(runs, (-run.num_pages, request.request_id, run))]
        for run in added:
            insort(self.runs[run.instance], (-run.num_pages, request.request_id, run))
