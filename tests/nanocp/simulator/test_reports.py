"""Timelines and pictures: their data is that of runs by hand."""

import json
from itertools import combinations
from types import SimpleNamespace

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from benchmarks.simulated import paper_pictures
from harness.programs.command_line import nanocp, on_one_line
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import LayerTime, Loads, StepTime
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Run, Slo
from nanocp.simulator.reports import pictures
from nanocp.simulator.reports.timeline import NUM_SAMPLES, TimelineRecorder
from nanocp.simulator.simulation import Mechanisms, make_simulation

H200 = load_cluster_file("h200x32-deepseek-v3")
PICTURES = ["balance.png", "cp.png", "latency.png", "layers.png", "queue.png", "scheduler.png"]
LOADS = Loads(
    kv_tokens=[300, 100], rows=[2, 2], attention_rows=[2, 3],
    links=[1, 0], links_between_nodes=[0, 0],
)  # fmt: skip
STEP = StepTime(100, LayerTime(20.0, 5.0, 5.0, 10.0, 5.0))


def by_hand():
    """Make a run by hand: two requests run, the second with CP, and a third waits."""
    timeline = TimelineRecorder(
        Run(warm_up_us=1000, measure_us=1200, slo=Slo(tpot_us=80, ttft_us=600))
    )
    for prompt_len in (100, 1000, 129):
        timeline.arrived(WorkloadRequest(0, prompt_len, 10, 10))
    timeline.at(400)
    place(timeline, 9000, (1, 1), (2, 2))
    window(timeline, 500)
    for begins_us, plan_ns in ((1100, 4000), (1200, 2000)):
        timeline.at(begins_us)
        place(timeline, plan_ns)
        window(timeline, begins_us)
    timeline.first_token(1, 500)
    timeline.finished(1, 1250)
    timeline.at(1300)
    timeline.refused(3)
    return timeline


def place(timeline, plan_ns, *degrees):
    placements = tuple(
        SimpleNamespace(request_id=request_id, cp_degree=degree) for request_id, degree in degrees
    )
    timeline.planned(plan_ns, SimpleNamespace(placements=placements))


def window(timeline, begins_us):
    loads_now = tuple(
        SimpleNamespace(frames_free=free, frames_used=9, frames_committed=9, frames_quarantined=0)
        for free in (7, 11)
    )
    timeline.window(begins_us, STEP, 1, LOADS, loads_now, num_waiting=1)


def played(policy="dual_balanced", steps_per_window=1, workload="issue-5", rate=30):
    timeline = TimelineRecorder(Run(200_000, 1_000_000))
    simulation = make_simulation(
        H200, "fitted", policy, timeline.run, Mechanisms(steps_per_window=steps_per_window),
        timeline,
    )  # fmt: skip
    simulation.run(Workload(workload, rate, 1, steady_tpot_us=10_000).requests(1 << 20))
    return timeline


def test_samples_are_what_was_decided():
    first, second = by_hand().samples
    assert (first.begins_us, second.begins_us) == (1100, 1200), "the warm-up is not sampled"
    assert first.relative("kv_tokens") == [1.5, 0.5] and first.relative("rows") == [1.0, 1.0]
    assert first.frames_free == (7, 11) and first.num_waiting == 1
    assert first.head_pages == 3, "129 tokens: the third request is the one that waits"
    assert (first.num_placed, first.num_with_cp, first.cp_share) == (2, 1, 0.5)
    assert (first.plan_us, second.plan_us) == (4.0, 2.0) and first.plan_share == 0.04


def test_the_outcome_is_that_of_a_plain_recorder_and_has_the_schedulers_share():
    outcome = by_hand().outcome()
    assert outcome.plan_share == pytest.approx((4 + 2) / 200)
    assert outcome.cp_share == 0.5 and outcome.kv_imbalance == 0.5


def test_a_long_run_has_no_more_samples_than_a_picture_needs():
    timeline = played(workload="issue-0", rate=200)
    assert timeline.outcome().num_windows < NUM_SAMPLES
    assert len(timeline.samples) == timeline.outcome().num_windows
    longer = TimelineRecorder(Run(0, 4_000_000))
    make_simulation(H200, "fitted", "least_batch", longer.run, recorder=longer).run(
        Workload("issue-0", 20, 1).requests(1 << 20)
    )
    assert NUM_SAMPLES / 2 < len(longer.samples) <= NUM_SAMPLES < longer.outcome().num_windows


# --- pictures


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_latency_picture_has_both_distributions():
    first, later = pictures.latency_cdf({"fluid": by_hand()}).axes
    # 500 us to the first token, and one that has none after 1,300 us: it is late. The refused
    # request has no times.
    assert list(lines(first)["fluid"].get_xdata()) == [0.5, 1.3, 1.3]
    assert list(lines(first)["fluid"].get_ydata()) == [0.5, 1.0, 1.0]
    assert lines(later)["fluid"].get_xdata()[0] == pytest.approx((1250 - 500) / 9 / 1e3)
    for axes, slo_ms in ((first, 0.6), (later, 0.08)):
        assert lines(axes)["SLO"].get_xdata()[0] == slo_ms


