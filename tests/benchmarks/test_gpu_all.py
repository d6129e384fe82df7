"""The card's half hour: stages in order, each kept as it ends, none twice, and an end in time."""

import json

from benchmarks.gpu import gpu_all
from benchmarks.gpu.gpu_all import NO_TIME, STAGES, Stage, run
from harness.paths import ROOT


def stage(name, program, limit_s=60, has_limit=False):
    return Stage(name, f"that {name} works", limit_s, ("-c", program), has_limit)


def statuses(path):
    return {each["stage"]: each["status"] for each in json.loads(path.read_text())}


def test_each_stage_is_kept_as_it_ends_and_one_that_passed_is_not_run_again(tmp_path, capsys):
    path, log = tmp_path / "all.json", tmp_path / "log"
    note = f"open({str(log)!r}, 'a').write('{{}} ')"
    first = stage("first", note.format("first"))
    second = stage("second", f"{note.format('second')}; raise SystemExit(3)")
    assert not run([first, second], path, 60)
    assert statuses(path) == {"first": 0, "second": 3}
    second = stage("second", note.format("again"))
    assert run([first, second], path, 60)
    assert log.read_text().split() == ["first", "second", "again"]
    assert "passed  first" in capsys.readouterr().out


def test_a_stage_without_an_end_is_cut_off_and_one_without_time_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_all, "_END_S", 0.5)
    path = tmp_path / "all.json"
    endless = stage("endless", "import time; time.sleep(600)", limit_s=0.1)
    late = stage("late", "raise SystemExit(4)")
    assert not run([endless, late], path, 1.0)
    assert statuses(path) == {"endless": NO_TIME, "late": NO_TIME}


def test_a_stage_is_told_its_limit(tmp_path):
    limits = stage("limits", "import sys; raise SystemExit(sys.argv[1:] != ['--limit-s', '7'])")
    assert run([limits._replace(limit_s=7, has_limit=True)], tmp_path / "all.json", 60)


def test_the_stages_fit_in_25_minutes_and_name_what_is_there():
    assert sum(each.limit_s for each in STAGES) <= 1500
    for each in STAGES:
        first, module = each.command[0], each.command[1].replace(".", "/") + ".py"
        assert (ROOT / (module if first == "-m" else first)).exists(), each
