"""`nanocp abort`, `status` and `config` on a service that runs: what they do and what they say."""

import json
import logging
import threading
import urllib.request

import pytest
import yaml
from typer.testing import CliRunner

from harness.exact.settings import configured
from harness.services.hash_service import CONFIG, hash_service, prompt
from harness.waits import until
from nanocp import logs
from nanocp.cli.main import app
from nanocp.client import Aborted, Client, ServiceError
from nanocp.config.file import load_config
from nanocp.config.yaml import config_yaml

LONG = 1700
SLOW = "harness.services.hash_members:build_slow"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Slow, with a key for clients and one for an operator."""
    file = tmp_path_factory.mktemp("keys") / "operators"
    file.write_text("alice her-key\n")
    config = configured(CONFIG, api_keys=("a-secret",), operator_keys_file=str(file))
    with hash_service(config, SLOW) as service:
        yield service


def nanocp(*words, service, key="her-key"):
    environment = {"NANOCP_OPERATOR_KEY": key}
    done = CliRunner().invoke(app, [*words, "--target", service.metrics_address], env=environment)
    return done.exit_code, done.stdout, done.stderr


class Asked:
    """A request in a thread, and how it ended."""

    def __init__(self, service, name, number=1):
        self.tokens, self.error, self.begun = 0, None, threading.Event()
        self._thread = threading.Thread(target=self._run, args=(service, name, number))
        self._thread.start()

    def _run(self, service, name, number):
        try:
            with Client(service.address, "a-secret") as client:
                for chunk in client.generate(
                    prompt(70, number), max_tokens=LONG, request_id=name, timeout_s=60
                ):
                    self.tokens += len(chunk.token_ids)
                    self.begun.set()
        except ServiceError as error:
            self.error = error

    def join(self):
        self._thread.join(60)
        return self


def test_a_request_is_ended_by_the_clients_id_and_by_its_number(service):
    by_name, by_number = Asked(service, "mine", 1), Asked(service, "yours", 2)
    for asked in (by_name, by_number):
        assert asked.begun.wait(60)
    status, said, _ = nanocp("abort", "mine", service=service)
    assert status == 0 and said.startswith("ended: request ")
    number = int(said.rpartition(" ")[2])
    assert by_name.join().error is not None and 0 < by_name.tokens < LONG
    assert isinstance(by_name.error, Aborted)
    snapshot = json.loads(nanocp("top", "--json", service=service)[1])
    (other,) = [one["id"] for one in snapshot["requests"] if one["client_id"] == "yours"]
    assert other != number
    assert nanocp("abort", str(other), service=service)[:2] == (0, f"ended: request {other}\n")
    assert isinstance(by_number.join().error, Aborted)
    assert "ended: aborted" in nanocp("why", "yours", service=service)[1]


@pytest.mark.parametrize("name", ["mine", "nobody's", "99999", "0", "", "9" * 5000, "../x", "²"])
def test_what_is_not_open_is_a_sentence(service, name, monkeypatch):
    # The service runs here too: its log may go to a stream that an earlier test has closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    sentence = f"nanocp abort: no open request is known as {name!r:.80}\n"
    assert nanocp("abort", name, service=service) == (1, "", sentence)


def test_over_http_it_ends_with_finish_reason_abort(service):
    body = {"prompt": prompt(70, 5), "max_tokens": LONG, "request_id": "by-http"}
    found = []

    def ask():
        url = f"http://{service.http_address}/v1/completions"
        headers = {"Content-Type": "application/json", "Authorization": "Bearer a-secret"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.append(json.load(answer))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: nanocp("abort", "by-http", service=service)[0] == 0)
    asking.join(60)
    assert [choice["finish_reason"] for choice in found[0]["choices"]] == ["abort"]


@pytest.mark.parametrize("key", ["", "a-secret"])
@pytest.mark.parametrize(
    "words", [("abort", "1"), ("config", "--log-level", "debug"), ("config",), ("status",)]
)
def test_who_is_no_operator_is_told_so(service, words, key):
    status, said, errors = nanocp(*words, service=service, key=key)
    assert (status, said) == (2 if words == ("status",) else 1, "")
    assert "asks for an operator's key" in errors and len(errors.splitlines()) == 1


def test_the_running_configuration_is_read_again_without_its_keys(service, tmp_path):
    status, said, _ = nanocp("config", service=service)
    assert status == 0 and "a-secret" not in said and "(not shown)" in said
    assert f"num_frames: {CONFIG.cluster.num_frames}  # not the default" in said
    assert "spares: 0  # default" in said
    (tmp_path / "serve.yaml").write_text(said)
    read = load_config(tmp_path / "serve.yaml", {}, {})
    shown = [config_yaml(each).partition("service:")[0] for each in (read, CONFIG)]
    assert shown[0] == shown[1]


def test_the_logs_level_changes_while_it_runs(service, caplog):
    before = logs.get_level()
    try:
        status, said, _ = nanocp("config", "--log-level", "debug", service=service)
        assert (status, yaml.safe_load(said)["service"]["log_level"]) == (0, "debug")
        assert logging.getLogger("control_plane.x").isEnabledFor(logging.DEBUG)
        assert "the log's level is to be debug (alice at 127.0.0.1)" in caplog.text
        status, _, errors = nanocp("config", "--log-level", "loud", service=service)
        assert status == 1 and "log_level is 'loud'; it must be debug, info," in errors
    finally:
        logs.set_level(before)


def test_a_level_without_a_service_is_refused():
    done = CliRunner().invoke(app, ["config", "--log-level", "debug"])
    assert done.exit_code == 2 and "--target" in done.stderr


@pytest.fixture
def whole(service):
    """The service once nothing recovers: a busy machine may have taken a member for lost."""
    until(lambda: nanocp("status", service=service)[0] == 0)
    return service


def test_a_whole_service_is_a_line_and_exit_status_0(whole):
    status, said, errors = nanocp("status", service=whole)
    assert (status, errors) == (0, "") and len(said.splitlines()) == 1
    assert said.startswith("whole; 4 of 4 instances serve, 0 requests run, 0 prefill, 0 wait, 0%")


@pytest.mark.parametrize("form", ["http://{}", "http://{}/", "http://{}/cluster", "{}/metrics"])
def test_a_target_may_be_an_address_as_a_browser_has_it(whole, form):
    target = form.format(whole.metrics_address)
    words = ["status", "--target", target, "--operator-key", "her-key"]
    assert CliRunner().invoke(app, words).exit_code == 0
