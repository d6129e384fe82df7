"""What mended.yaml names exists, and what documents must say of it (show.py runs all of it)."""

import ast
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_commands import DOCUMENTS, commands

from harness.paths import ROOT
from harness.services.serve_process import Serve

ROWS = yaml.load((Path(__file__).parent / "mended.yaml").read_text(), yaml.CSafeLoader)
SAID = {
    "the-build-of-torch": [("Makefile", r"TORCH_INDEX \?="),
                           ("README.md",
                            r"0\.2 GB to download.*TORCH_INDEX=.*2\.7 GB to download")],
    "a-closed-ssh": [("docs/use/deploy.md", r"ray exec --tmux .*without it, that is a SIGHUP")],
    "a-contributors-metric": [
        ("docs/develop/map.md", r"### A metric .*metrics/families\.py"),
        ("docs/develop/map.md", r"It may read what `ClusterState` and `Request`"),
    ],
    "flags-in-readme": [("README.md", r"`nanocp --help` lists the commands")],
    "output-of-the-quick-start": [("docs/use/quick-start.md",
                                   r'native \(avx512\).*\{"requests": 8, "exact": 8')],
    "prometheus": [("deploy/prometheus/prometheus.yml", r"promtool check config.*--syntax-only"),
                   ("control_plane/observe/metrics/families.py",
                    r"REQUEST_S = \([^)]*20\.0, 25\.0, 30\.0")],
}  # fmt: skip
"""Key of a row -> (file, what stands there)."""


def test_every_row_is_whole_and_its_tests_exist():
    keys = [row["key"] for row in ROWS]
    assert len(keys) == len(set(keys)) > 60
    for row in ROWS:
        assert set(row) - {"suite"} == {"key", "wrong", "right", "tests"}, row["key"]
        assert row["tests"], row["key"]
        for test in row["tests"]:
            file, _, name = test.partition("::")
            tree = ast.parse((ROOT / file).read_text())
            names = {node.name for node in ast.walk(tree) if hasattr(node, "name")}
            assert name.partition("[")[0] in names, test


@pytest.mark.parametrize("key", SAID)
def test_documents_say_what_stops_a_newcomer(key):
    for file, pattern in SAID[key]:
        assert re.search(pattern, " ".join((ROOT / file).read_text().split())), (file, pattern)


def test_nobody_is_sent_to_an_index_for_this_package():
    """Until it is published, `pip install` names this folder."""
    for folder in ("nanocp", "control_plane", "data_plane", "docs", "deploy"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".yaml", ".yml") and path.name != "log.md":
                text = " ".join(re.sub(r'"\s*"', "", path.read_text()).split())
                assert not re.search(r"pip install ['\"]?nanocp", text), path


def test_files_of_commands_are_in_the_repository():
    named = [
        match[1]
        for document in DOCUMENTS
        for command in commands(document)
        if (match := re.search(r"nanocp batch -i (\S+) -o", command))
    ]
    assert named and any((ROOT / name).is_file() for name in named), named


def test_the_committed_half_hour_with_processes_lost_nothing():
    (run,) = json.loads((ROOT / "benchmarks/results/chaos_processes.json").read_text())
    assert run["seconds"] > 1800 and run["losses"] > 100
    assert (run["lost"], run["wrong"], run["doubled"]) == (0, 0, 0)


def test_recovery_of_services_is_tested_under_the_default_policy():
    for file in ("test_recovery.py", "test_resume.py"):
        text = (ROOT / "tests/control_plane" / file).read_text()
        assert re.search(r"hash_service\(DEFAULT|configured\(DEFAULT", text), file
    assert re.search(
        r'DEFAULT = with_policy\("cost_aware"',
        (ROOT / "tests/harness/services/hash_service.py").read_text(),
    )


def test_whoever_waits_for_an_address_hears_that_the_process_has_ended():
    with Serve("--no-ray", "--instances", "0") as serve:
        with pytest.raises(AssertionError, match=r"the service has ended: .*num_instances"):
            assert serve.address
        assert serve.wait() == 2


def test_a_suite_in_the_background_may_be_interrupted():
    program = (
        f"import sys, signal; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import conftest; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True\n", done.stderr
