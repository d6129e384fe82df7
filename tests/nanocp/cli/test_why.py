"""`nanocp why`: a running service and an event log give one answer, and mistakes are sentences."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from typer.testing import CliRunner

from harness.exact.settings import configured
from harness.services.hash_service import CONFIG, generate, hash_service, prompt
from nanocp.cli.main import app
from nanocp.client import Client


def why(*arguments):
    return CliRunner().invoke(app, ["why", *arguments])


def test_a_service_and_its_event_log_say_the_same(tmp_path):
    log = str(tmp_path / "log")
    config = replace(CONFIG, service=replace(CONFIG.service, event_log=log))
    with hash_service(config) as service:
        generate(service.address, prompt(30, 2), 3)
        with Client(service.address) as client:
            client.generate_unary(prompt(300, 1), max_tokens=20, request_id="mine")
        target = service.metrics_address
        shown = why("mine", "--target", target)
        assert shown.exit_code == 0
        live = json.loads(why("mine", "--target", target, "--json").stdout)
        (by_number,) = json.loads(why("2", "--target", target, "--json").stdout)
        assert by_number["client_id"] == "mine"
        unknown = why("nobody", "--target", target)
        assert unknown.exit_code == 2
        assert "no request is known as 'nobody'" in unknown.stderr
    (one,) = live
    assert (one["number"], one["reason"], one["num_generated"]) == (2, "length", 20)
    assert one["num_windows"] >= 20 and one["cp_degree"] == 4
    assert sum(one["seconds"].values()) > 0 and one["arrived"].endswith("Z")
    first, *lines = shown.stdout.splitlines()
    assert first.startswith("request 2, the client's id mine: ")
    assert first.endswith("s, ended: length")
    assert [line.split()[0] for line in lines[1:6]] == [
        "queue", "prefill", "start", "decode", "away",
    ]  # fmt: skip
    assert any("most of the time went into" in line for line in lines)
    assert "row starts: in every window from" in shown.stdout
    logged = json.loads(why("mine", "--event-log", log, "--json").stdout)
    # The log's anchor was taken at the start: the clocks may have drifted since.
    assert logged[0].pop("arrived")[:16] == one.pop("arrived")[:16]
    assert logged == live


def test_the_bound_that_kept_a_request_in_the_queue_is_named(tmp_path):
    """One request takes every frame; live and from the log, the next one names what is short."""
    log = str(tmp_path / "log")
    config = configured(CONFIG, num_instances=2, num_frames=4, event_log=log)
    with hash_service(config) as service, Client(service.address) as client:
        first = client.generate(prompt(100, 1), max_tokens=380, request_id="first")
        next(first)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(
                client.generate_unary, prompt(100, 2), max_tokens=9, request_id="second"
            )
            assert len([token for chunk in first for token in chunk.token_ids]) < 380
            second.result(60)
        (one,) = json.loads(why("second", "--target", service.metrics_address, "--json").stdout)
        shown = why("second", "--target", service.metrics_address).stdout
    assert re.match(r"(frames|promise): ", one["obstacle"]), one
    assert f"  kept in the queue by {one['obstacle']}\n" in shown
    (logged,) = json.loads(why("second", "--event-log", log, "--json").stdout)
    assert logged["obstacle"] == one["obstacle"]


def test_an_unknown_log_or_request_is_a_sentence(tmp_path):
    (tmp_path / "log").write_text("{}\n")
    for arguments, sentence in (
        (["1", "--event-log", "no-such-log"], "the event log no-such-log cannot be read: No such"),
        (["1", "--event-log", str(tmp_path / "log")], "is no event log"),
        (["1", "--target", "127.0.0.1:1"], "no NanoCP answers at http://127.0.0.1:1/cluster"),
    ):
        result = why(*arguments)
        assert result.exit_code == 2 and sentence in result.stderr, result.stderr
        assert result.stderr.startswith("nanocp why: ") and result.stderr.count("\n") == 1
