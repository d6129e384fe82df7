"""Lines of the log: UTC, fields that cannot be forged, and JSON that parses."""

import json
import logging
import re

import pytest

from nanocp import logs


@pytest.fixture
def lines(capsys):
    """Configure the log; gives a function for the lines so far, and undoes it at the end."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield lambda: capsys.readouterr().err.splitlines()
    root.handlers, root.level = before
    for package in ("nanocp", "control_plane", "data_plane"):
        logging.getLogger(package).setLevel(logging.NOTSET)


def test_a_text_line_has_its_time_level_and_fields(lines):
    logs.configure("text", "info")
    logger = logging.getLogger("control_plane.observe.request_log")
    logger.info("request ended", extra=logs.fields(id="a", tokens_in=7, queue_s=None))
    (line,) = lines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO control_plane\.observe\.request_log: "
        r"request ended id=a tokens_in=7",
        line,
    )


def test_a_clients_value_cannot_make_a_line_of_its_own(lines):
    logs.configure("text", "info")
    forged = 'a\n2026-01-01T00:00:00.000Z ERROR nanocp: gone reason="x"'
    logging.getLogger("nanocp").info("request ended", extra=logs.fields(id=forged, empty=""))
    (line,) = lines()
    assert f'id={json.dumps(forged)} empty=""' in line


def test_json_lines_parse_and_name_the_process(lines):
    logs.configure("json", "info", process="instance 3")
    logger = logging.getLogger("data_plane.member")
    logger.warning("slow\nline", extra=logs.fields(seconds=1.5, id='"'))
    try:
        raise ValueError("cheese")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, lines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning", "logger": "data_plane.member", "process": "instance 3",
        "message": "slow\nline", "seconds": 1.5, "id": '"',
    }  # fmt: skip
    assert second["message"].startswith("failed\nTraceback") and "cheese" in second["message"]


def test_the_level_is_for_this_project_only(lines):
    logs.configure("text", "warning")
    logging.getLogger("control_plane.x").info("not shown")
    logs.configure("text", "debug")
    logging.getLogger("control_plane.x").debug("shown")
    logging.getLogger("urllib3").info("not shown")
    assert [line.rpartition(" ")[2] for line in lines()] == ["shown"]
