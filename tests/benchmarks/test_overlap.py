"""Benchmarks of overlap: what they judge, what they do not, and that each claim can fail."""

from contextlib import nullcontext

import pytest

from benchmarks.kit.measured_twice import Ways, claims_of_choices, point_of, quiet
from benchmarks.overlap import overlap_engine, overlap_lanes, overlap_link


def lane_point(**change):
    ways = Ways(100.0, 80.0), Ways(101.0, 80.0)
    found = {"rows": 8, "waits_of_compute": 1.0, "hidden": 0.7, "halves_on_time": 1.1}
    found |= {"order": "nanoflow", "of_plain_halves": 0.97}
    return found | point_of(*ways, other_is_chosen=True) | change


def broken(claims):
    return [claim.sentence for claim in claims if not claim.holds]


@pytest.mark.parametrize(("change", "sentence"), [
    ({}, None),
    ({"ratio": 0.86}, "two lanes take 0.86 of one, at most 0.85"),
    ({"of_plain_halves": 0.98}, "nanoflow takes 0.98 of plain halves, at most 0.97"),
    ({"hidden": 0.4}, "0.4 of it is hidden, at least 0.5"),
    ({"regret": 1.06}, "within 5% of the better way at 0 of 1 points"),
    ({"ratio": 1.2, "chosen_of_plain": 1.03, "waits_of_compute": 0}, "the choice takes 1.03"),
    ({"waits_of_compute": 0.6}, "a point has waits of 0.7 to 1.2 of compute"),
    ({"halves_on_time": 1.21}, "halves on time take 1.2 of the whole"),
])  # fmt: skip
def test_each_claim_of_two_lanes_can_fail(change, sentence):
    found = broken(overlap_lanes.claims_of([lane_point(**change)]))
    assert any(sentence in claim for claim in found) if sentence else not found


@pytest.mark.parametrize(("change", "sentence"), [
    ({"ratio": 0.7, "hidden": 0.6}, None),
    ({"ratio": 0.76, "hidden": 0.6}, "halves take 0.76 of the whole, at most 0.75"),
    ({"ratio": 0.7, "hidden": 0.49}, "0.49 of it is hidden, at least 0.5"),
    ({"link_of_compute": 2.0}, "a link is 0.8 to 1.25 of compute"),
])  # fmt: skip
def test_each_claim_of_a_link_can_fail(change, sentence):
    point = lane_point() | {"link_of_compute": 1.0} | change
    found = broken(overlap_link.claims_of([point]))
    assert [sentence in claim for claim in found] == ([True] if sentence else [])


def test_points_that_differ_between_two_measurements_are_not_judged():
    loud = lane_point() | point_of(Ways(100, 80), Ways(100, 95), other_is_chosen=True)
    assert loud["noise"] == 1.188 and loud["ratio"] == 0.8 and loud["regret"] == 1
    for points in ([loud, loud, lane_point()], []):
        judged, reason = quiet(points)
        assert not judged and "run it on a quiet machine" in reason
    assert quiet([loud, lane_point()]) == ([lane_point()], "")
    assert [*claims_of_choices([], 1.02), *overlap_lanes.claims_of([])] == []


@pytest.mark.parametrize("arguments", [["--quick"], []])
def test_a_quick_run_of_lanes_judges_nothing_and_says_so(monkeypatch, capsys, arguments):
    """So does one whose measurements differ too much; what judges nothing is no success."""
    loud = lane_point() | point_of(Ways(100, 80), Ways(100, 95), other_is_chosen=True)
    monkeypatch.setattr(overlap_lanes, "checkpoint_of", lambda preset: preset)
    monkeypatch.setattr(overlap_lanes, "member_environment", lambda config: {})
    monkeypatch.setattr(overlap_lanes, "measuring", lambda *_: nullcontext())
    monkeypatch.setattr(overlap_lanes, "measure", lambda *_: iter([loud]))
    with pytest.raises(SystemExit) as ended:
        overlap_lanes.main(arguments)
    why = "a quick run" if arguments else "points differ by more than 1.15"
    assert ended.value.code == 2 and why in capsys.readouterr().out


def test_the_first_measurement_chooses_and_the_second_judges():
    point = point_of(Ways(100, 90), Ways(100, 120), other_is_chosen=True)
    assert point["chosen"] == 2 and point["regret"] == point["chosen_of_plain"] == 1.2


def test_each_claim_of_the_engine_can_fail():
    captured = {"model": "Llama", "cache": "none", "apart": 1e-9, "graphs": 2}
    assert len(broken(overlap_engine.claims_of_capture(captured))) == 2
    static = captured | {"cache": "static", "graphs": 1}
    assert not broken(overlap_engine.claims_of_capture(static))
    times = {"ratio": 1.06}, {"decided_us": 10.1, "repeated_us": 2.1}
    assert len(broken(overlap_engine.claims_of_time(*times))) == 3
    merged = {"copied_bytes": 2, "mask_bytes": 1, "merged_bytes": 5, "ratio": 1.2, "model": ""}
    assert len(broken(overlap_engine.claims_of_merging(merged))) == 2


@pytest.mark.system
@pytest.mark.parametrize("name", ["overlap_engine", "overlap_link"])
def test_a_quick_run_judges_only_what_no_load_disturbs(name, tmp_path, capsys):
    main = {"overlap_engine": overlap_engine, "overlap_link": overlap_link}[name].main
    with pytest.raises(SystemExit) as ended:
        main(["--quick", "--json", str(tmp_path / "found.json")])
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert "cannot be judged here (a quick run): " in printed and "\nholds: " in printed
    assert (tmp_path / "found.json").exists()
