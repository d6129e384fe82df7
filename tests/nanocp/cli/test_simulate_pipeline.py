"""`nanocp simulate --layout pipeline` from the command line."""

import json
from functools import partial

from harness.programs.command_line import nanocp, on_one_line

SHORT = ["--workload", "fixed:200:20", "--rate", "60", "--seconds", "0.4", "--set", "warm_up=0.1"]


simulate = partial(nanocp, "simulate", "--layout", "pipeline")


def test_json_has_every_policy_and_the_same_bytes_for_a_seed():
    words = (*SHORT, "--policy", "even", "--policy", "fluid", "--json")
    results = [simulate(*words) for _ in range(2)]
    assert results[0].exit_code == 0, results[0].output
    assert results[0].stdout == results[1].stdout
    outcomes = json.loads(results[0].stdout)
    assert list(outcomes) == ["even", "fluid"]
    assert outcomes["even"]["bubble"] > outcomes["fluid"]["bubble"]
    assert set(outcomes["even"]["bubbles"][0]) == {"fill", "tail", "kv"}


def test_the_table_shows_bubbles_by_cause_and_what_moved():
    result = simulate(*SHORT)
    assert result.exit_code == 0, result.output
    for words in ("a100x4-qwen2.5-14b", "level", "stage 3 idle", "tail", "layers moved", "(r)"):
        assert words in result.stdout


def test_options_without_a_meaning_are_named():
    for words, message in (
        (("--set", "instances=4"), "instances has no meaning with --layout pipeline"),
        (("--plots", "x"), "--plots has no meaning with --layout pipeline"),
        (("--set", "passes=orca"), "--set has 'passes'; it must be one of"),
        (("--policy", "static:1,2"), "static needs 4 numbers"),
        (("--workload", "fixed:0:1"), "workload is 'fixed:0:1'"),
    ):
        result = simulate(*words)
        assert result.exit_code == 2
        assert message in on_one_line(result)
    result = nanocp("simulate", "--layout", "ring")
    assert "layout is 'ring'; it must be instances or pipeline" in result.output
