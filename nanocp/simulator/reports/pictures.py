"""Matplotlib figures of simulated runs, like those of the paper's section 6, for any policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from nanocp.simulator.costs.cost import LayerTime
from nanocp.simulator.outcome import percentile
from nanocp.simulator.reports.timeline import TimelineRecorder
from nanocp.values.plan import PAGE_SIZE

Runs = Mapping[str, TimelineRecorder]

# Okabe and Ito's colours, which colour-blind readers can tell apart; dashes and markers tell them
# apart without colour.
_STYLES: dict[str, tuple[str, str, str]] = {
    "dual_balanced": ("#0072B2", "-", "o"),
    "cost_aware": ("#D55E00", "-", "s"),
    "least_batch": ("#000000", "--", "^"),
    "least_cache": ("#E69F00", "--", "v"),
    "uniform_cp:2": ("#56B4E9", ":", "<"),
    "uniform_cp:4": ("#009E73", ":", ">"),
    "uniform_cp:8": ("#CC79A7", ":", "D"),
    "fluid": ("#999999", "-.", "x"),
}
_OTHER_STYLE = ("#999999", "-", ".")
_PHASES = {
    "attention": ("#0072B2", ""),
    "exchange": ("#D55E00", "//"),
    "other": ("#BBBBBB", ""),
    "dispatch + combine": ("#E69F00", ".."),
    "experts": ("#009E73", ""),
}
LOOKS: Any = {  # Any: the type of its keys is a literal of every setting there is.
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
}
_NUMBER = FuncFormatter(lambda value, _: f"{value:,g}")
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:,g}%")
_COLUMNS_PER_INCH = 15
_LEGEND_CHARACTERS_PER_INCH, _CHARACTERS_OF_A_HANDLE = 13, 6
"""At 9 points."""
_RELATIVE_MAX = 3.0
"""Loads above this times the mean look alike."""


def write_run_pictures(directory: Path, runs: Runs, about: str) -> list[Path]:
    """Write all figures of one run of each policy as PNG files; returns their paths.

    about: a title. Raises ValueError if no window began in the measured time, OSError for an
    unwritable file.
    """
    for policy, timeline in runs.items():
        if not timeline.samples:
            raise ValueError(
                f"{policy}: no window began in the measured time, so there is nothing to draw"
            )
    return [
        write_picture(directory / f"{name}.png", draw, runs, about=about)
        for name, draw in RUN_PICTURES.items()
    ]


def write_picture(path: Path, draw: Callable[..., Figure], *data: Any, about: str) -> Path:
    """Draw and write one picture titled `about`, byte-equal for equal data; returns the path."""
    with matplotlib.rc_context(LOOKS):
        titled(draw(*data), about).savefig(path, dpi=100, pil_kwargs={"optimize": True})
    return path


def titled(figure: Figure, about: str) -> Figure:
    """The figure with a title line."""
    columns = int(_COLUMNS_PER_INCH * figure.get_figwidth())
    text, size = "\n".join(wrap(about, columns)), 8
    if figure.legends:  # a title of the figure would lie on its legend
        figure.legends[0].set_title(text, FontProperties(size=size))
    else:
        figure.suptitle(text, fontsize=size)
    return figure


# --- of one run of each policy


def latency_cdf(runs: Runs) -> Figure:
    """CDF of the times to the first token and of the times per later token."""
    figure, panels = make_panels(1, 2, 4.2, 3.4, sharey=True)
    slo = next(iter(runs.values())).run.slo
    for axes, name, slo_us in (
        (panels[0], "ttft_us", slo.ttft_us),
        (panels[1], "tpot_us", slo.tpot_us),
    ):
        worst_ms = slo_us / 1e3
        for policy, timeline in runs.items():
            color, dashes, _ = style_of(policy)
            times = (getattr(latency, name) for latency in timeline.latencies())
            ms = sorted(us / 1e3 for us in times if us is not None)
            worst_ms = max(worst_ms, percentile(ms, 99))
            shares = [(rank + 1) / len(ms) for rank in range(len(ms))]
            # A hundred points draw the same line as ten thousand.
            stride = max(1, len(ms) // 100)
            xs, ys = [*ms[::stride], *ms[-1:]], [*shares[::stride], *shares[-1:]]
            axes.plot(xs, ys, color=color, linestyle=dashes, label=policy)
        axes.axvline(slo_us / 1e3, color="#777777", linewidth=1, label="SLO")
        axes.set(ylim=(0, 1.02), xlim=(0, 1.1 * worst_ms))
    panels[0].set(xlabel="time to the first token (TTFT), ms", ylabel="share of requests")
    panels[1].set(xlabel="time per later token (TPOT), ms")
    panels[0].yaxis.set_major_formatter(PERCENT)
    add_legend(figure, panels[0], 4)
    return figure


def balance(runs: Runs) -> Figure:
    """Draw KV tokens and rows of each instance over time, and their mean (Figure 14 a to c)."""
    figure, panels = make_panels(2, len(runs), 2.6, 2.0)
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=_RELATIVE_MAX)
    image = None
    for column, (policy, timeline) in enumerate(runs.items()):
        samples = timeline.samples
        num = len(samples[0].frames_free)
        extent = (_seconds(timeline)[0], _seconds(timeline)[-1] + 1e-6, num - 0.5, -0.5)
        for row, (load, name) in enumerate((("kv_tokens", "KV tokens"), ("rows", "rows"))):
            axes = panels[row * len(runs) + column]
            values = [sample.relative(load) for sample in samples]  # type: ignore[arg-type]
            image = axes.imshow(
                [list(instance) for instance in zip(*values, strict=True)],
                aspect="auto", interpolation="nearest", norm=norm, cmap="PuOr_r", extent=extent,
            )  # fmt: skip
            axes.grid(False)
            mean_peak = sum(max(sample) for sample in values) / len(values)
            axes.set_title(f"{policy}\n" * (row == 0) + f"max / mean {mean_peak:.2f}", fontsize=9)
            axes.set(
                xlabel="simulated time, s" if row else None,
                ylabel=None if column else f"{name}, instance",
                yticks=range(0, num, -(-num // 4)),
            )
            axes.set_ylim(extent[2:])
    assert image is not None
    bar = figure.colorbar(image, ax=panels, shrink=0.8, ticks=[0, 0.5, 1, 2, 3])
    bar.ax.set_yticklabels(["0", "0.5", "1", "2", "3x or more"])
    bar.set_label("load of the instance / mean load (white is balance)")
    return figure


def queue(runs: Runs) -> Figure:
    """Free memory beside the need of the queue's head (Figure 5c and Figure 14, high load)."""
    figure, panels = make_panels(2, len(runs), 3.0, 1.9, sharey="row", sharex=True)
    for column, (policy, timeline) in enumerate(runs.items()):
        above, below = panels[column], panels[len(runs) + column]
        samples, seconds = timeline.samples, _seconds(timeline)
        above.plot(
            seconds,
            [_tokens(sum(sample.frames_free)) for sample in samples],
            color="#0072B2",
            label="free, cluster",
        )
        above.plot(
            seconds, [_tokens(max(sample.frames_free)) for sample in samples],
            color="#56B4E9", linestyle="--", label="free, the freest instance",
        )  # fmt: skip
        heads = [
            (s, _tokens(sample.head_pages))
            for s, sample in zip(seconds, samples, strict=True)
            if sample.head_pages
        ]
        above.plot(
            [s for s, _ in heads], [pages for _, pages in heads],
            color="#D55E00", marker=".", markersize=3, linestyle="",
            label="needed by the head of the queue",
        )  # fmt: skip
        above.set(title=policy, ylabel=None if column else "million KV tokens")
        above.set_yscale("symlog", linthresh=0.1)
        above.set_ylim(0, 60)
        above.yaxis.set_major_locator(FixedLocator([0, 0.1, 1, 10]))
        above.yaxis.set_major_formatter(_NUMBER)
        below.fill_between(
            seconds,
            [sample.num_waiting for sample in samples],
            color="#D55E00",
            step="post",
            linewidth=0,
        )
        below.set(xlabel="simulated time, s", ylabel=None if column else "requests waiting")
    most = max(1, *(sample.num_waiting for run in runs.values() for sample in run.samples))
    panels[-1].set_ylim(0, 1.05 * most)
    panels[-1].yaxis.set_major_locator(MaxNLocator(5, integer=True))
    add_legend(figure, panels[0], 3)
    return figure