def test_balance_picture_shows_each_instance_over_the_mean():
    kv, rows, _ = pictures.balance({"least_batch": by_hand()}).axes
    assert kv.get_images()[0].get_array().tolist() == [[1.5, 1.5], [0.5, 0.5]]
    assert rows.get_images()[0].get_array().tolist() == [[1, 1], [1, 1]]
    assert "mean 1.50" in kv.get_title() and "mean 1.00" in rows.get_title()


def test_queue_picture_shows_free_memory_beside_what_is_needed():
    above, _ = pictures.queue({"least_batch": by_hand()}).axes
    found = lines(above)
    shown = {label: list(found[label].get_ydata()) for label in found}
    assert shown["free, cluster"] == [18 * 64 / 1e6] * 2
    assert shown["free, the freest instance"] == [11 * 64 / 1e6] * 2
    assert shown["needed by the head of the queue"] == [3 * 64 / 1e6] * 2


def test_layer_picture_stacks_the_phases_of_the_slowest_instance():
    (axes,) = pictures.layers({"least_batch": by_hand()}).axes
    phases = {bars.get_label(): (bars[0].get_x(), bars[0].get_width()) for bars in axes.containers}
    assert phases == {
        "attention": (0, 20),
        "exchange": (20, 5),
        "other": (25, 5),
        "dispatch + combine": (30, 10),
        "experts": (40, 5),
    }
    assert [text.get_text().strip() for text in axes.texts] == ["45"]


ABOUT = "h200x32-deepseek-v3, fitted: issue-5 at 30/s for 1 s, seed 1; SLO: TPOT 50 ms, TTFT 9 s"


def texts_of(figure):
    """Yield every text of a figure that is drawn, with its box."""
    FigureCanvasAgg(figure).draw()
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                hidden |= {tick.label1, tick.label2}
    for text in figure.findobj(Text):
        if text not in hidden and text.get_visible() and text.get_text().strip():
            yield " ".join(text.get_text().split()), text.get_window_extent()


@pytest.fixture(scope="module")
def four_runs():
    policies = ("dual_balanced_any_node", "least_batch", "least_cache", "uniform_cp:4")
    return {policy: played(policy) for policy in policies}


@pytest.mark.parametrize("num_policies", [1, 2, 4])
@pytest.mark.parametrize("name", pictures.RUN_PICTURES)
def test_no_text_of_a_picture_is_cut_or_overlaps_another(four_runs, name, num_policies):
    runs = dict(list(four_runs.items())[:num_policies])
    with matplotlib.rc_context(pictures.LOOKS):
        figure = pictures.titled(pictures.RUN_PICTURES[name](runs), ABOUT)
        texts = list(texts_of(figure))
    assert ABOUT in {" ".join(text.split()) for text, _ in texts}, "it says what was simulated"
    width, height = figure.canvas.get_width_height()
    for text, box in texts:
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -1, f"{text} is cut"
    for (first, one), (second, other) in combinations(texts, 2):
        both = Bbox.intersection(one, other)
        assert both is None or min(both.width, both.height) < 1, (first, second)


def test_scheduler_and_cp_pictures_are_shares_over_time():
    runs = {"dual_balanced": by_hand()}
    (axes,) = pictures.scheduler(runs).axes
    assert list(lines(axes)["dual_balanced, mean 3.00%"].get_ydata()) == [0.04, 0.02]
    above, below = pictures.cp_over_time(runs).axes
    assert list(above.get_lines()[0].get_ydata()) == [0.5, 0.5]
    assert list(below.get_lines()[0].get_ydata()) == [5.0, 5.0]


def test_curves_of_many_runs():
    figure = paper_pictures.attainment({"issue-1": {"fluid": [(10, 1.0), (20, 0.5)]}}, 0.99)
    assert list(lines(figure.axes[0])["fluid"].get_ydata()) == [1.0, 0.5]
    figure = paper_pictures.scheduler_by_rows({"fluid": [(32, 0.01), (256, 0.02)]})
    assert list(lines(figure.axes[0])["fluid"].get_xdata()) == [32, 256]


def test_a_picture_is_the_same_file_every_time(tmp_path):
    runs = {"dual_balanced": by_hand(), "a_new_policy": by_hand()}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (pictures.write_run_pictures(tmp_path / name, runs, "it") for name in "ab")
    assert sorted(path.name for path in first) == PICTURES
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes() and one.read_bytes().startswith(b"\x89PNG")


def test_nothing_measured_is_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="fluid: no window began in the measured time"):
        pictures.write_run_pictures(tmp_path, {"fluid": TimelineRecorder(Run(0, 1))}, "it")


# --- the command


def test_the_command_writes_pictures(tmp_path):
    arguments = [
        "--seconds", "0.3", "--set", "warm_up=0.1", "--workload", "fixed:1000:4", "--policy",
        "dual_balanced", "--policy", "fluid",
    ]  # fmt: skip
    places = ["--plots", str(tmp_path / "new" / "plots")]
    result = nanocp("simulate", *arguments, *places, "--json")
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)) == {"dual_balanced", "fluid"}
    assert sorted(path.name for path in (tmp_path / "new" / "plots").iterdir()) == PICTURES


def test_a_place_that_cannot_be_written_is_named_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    result = nanocp("simulate", "--seconds", "1e6", "--plots", tmp_path / "file" / "below")
    assert result.exit_code == 2
    assert "cannot be written" in on_one_line(result)
