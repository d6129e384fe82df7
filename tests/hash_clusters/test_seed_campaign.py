"""The campaign over many seeds goes on where it ended, and names the seeds that failed."""

import json
import os
from signal import SIGKILL

from harness import seed_campaign
from harness.hash_clusters.hash_recovery import RecoveringCluster


def play(monkeypatch, progress, seeds):
    words = ["seed_campaign", "--first", "40016", "--seeds", str(seeds)]
    monkeypatch.setattr("sys.argv", [*words, "--progress", str(progress)])
    return seed_campaign.main()


def test_seeds_that_failed_or_are_missing_are_played(tmp_path, monkeypatch, capsys):
    progress = tmp_path / "seeds.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(RecoveringCluster, "_turn", lambda cluster: 1 / 0)
        assert play(patch, progress, 1)
    assert "seed 40016 failed: ZeroDivisionError" in capsys.readouterr().out
    progress.write_text(progress.read_text() + '{"seed": 40017, "cp')  # It was killed there.
    assert not play(monkeypatch, progress, 2)
    assert not play(monkeypatch, progress, 2)
    failed, cut, *right = filter(None, progress.read_text().splitlines())
    assert "error" in failed and cut.endswith("cp")
    assert sorted(json.loads(line)["seed"] for line in right) == [40016, 40017]
    assert "2 of 2 seeds were right before" in capsys.readouterr().out
    monkeypatch.setattr(seed_campaign, "present_code", lambda: "another commit")
    with monkeypatch.context() as patch:
        patch.setattr(RecoveringCluster, "_turn", lambda cluster: os.kill(os.getpid(), SIGKILL))
        assert play(patch, progress, 2)
    told = capsys.readouterr().out
    assert "0 of 2 seeds were right before" in told and "was killed" in told
