"""The files of an event log: one writer, parts, what is kept, and a disk that is full or hangs."""

import errno
import io
import logging
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from control_plane.scheduler.explanation import Explainer
from control_plane.scheduler.scheduler import Scheduler
from control_plane.shell.event_log import EventLog, LogReader, LogThread, log_lines, parts
from harness.waits import until
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.simulator.replay import replay
from nanocp.values.plan import AbortRequested, Arrival, Plan


def new_log(path, **options):
    return EventLog(path, ClusterConfig(), SchedulerConfig(), **options)


@pytest.fixture
def full_disk(monkeypatch):
    """A file that is called full is on a disk without room."""

    class FullFile(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    opened = Path.open

    def open_(path, *arguments, **options):
        return FullFile(path, "ab") if path.name == "full" else opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_)


def test_a_log_that_cannot_be_written_is_refused_and_leaves_no_file(tmp_path, full_disk):
    os.mkfifo(tmp_path / "fifo")
    cases = (
        (tmp_path / "no" / "log", "No such file"),
        (tmp_path / "fifo", "it is no regular file"),
        (tmp_path, "it is no regular file"),
        (tmp_path / "full", "No space left"),
    )
    for path, reason in cases:
        with pytest.raises(OSError, match=f"the event log {path} cannot be written: {reason}"):
            new_log(path)
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_a_second_writer_of_a_log_is_refused_and_takes_nothing_from_the_first(tmp_path):
    """Two services with one --event-log: the idle one must not remove the file of the other."""
    path = tmp_path / "log"
    log = partial(new_log, path, max_bytes=300)
    first = log()
    for _ in range(2):  # also once the first writes another part
        with pytest.raises(OSError, match="another service writes it"):
            log()
        first.write(1, [], Plan(None))
        first.write(2, [], Plan(None))
    assert len(parts(path)) > 1
    first.close()
    assert sum(1 for _ in log_lines(path)) == 1 + 4
    second = log()  # the earlier one is kept
    first.close()
    second.write(3, [], Plan(None))
    second.close()
    assert sum(1 for _ in log_lines(path)) == 2


def test_a_log_goes_on_in_parts_and_plays_as_one(tmp_path):
    path = tmp_path / "log"
    scheduler = Scheduler(ClusterConfig(), SchedulerConfig())
    log = new_log(path, wall_us=5, max_bytes=3000)
    for number in range(60):
        events = [Arrival(number + 1, 100, 10, client_id=f"client {number}")]
        log.write(number, events, scheduler.plan_window(events, number))
    log.close()
    assert len(parts(path)) > 3 and parts(path)[1].name == "log.part2"
    assert all(part.stat().st_size < 4500 for part in parts(path))
    reader = LogReader(log_lines(path), "log")
    assert reader.header.wall_us == 5
    played = replay(reader)
    assert (played.num_calls, played.num_requests, played.difference) == (60, 60, None)
    assert '"client 59"' in parts(path)[-1].read_text()
    explainer = Explainer(["client 7", "3"])
    replay(LogReader(log_lines(path), "log"), explainer)
    assert [story.arrival.client_id for story in explainer.stories.values()] == [
        "client 2",
        "client 7",
    ]


def test_an_earlier_log_is_kept(tmp_path):
    path = tmp_path / "log"

    def record():
        log = new_log(path)
        log.write(1, [], Plan(None))
        log.close()

    for text in ("first", "second", "third"):
        record()
        (tmp_path / "log.part2").write_text(text)
        for part in parts(path):
            os.utime(part, (0, 0))
    record()
    kept = [path.with_name(f"log.19700101T000000Z{end}") for end in ("", "-2", "-3")]
    assert [parts(one)[1].read_text() for one in kept] == ["first", "second", "third"]
    assert len(parts(path)) == 1 and len(list(tmp_path.iterdir())) == 7


def test_a_log_without_a_call_is_removed(tmp_path):
    """A start that failed has none."""
    log = new_log(tmp_path / "log")
    assert (tmp_path / "log").exists()
    log.close()
    log.close()
    assert not list(tmp_path.iterdir())


def test_a_flush_puts_every_line_on_disk(tmp_path):
    log = new_log(tmp_path / "log")
    log.write(1, [], Plan(None))
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    log.flush()
    assert len((tmp_path / "log").read_text().splitlines()) == 2
    log.close()
    log.flush()


# --- a thread of its own


@pytest.fixture
def stopped_disk(tmp_path):
    """A log whose file takes what a pipe holds and then no more, and what reads it to its end."""
    log, path = new_log(tmp_path / "log"), tmp_path / "pipe"
    os.mkfifo(path)
    # Open for reading, so that nobody who opens it to write waits; read only when asked.
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log._file.close()
    log._file = path.open("ab", buffering=1 << 16)

    def read_on():
        os.set_blocking(reader, True)
        read = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
        os.close(reader)
        return (tmp_path / "log").read_bytes() + read

    return log, read_on


def test_a_disk_that_hangs_stops_nobody_and_what_is_missing_is_counted(stopped_disk, caplog):
    log, read_on = stopped_disk
    log = LogThread(log, max_calls=100)
    with caplog.at_level(logging.WARNING):
        for number in range(500):
            log.write(number, [AbortRequested(number)] * 1000, Plan(None))
        log.close()
    told = [record.getMessage() for record in caplog.records]
    assert "the event log ends here" in told[0] and "is not complete" in told[1]
    lines = read_on().splitlines(keepends=True)
    calls = list(LogReader(lines, "log"))
    log._thread.join(60)
    assert 0 < log.num_missing == 500 - len(calls)
    assert [call.now_us for call in calls] == list(range(len(calls))), "there is no gap"


def test_a_log_with_a_thread_is_on_disk_soon_and_whole_when_it_is_closed(tmp_path):
    path = tmp_path / "log"
    log = LogThread(new_log(path))
    log.write(1, [], Plan(None))
    until(lambda: len(path.read_text().splitlines()) == 2)
    for number in range(2, 100):
        log.write(number, [], Plan(None))
    log.close()
    log.close()
    assert len(path.read_text().splitlines()) == 100 and log.num_missing == 0
    assert "event log" not in {thread.name for thread in threading.enumerate()}