def layers(runs: Runs) -> Figure:
    """Mean layer of the slowest instance (Figures 13 and 15)."""
    return layer_groups(
        {"": {policy: timeline.outcome().layer_us for policy, timeline in runs.items()}}
    )


def scheduler(runs: Runs) -> Figure:
    """The scheduler's CPU time as a share of simulated time."""
    figure, (axes,) = make_panels(1, 1, 5.6, 3.0)
    for policy, timeline in runs.items():
        color, dashes, _ = style_of(policy)
        shares = [sample.plan_share for sample in timeline.samples]
        label = f"{policy}, mean {timeline.outcome().plan_share:.2%}"
        axes.plot(
            _seconds(timeline), shares, color=color, linestyle=dashes, linewidth=1, label=label
        )
    axes.set(xlabel="simulated time, s", ylabel="scheduler's time / step time", yscale="log")
    axes.yaxis.set_major_formatter(PERCENT)
    add_legend(figure, axes, 2)
    return figure


def cp_over_time(runs: Runs) -> Figure:
    """Requests with CP, and the exchange time per layer of the slowest instance (Figure 18)."""
    figure, (above, below) = make_panels(2, 1, 5.6, 1.8, sharex=True)
    for policy, timeline in runs.items():
        color, dashes, _ = style_of(policy)
        seconds, samples = _seconds(timeline), timeline.samples
        above.plot(
            seconds,
            [s.cp_share for s in samples],
            color=color,
            linestyle=dashes,
            linewidth=1,
            label=policy,
        )
        below.plot(
            seconds,
            [s.step.layer.exchange_us for s in samples],
            color=color,
            linestyle=dashes,
            linewidth=1,
        )
    above.set(ylabel="requests with CP", ylim=(0, None))
    above.yaxis.set_major_formatter(PERCENT)
    below.set(ylabel="exchange, µs a layer", xlabel="simulated time, s", ylim=(0, None))
    add_legend(figure, above, 4)
    return figure


