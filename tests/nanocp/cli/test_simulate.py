"""`nanocp simulate` and its commands from the command line."""

import json
from functools import partial

import pytest

from harness.programs.cluster_files import write_cluster
from harness.programs.command_line import nanocp, on_one_line
from nanocp.cli.simulate.options import Scenario
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.workload import Workload

FILE = load_cluster_file("h200x32-deepseek-v3")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A cluster of 4 instances, so that a run takes a moment."""
    size = {"num_instances": 4, "instances_per_node": 4, "num_frames": 17_500}
    path = tmp_path_factory.mktemp("clusters") / "small.yaml"
    shape = {"model": {"num_experts": 32}, "cp_degrees": [1, 2, 4]}
    return write_cluster(path, memory=None, cluster=size, **shape)


simulate = partial(nanocp, "simulate")


SHORT = ("--seconds", "0.5", "--set", "warm_up=0.2", "--workload", "fixed:1000:10")


def test_json_has_every_policy_and_is_all_there_is_on_standard_output(small):
    result = simulate(
        "--cluster", small, *SHORT, "--rate", "40", "--json", "--policy", "least_batch", "--policy",
        "fluid",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    outcomes = json.loads(result.stdout)
    assert list(outcomes) == ["least_batch", "fluid"]
    assert outcomes["fluid"]["kv_imbalance"] == 0 < outcomes["least_batch"]["kv_imbalance"]
    assert set(outcomes["fluid"]["layer_us"]) >= {
        "attention_us",
        "exchange_us",
        "dispatch_combine_us",
    }


def test_the_table_names_the_policies_and_the_numbers(small):
    result = simulate("--cluster", small, *SHORT, "--policy", "dual_balanced")
    assert result.exit_code == 0, result.output
    for words in (
        "dual_balanced",
        "TPOT p99",
        "TTFT p99",
        "within the SLO",
        "not judged",
        "drift",
        "KV imbalance",
        "scheduler, ms",
    ):
        assert words in result.stdout


def short_sweep(cluster_file, folder):
    """The words of a sweep over a trace of 20 seconds."""
    trace = folder / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 500, "output_length": 10}\n'
    trace.write_text("".join(line % (10 * number) for number in range(2000)))
    words = f"--workload mooncake:{trace} --seconds 0.5 --set warm_up=0.2 --slo-tpot-ms 25"
    # It begins between the two rates that are found.
    words = f"{words} --set first_rate=700 --policy dual_balanced".split()
    return ("sweep", "--cluster", cluster_file, *words)


def test_a_sweep_finds_a_rate_for_every_policy(small, tmp_path):
    result = simulate(*short_sweep(small, tmp_path), "--policy", "uniform_cp:4", "--json")
    assert result.exit_code == 0, result.output
    rates = json.loads(result.stdout)
    assert rates["dual_balanced"]["max_rate"] > rates["uniform_cp:4"]["max_rate"] > 0
    assert all(numbers["attainment"] >= 0.99 for numbers in rates.values())


@pytest.mark.system
def test_the_table_of_a_sweep_has_the_rates_of_its_json(small, tmp_path):
    sweep = short_sweep(small, tmp_path)
    rate = json.loads(simulate(*sweep, "--json").stdout)["dual_balanced"]["max_rate"]
    assert f"{rate:.1f}" in simulate(*sweep).stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--policy", "dual_balance"], "nearest: dual_balanced"),
        (["--workload", "issue-2"], "nearest: issue-"),
        (["--cluster", "h100x32"], "must be one of"),
        (["--set", "constants=peek"], "nearest: peak"),
        (["--rate", "-3"], "rate_per_s is -3"),
        (["--seconds", "0"], "must be positive"),
        (["--workload", "azure:/nowhere.csv"], "cannot be read"),
        (["--policy", "uniform_cp"], "needs a degree, like uniform_cp:2"),
        (["--rate", "inf"], "rate_per_s is inf"),
        (["--seconds", "-1"], "--seconds is -1; it must be from 0"),
        (["--seconds", "inf"], "--seconds is inf"),
        (["--set", "warm_up=nan"], "warm_up is nan"),
        (["--slo-tpot-ms", "inf"], "--slo-tpot-ms is inf"),
        (["--slo-ttft-ms", "0"], "both must be positive"),
        (["--set", "length_scale=0"], "length_scale is 0"),
        (["--set", "steps_per_window=0"], "steps_per_window is 0"),
        (["--set", "instances=264"], "there may be as many instances, and not 264"),
        (["--set", "experts=zipf:x"], "experts is zipf:x; after zipf: comes a number from 0 to 4"),
        (["--set", "experts=/nowhere"], "experts: /nowhere is no file of"),
        (["--set", "wire_form=fp8"], "wire form is 'fp8'; it must be one of latent, absorbed"),
        (
            ["--policy", "fluid", "--set", "ttft_target_ms=100"],
            "ttft_target_ms is for policy cost_aware",
        ),
        (
            ["--set", "host_pages=8", "--set", "prefix_sharing=off"],
            "host_pages finds pages by the hashes",
        ),
        (["--set", "host_pages=8"], "host_pages finds pages by hashes, and issue-1 has none"),
        (["sweep", "--workload", "static-1"], "static-1 has no rate"),
        (["sweep", "--set", "first_rate=-1"], "rate_per_s is -1"),
        (["--event-log", "/proc/log"], "the event log /proc/log cannot be written"),
        (
            ["--event-log", "x", "--policy", "fluid", "--policy", "chaos"],
            "--event-log is of one run; 2 policies",
        ),
        (["replay", "/nowhere.log"], "the event log /nowhere.log cannot be read: No such file"),
        (["replay", __file__], "is no event log"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_named(arguments, named):
    result = simulate(*arguments)
    assert result.exit_code == 2
    words = on_one_line(result)
    assert named in words, words


def test_a_malformed_trace_line_is_named_with_its_field(tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"timestamp": 5, "input_length": 3, "output_length": 1}\n'
        '{"timestamp": 7, "input_length": -3, "output_length": 1}\n'
    )
    result = simulate("--workload", f"mooncake:{trace}")
    words = on_one_line(result)
    assert (
        result.exit_code == 2 and "line 2: input_length is -3; it must be a whole number" in words
    )


@pytest.mark.parametrize("layout", ["instances", "pipeline"])
def test_a_run_that_judges_nothing_is_no_success(small, tmp_path, layout):
    """All requests of the trace come at once, before the measured time, and end before it."""
    trace = tmp_path / "one_time.jsonl"
    entry = json.dumps({"timestamp": 7, "input_length": 100, "output_length": 3})
    trace.write_text(f"{entry}\n" * 20)
    cluster = () if layout == "pipeline" else ("--cluster", small, "--set", "begin_empty=on")
    words = ("--layout", layout, *cluster, "--workload", f"mooncake:{trace}", "--set", "warm_up=2")
    words += ("--policy", "even" if layout == "pipeline" else "dual_balanced", "--seconds", "1")
    result = simulate(*words, "--rate", "5")
    assert result.exit_code == 1 and "nothing was judged" in result.stderr, result.output
    assert simulate(*words, "--rate", "20").exit_code == 0


def test_a_sweep_that_finds_no_rate_is_no_success(small):
    result = simulate("sweep", "--cluster", small, *SHORT, "--slo-ttft-ms", "1", "--set", "seeds=1")
    assert result.exit_code == 1 and "no rate is sustained" in result.stderr, result.output


def test_the_static_scenario_runs_without_a_rate(small):
    result = simulate(
        "--cluster", small, "--workload", "static-1", "--set", "warm_up=12", "--seconds", "0.5",
        "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)["cost_aware"]
    assert (outcome["num_rows_mean"], outcome["num_waiting_max"]) == (64 * 4 + 1, 0)
    table = simulate(
        "--cluster", small, "--workload", "static-1", "--set", "warm_up=0", "--seconds", "0.1"
    ).stdout
    assert "static-1 for 0.1 s" in " ".join(table.split())


def test_a_run_writes_an_event_log_that_replays(small, tmp_path):
    log = tmp_path / "log"
    assert (
        simulate("--cluster", small, *SHORT, "--rate", "40", "--event-log", str(log)).exit_code == 0
    )
    told = simulate("replay", str(log))
    assert told.exit_code == 0 and "every plan is the same, byte for byte" in told.stdout
    assert f"{len(log.read_text().splitlines()) - 1} calls" in told.stdout

    log.write_text(log.read_text().replace('"prompt_len":', '"prompt_len":1', 1))
    told = simulate("replay", str(log))
    assert (
        told.exit_code == 1 and "call 1 (now_us" in told.stdout and "placements was" in told.stdout
    )
    played = json.loads(simulate("replay", str(log), "--json").stdout)
    assert played["difference"]["call"] == 1 and "placements" in played["difference"]["fields"]


def test_a_log_that_is_cut_off_says_so_and_a_damaged_one_names_its_record(small, tmp_path):
    log = tmp_path / "log"
    assert (
        simulate("--cluster", small, *SHORT, "--rate", "40", "--event-log", str(log)).exit_code == 0
    )
    log.write_bytes(log.read_bytes()[:-3])
    told = simulate("replay", str(log))
    assert told.exit_code == 0 and "the last record is cut off" in told.stdout
    log.write_text(log.read_text().replace('"now_us"', '"now"', 1))
    told = simulate("replay", str(log))
    assert told.exit_code == 2 and "record 2: now_us: Field required" in on_one_line(told)


def test_the_target_of_the_command_line_goes_before_that_of_the_cluster_file(tmp_path):
    path = write_cluster(tmp_path / "cluster.yaml", tpot_target_ms=50)

    def target_ms(given):
        scenario = Scenario(cluster=path, tpot_target_ms=given)
        return scenario.trials(1.0)["cost_aware"].file.tpot_target_ms

    assert [target_ms(given) for given in (None, 0, 40)] == [50, 0, 40]


def test_a_mix_that_begins_steady_has_as_many_rows_as_littles_law_says():
    requests = Workload("issue-1", 20, seed=2, steady_tpot_us=40_000).requests(1 << 20)
    at_start = []
    for request in requests:
        if request.arrival_us > 0:
            break
        at_start.append(request)
    assert len(at_start) == pytest.approx(20 * 1010 * 0.040, rel=0.1)
    # Long outputs are met more often than short ones, with half of them to go: E[n^2] / 2 E[n] for
    # a log-normal.
    mean_left = sum(request.output_len for request in at_start) / len(at_start)
    assert mean_left == pytest.approx(1010 * 1.5 / 2, rel=0.15)


def test_a_sweep_in_a_narrow_terminal_has_a_row_for_each_number(monkeypatch, capsys):
    from rich.console import Console

    from nanocp.cli.simulate.sweep import _COLUMNS, _show

    numbers = {key: 1234.5678 for key, _ in _COLUMNS.values()} | {"num_judged": 2200}
    numbers |= {"num_missed": 20, "rests_on_few": False}
    for width, is_turned in ((80, True), (110, True), (120, False)):
        console = Console(width=width)
        monkeypatch.setattr("nanocp.cli.options.console.output", lambda console=console: console)
        _show(Scenario(), {"cost_aware": numbers, "uniform_cp:8": numbers | {"max_rate": 0.0}})
        lines = capsys.readouterr().out.splitlines()
        assert any("uniform_cp:8" in line for line in lines)
        assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
        assert any("requests/s" in line and "1234.6" in line for line in lines) is is_turned
        assert sum("TTFT p50 ms" in line for line in lines) == 1


def test_what_was_not_judged_is_no_number(small):
    words = ("--cluster", small, "--seconds", "0.01", "--set", "warm_up=0")
    result = simulate(
        *words, "--set", "begin_empty=on", "--workload", "fixed:1000:500", "--rate", "20"
    )
    assert result.exit_code == 1 and "0.00%" not in result.stdout.split("frames")[0]
    (line,) = (line for line in result.stdout.splitlines() if "within the SLO" in line)
    assert line.split("│")[2].strip() == "-"
