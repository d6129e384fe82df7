"""Pages go to slots and come back as they were; a fenced ticket's frame is not written."""

import errno
import os
import threading

import numpy as np
import pytest

from data_plane.kv import page_copier
from data_plane.kv.page_copier import PageCopier
from data_plane.kv.slots import Slots
from nanocp.values.offload import Fetch, StoredPage, Stow, TransferMissed
from nanocp.values.plan import TransferDone, TransferFenced

PAGE_BYTES = 1000


class Frames:
    """Frames of bytes; a test may hold up who writes them."""

    def __init__(self):
        self.pages = np.random.default_rng(0).integers(0, 255, (8, PAGE_BYTES), np.uint8)
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_writing = threading.Event()

    def read(self, frame):
        return self.pages[frame].copy()

    def write(self, frame, num_tokens, payload, offset):
        self.is_writing.set()
        assert self.may_write.wait(10)
        self.pages[frame] = payload


@pytest.fixture
def frames():
    return Frames()


@pytest.fixture
def copier(frames, tmp_path):
    copier = PageCopier(3, Slots(2, 2, PAGE_BYTES, str(tmp_path)), frames.read, frames.write)
    yield copier
    copier.close()


def run(copier):
    while copier.run_one():
        pass
    return copier.take()


def fetch(ticket, *slots, receiver=3):
    pages = enumerate(slots)
    return Fetch(ticket, 3, tuple(StoredPage(page, slot, receiver) for page, slot in pages))


def test_pages_come_back_from_memory_and_from_the_file_as_they_were(copier, frames):
    first, second = frames.pages[0].copy(), frames.pages[1].copy()
    copier.stow(Stow(1, 3, ((0, 0), (1, 1))))
    copier.stow(Stow(2, 3, ((0, 2),), is_demotion=True))
    copier.stow(Stow(3, 3, ((5, 0),)))
    assert run(copier)[0] == [TransferDone(1, 3), TransferDone(2, 3), TransferDone(3, 3)]
    copier.fetch(fetch(4, 2, 1), {0: 6, 1: 7})
    assert run(copier) == ([], [(4, 0), (4, 1)])
    np.testing.assert_array_equal(frames.pages[6], first)
    np.testing.assert_array_equal(frames.pages[7], second)
    assert copier.is_idle


def test_pages_for_others_wait_until_they_are_sent_and_few_are_read_ahead(copier, frames):
    copier.stow(Stow(1, 3, ((0, 0),)))
    copier.fetch(fetch(2, *[0] * 9, receiver=1), {})
    run(copier)
    sent = 0
    while (loaded := copier.loaded()) is not None:
        assert (loaded.ticket, loaded.page, loaded.receiver) == (2, sent, 1)
        assert len(copier._loaded) <= 4
        copier.sent()
        copier.run_one()
        sent += 1
    assert sent == 9 and copier.is_idle
    assert not copier._live, "who sends does not learn that a ticket is over"


def test_no_page_is_written_after_its_ticket_was_cancelled(copier, frames):
    copier.stow(Stow(1, 3, ((0, 0),)))
    run(copier)
    copier.fetch(fetch(2, 0), {0: 6})
    copier.cancel(2)
    before = frames.pages[6].copy()
    assert run(copier) == ([], [])
    np.testing.assert_array_equal(frames.pages[6], before)


def test_a_cancel_waits_for_the_page_that_is_being_written(copier, frames):
    copier.stow(Stow(1, 3, ((0, 0),)))
    run(copier)
    copier.start()
    frames.may_write.clear()
    copier.fetch(fetch(2, 0), {0: 6})
    assert frames.is_writing.wait(10)
    threading.Timer(0.05, frames.may_write.set).start()
    copier.cancel(2)
    np.testing.assert_array_equal(frames.pages[6], frames.pages[0])


def test_when_a_term_was_left_nothing_is_copied_or_answered(copier, frames):
    copier.stow(Stow(1, 3, ((0, 0),)))
    run(copier)
    copier.start()
    frames.may_write.clear()
    copier.fetch(fetch(2, 0, 0), {0: 6, 1: 7})
    copier.stow(Stow(3, 3, ((1, 1),)))
    assert frames.is_writing.wait(10)
    threading.Timer(0.05, frames.may_write.set).start()
    before = frames.pages[7].copy()
    copier.abandon()
    assert copier.take() == ([], []) and copier.is_idle
    np.testing.assert_array_equal(frames.pages[7], before)


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_copy_that_fails_fails_the_instance(copier, monkeypatch, call):
    monkeypatch.setattr(copier.slots, call, lambda *_: 1 // 0)
    woken = threading.Event()
    copier.wake = woken.set
    copier.start()
    if call == "read":
        copier.fetch(fetch(1, 0), {0: 6})
    else:
        copier.stow(Stow(1, 3, ((0, 0),)))
    assert woken.wait(10)
    copier.abandon()
    with pytest.raises(RuntimeError, match=r"not copied: ZeroDivisionError"):
        copier.take()


def test_a_term_is_not_left_while_a_copy_hangs(copier, frames, monkeypatch):
    monkeypatch.setattr(page_copier, "_END_S", 0.01)
    copier.start()
    frames.may_write.clear()
    copier.fetch(fetch(2, 0), {0: 6})
    assert frames.is_writing.wait(10)
    with pytest.raises(TimeoutError, match="still being copied after 0 s"):
        copier.abandon()
    frames.may_write.set()


def test_a_full_disk_is_an_answer_and_not_a_failure(copier, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    for ticket in (1, 2):
        copier.stow(Stow(ticket, 3, ((0, 2),)))
    assert run(copier)[0] == [TransferFenced(1, 3), TransferFenced(2, 3)]
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize("fault", ["changed", "shorter"])
def test_a_page_of_a_broken_file_is_missed(copier, fault, caplog):
    copier.stow(Stow(1, 3, ((0, 2),)))
    run(copier)
    file = copier.slots._file
    os.pwrite(file.fileno(), b"\x01\x02\x03", 500)
    if fault == "shorter":
        os.ftruncate(file.fileno(), 10)
    copier.fetch(fetch(2, 2), {0: 6})
    assert run(copier) == ([TransferMissed(2, 3)], [])
    assert "not what was written" in caplog.text


def test_nothing_is_left_in_the_directory(copier, tmp_path):
    copier.stow(Stow(1, 3, ((0, 2),)))
    run(copier)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"kv_offload.file_dir is '/nowhere'.*No such file"):
        Slots(1, 1, PAGE_BYTES, "/nowhere")


def test_a_file_has_its_space_from_the_start_or_is_refused(copier, monkeypatch, tmp_path):
    assert os.fstat(copier.slots._file.fileno()).st_blocks * 512 >= 2 * PAGE_BYTES

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"no file of 2,000 bytes .* \(No space left on device\)"):
        Slots(1, 2, PAGE_BYTES, str(tmp_path))
