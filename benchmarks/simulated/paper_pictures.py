"""Pictures of many runs, as the paper's Figures 12 and 16 have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanocp.simulator.reports.pictures import (
    PERCENT,
    add_legend,
    make_grid,
    make_panels,
    style_of,
)


def attainment(
    curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], target: float
) -> Figure:
    """(rate, share of requests within the SLO) by workload and policy (Figure 12)."""
    figure, panels = make_grid(len(curves), 3.6, 2.5, sharey=True)
    for axes, (workload, by_policy) in zip(panels, curves.items(), strict=True):
        _plot(axes, by_policy)
        axes.axhline(target, color="#777777", linewidth=1, label=f"{target:.0%}")
        axes.set(title=workload, xlabel="requests/s", ylim=(0, 1.04))
    figure.supylabel("requests within the SLO", fontsize="medium")
    panels[0].yaxis.set_major_formatter(PERCENT)
    add_legend(figure, panels[0], 4)
    return figure


def scheduler_by_rows(points: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """(rows an instance, scheduling's share of the step) by policy (Figure 16)."""
    figure, (axes,) = make_panels(1, 1, 5.6, 3.0)
    _plot(axes, points)
    axes.set(
        xlabel="rows an instance",
        ylabel="scheduler's time / step time",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend()
    return figure


def _plot(axes: Axes, by_policy: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for policy, points in by_policy.items():
        color, dashes, marker = style_of(policy)
        axes.plot(
            *zip(*points, strict=True),
            color=color,
            linestyle=dashes,
            marker=marker,
            ms=4,
            label=policy,
        )
