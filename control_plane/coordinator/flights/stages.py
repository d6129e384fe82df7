"""The stages of a pipeline as an operator sees them: their layers, reports, a layout to come."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from control_plane.observe.metrics.stages import StageMetrics
from control_plane.scheduler.pipeline.layout_changes import LayoutChanges
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import layers_of
from nanocp.values.plan import WindowDone


class StageLayouts:
    """The layout that the scheduler has, and the one that an operator waits for."""

    def __init__(
        self, pipeline: PipelineConfig, layouts: LayoutChanges, metrics: StageMetrics
    ) -> None:
        self.pipeline = pipeline
        self._layouts, self._metrics = layouts, metrics
        self.reports: list[WindowDone | None] = [None] * pipeline.num_stages
        """The latest report of each stage."""
        self._asked: tuple[tuple[int, ...], Future[None]] | None = None
        """The layout that an operator waits for; the future is cancelled when it waits no more."""

    def want_layout(self, split: tuple[int, ...]) -> Future[None]:
        """Let layers move to another layout of stages; done when every stage has reported it.

        The scheduler hears of it by LayoutWanted. Raises ValueError saying why they cannot.
        """
        if self._asked is not None and not self._asked[1].done():
            raise ValueError("another layout is asked for already; ask again later")
        if obstacle := self._layouts.obstacle(split):
            raise ValueError(obstacle)
        self._asked = split, Future()
        return self._asked[1]

    def answer_operator(self) -> None:
        """Let the operator know if the layout is reached, or is asked for no more."""
        layouts = self._layouts
        if self._asked is not None:
            split = self._asked[0]
            if split == layouts.places.split and not layouts.is_moving:
                self.answer(None)
            elif layouts.asked != split:
                self.answer(
                    RuntimeError(
                        "a stage was lost meanwhile, and layers are where they were at the start; "
                        "ask for a layout in between first"
                    )
                )

    def answer(self, error: RuntimeError | None) -> None:
        """End an operator's wait, with the error if there is one."""
        if self._asked is not None and not self._asked[1].done():
            if error is None:
                self._asked[1].set_result(None)
            else:
                self._asked[1].set_exception(error)
        self._asked = None

    def now(self) -> list[dict[str, Any]]:
        """For each stage, its layers and what it does."""
        layouts, stages = self._layouts, []
        for stage, report in enumerate(self.reports):
            layers = layers_of(layouts.places.split, stage)
            stages.append(
                {
                    "stage": stage,
                    "first_layer": layers.start,
                    "num_layers": len(layers),
                    "max_layers": self.pipeline.num_places,
                    "pass_ms": report.step_us / 1e3 if report else None,
                    "waits": self._metrics.shares(stage),
                    "layout": layouts.layout,
                    "layout_changes": layouts.num_changes,
                    "is_moving": layouts.is_moving,
                    "slowness": layouts.speeds.slowness[stage],
                }
            )
        return stages