RUN_PICTURES: dict[str, Callable[[Runs], Figure]] = {
    "latency": latency_cdf,
    "balance": balance,
    "queue": queue,
    "layers": layers,
    "scheduler": scheduler,
    "cp": cp_over_time,
}
"""By file name, without its ending."""


# --- of many runs


def layer_groups(groups: Mapping[str, Mapping[str, LayerTime]]) -> Figure:
    """Stacked phases of one layer by group and policy."""
    num_bars = max(len(bars) for bars in groups.values())
    width = 7.5 if len(groups) == 1 else 3.6
    figure, panels = make_grid(len(groups), width, 0.9 + 0.3 * num_bars, sharex=True, sharey=True)
    panels[0].invert_yaxis()
    for axes, (group, bars) in zip(panels, groups.items(), strict=True):
        policies = list(bars)
        lefts = [0.0] * len(bars)
        for phase, (color, hatch) in _PHASES.items():
            widths = [_phase_us(bars[policy], phase) for policy in policies]
            axes.barh(
                range(len(policies)),
                widths,
                left=lefts,
                color=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.5,
                label=phase,
            )
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        for position, total in enumerate(lefts):
            axes.annotate(f" {total:,.0f}", (total, position), va="center")
        axes.set_yticks(range(len(policies)), policies)
        axes.set(title=group)
        axes.grid(False, axis="y")
        axes.margins(x=0.14)
    figure.supxlabel("microseconds a layer, slowest instance", fontsize="medium")
    add_legend(figure, panels[0], len(_PHASES))
    return figure


def make_panels(
    num_rows: int, num_columns: int, width: float, height: float, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, a row after the other; sizes in inches."""
    figure = Figure(
        figsize=(0.6 + width * num_columns, 0.5 + height * num_rows), layout="constrained"
    )
    axes = figure.subplots(num_rows, num_columns, squeeze=False, **shared)
    panels = [panel for row in axes for panel in row]
    for panel in panels:
        panel.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        panel.xaxis.set_major_formatter(_NUMBER)
        panel.yaxis.set_major_formatter(_NUMBER)
    return figure, panels


def add_legend(figure: Figure, axes: Axes, most_columns: int) -> None:
    """Put the lines of a panel into a legend above all."""
    handles, labels = axes.get_legend_handles_labels()
    room = _LEGEND_CHARACTERS_PER_INCH * figure.get_figwidth()
    ncols = int(room // (max(map(len, labels)) + _CHARACTERS_OF_A_HANDLE))
    ncols = max(1, min(most_columns, ncols))
    figure.legend(handles, labels, loc="outside upper center", ncols=ncols)


def make_grid(num: int, width: float, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure of `num` like panels, in rows of two if there are more than three."""
    num_columns = num if num <= 3 else 2
    figure, panels = make_panels(-(-num // num_columns), num_columns, width, height, **shared)
    for panel in panels[num:]:
        panel.set_axis_off()
    return figure, panels[:num]


def style_of(policy: str) -> tuple[str, str, str]:
    """Colour, dashes and marker of a policy."""
    return _STYLES.get(policy, _OTHER_STYLE)


def _seconds(timeline: TimelineRecorder) -> list[float]:
    return [sample.begins_us / 1e6 for sample in timeline.samples]


def _tokens(num_frames: int) -> float:
    return num_frames * PAGE_SIZE / 1e6


def _phase_us(layer: LayerTime, phase: str) -> float:
    values: dict[str, float] = layer._asdict()
    return values[{"experts": "expert"}.get(phase, phase).replace(" + ", "_") + "_us"]
