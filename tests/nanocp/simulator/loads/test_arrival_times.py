"""The unit of a log's times: the whole file or a flag decides it, and no doubt is silent."""

import json
from random import Random

import pytest

from nanocp.simulator.loads.request_logs import read_log

UNITS = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}
EPOCH_S = 1795893033.25
RANDOM = Random(5)
GAPS_S = [round(RANDOM.expovariate(4.0), 3) for _ in range(300)]
ARRIVALS_S = [round(sum(GAPS_S[: at + 1]), 3) for at in range(300)]
SPAN_S = ARRIVALS_S[-1] - ARRIVALS_S[0]


def lines(times, name="timestamp"):
    entries = ({name: at, "input_length": 100, "output_length": 10} for at in times)
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def guidellm(times):
    done = [{"request_start_time": at, "prompt_tokens": 9, "output_tokens": 5} for at in times]
    return json.dumps({"benchmarks": [{"requests": {"successful": done}}]})


def aiperf(times):
    return "".join(
        json.dumps(
            {
                "metadata": {"request_start_ns": at, "benchmark_phase": "profiling"},
                "metrics": {
                    "input_sequence_length": {"value": 9, "unit": "tokens"},
                    "output_sequence_length": {"value": 5, "unit": "tokens"},
                },
            }
        )
        + "\n"
        for at in times
    )


def vllm(times):
    return json.dumps({"input_lens": [9] * 300, "output_lens": [5] * 300, "start_times": times})


FORMS = {"lines": lines, "guidellm": guidellm, "aiperf": aiperf, "vllm": vllm}


@pytest.fixture
def read(tmp_path):
    def read(text, **options):
        (tmp_path / "log").write_text(text)
        return read_log(tmp_path / "log", **options)

    return read


def span_s(log):
    return log.requests[-1].arrival_us / 1e6


@pytest.mark.parametrize("begins_s", [0.0, 50_000.0, EPOCH_S, 20 * 86_400.0])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("form", FORMS)
def test_times_are_read_right_or_asked_for_whatever_their_unit_and_beginning(
    read, form, unit, begins_s
):
    times = [UNITS[unit] * (begins_s + at) for at in ARRIVALS_S]
    if unit != "s":
        times = [round(at) for at in times]
    text = FORMS[form](times)
    assert span_s(read(text, time_unit=unit)) == pytest.approx(SPAN_S, abs=2e-3)
    if form == "aiperf" and begins_s != EPOCH_S:
        return  # its name says ns, and nothing else speaks against it
    try:
        log = read(text)
    except ValueError as error:
        # Numbers of one unit may be a time of our years in another, and few write us or ns.
        assert "--time-unit" in str(error), error
        assert begins_s == 20 * 86_400.0 or unit in ("us", "ns"), error
    else:
        assert span_s(log) == pytest.approx(SPAN_S, abs=2e-3)
        assert log.fields[0].endswith(f"({unit})")


@pytest.mark.parametrize(("times", "want_s"), [
    ([0.0, 0.2, 0.4, 30.5], 30.5),
    ([0, 0.2, 0.4, 30.5], 30.5),
    ([30.75, 0.25, 0.45, 0.65], 30.5),
    ([0, 27482, 57482], 57.482),
    ([100_000_000, 100_027_482, 100_057_482], 57.482),
    ([1767225600, 1767225601.5], 1.5),
    (["2026-01-01T00:00:00Z", "2026-01-01T00:00:01.500Z"], 1.5),
    ([5.0, 5.0], 0.0),
])  # fmt: skip
def test_a_trace_of_seconds_from_zero_and_a_slice_of_a_long_one(read, times, want_s):
    """The first line decides nothing: guidellm#948 has traces that begin at 0.0 s."""
    assert span_s(read(lines(times))) == pytest.approx(want_s)


@pytest.mark.parametrize("unit", ["us", "ns"])
def test_a_clock_that_runs_through_numbers_of_our_years_has_one_unit(read, unit):
    """From 0 on, 1.5e9 us are 25 minutes and 1.5e9 ns a second and a half: no time of 2017."""
    gap = {"us": 10e6 / 3, "ns": 0.25e9}[unit]
    times = [gap * at + (at % 7) / 9 for at in range(1000)]
    log = read(lines(times, f"begun_{unit}"), names={"arrival": f"begun_{unit}"})
    assert log.requests[-1].arrival_us == pytest.approx(times[-1] * 1e6 / UNITS[unit], abs=2)


def test_the_last_word_of_a_name_says_the_unit(read):
    for name in ("when_ms", "whenMs", "when (ms)", "when.millis"):
        text = lines([0.5, 3000.5], name)
        assert span_s(read(text, names={"arrival": name})) == 3.0


HALF = [0.001 * round(1000 * at) for at in ARRIVALS_S]
MIXED = {
    "epochs": [1767225600, 1767225601500],
    "an epoch and none": [EPOCH_S, 0.5],
    "a date and a number": ["2026-01-01T00:00:00Z", 1767225601.5],
    "seconds, then milliseconds": HALF[:150] + [round(1000 * at) for at in HALF[150:]],
    "milliseconds, then seconds": [round(1000 * at) for at in HALF[:150]] + HALF[150:],
    "by turns": [at * (1000 if number % 2 else 1) for number, at in enumerate(HALF)],
    "dates with and without a zone": ["2026-01-01T02:00:00+02:00", "2026-01-01 00:00:01"],
    "one of another": [*HALF[:299], 1000 * HALF[299]],
}


@pytest.mark.parametrize("name", MIXED)
def test_two_units_in_one_file_are_refused_with_both(read, name):
    with pytest.raises(
        ValueError, match=r"log, line \d+ has .* and .*log, line \d+ has .*--time-unit"
    ):
        read(lines(MIXED[name]))


def test_a_user_may_say_the_unit(read):
    with pytest.raises(ValueError, match=r"--time-unit is 'h'; it must be one of s, ms, us, ns"):
        read(lines(ARRIVALS_S), time_unit="h")
    with pytest.raises(ValueError, match="leave out --time-unit ms"):
        read(lines(["2026-01-01T00:00:00Z"]), time_unit="ms")
    with pytest.raises(ValueError, match=r"in ms \(0.0\d+ requests/s\) or in us"):
        read(lines([40_000 * at for at in range(1000)], "ts"))
    assert span_s(read(lines([0, 3, 9]), time_unit="us")) == 9e-6
