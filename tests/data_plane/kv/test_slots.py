"""The file behind an instance's memory: a disk that hangs costs one wait, and memory goes on."""

import logging
import os
import threading

import numpy as np
import pytest

from data_plane.kv import slots as slots_module
from data_plane.kv.slots import Slots

PAGE_BYTES = 4096


def page(value):
    return np.full(PAGE_BYTES, value, np.uint8)


@pytest.fixture
def hang(monkeypatch):
    """Calls of the disk hang from when it is called until the test ends; returns how many began."""
    monkeypatch.setattr(slots_module, "_DISK_S", 0.2)
    ended, begun = threading.Event(), []

    def begin():
        def hanging(*arguments):
            begun.append(arguments)
            ended.wait(60)
            return 0

        monkeypatch.setattr(os, "pwrite", hanging)
        monkeypatch.setattr(os, "preadv", hanging)
        return begun

    yield begin
    ended.set()


@pytest.mark.parametrize("is_write", [True, False])
def test_a_disk_that_hangs_is_given_up_after_one_wait(tmp_path, hang, caplog, is_write):
    slots = Slots(1, 2, PAGE_BYTES, str(tmp_path))
    assert slots.write(0, page(7)) and slots.write(1, page(8))
    assert slots.read(1)[0] == 8
    begun = hang()
    with caplog.at_level(logging.WARNING):
        assert slots.write(2, page(9)) is False if is_write else slots.read(1) is None
        for _ in range(50):
            assert slots.write(2, page(9)) is False and slots.read(1) is None
    assert len(begun) == 1, "only the first call waits for the disk"
    (said,) = caplog.records
    assert "the disk hangs for 0.2 s, so the tier is given up" in said.getMessage()
    assert slots.read(0)[0] == 7 and slots.write(0, page(6)), "memory is not the disk"
    slots.close()


def test_a_disk_that_fails_is_asked_again(tmp_path, monkeypatch):
    slots = Slots(1, 1, PAGE_BYTES, str(tmp_path))
    write = os.pwrite

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert not slots.write(1, page(1))
    monkeypatch.setattr(os, "pwrite", write)
    assert slots.write(1, page(2)) and slots.read(1)[0] == 2
    slots.close()
