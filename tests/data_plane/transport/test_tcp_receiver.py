"""What receives puts by TCP: compiled or in Python, it writes the same and refuses the same."""

import ctypes
import errno
import mmap
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from data_plane.native import build
from data_plane.native.build import NativeUnavailable
from data_plane.native.receiver import fastest_receiver, native_receiver
from data_plane.transport.exchange import Term
from data_plane.transport.futex import Word
from data_plane.transport.segments import Segments
from data_plane.transport.tcp import messages as tcp_messages
from data_plane.transport.tcp.messages import ANNOUNCED, HEADER, put_header, shut, tune
from data_plane.transport.tcp.receiver import receive_in_python
from data_plane.transport.tcp.segment import TcpSegment
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.transports.transport_processes import LIMITS, START_MS
from harness.waits import until

MEMORY_BYTES = 1 << 20
DATA_OFFSET = 128
WORD = DATA_OFFSET
LIMIT_S = 30
LOCK_S = 40
"""More than the imports of a process and LIMIT_S."""
U64 = 1 << 64


def compiled():
    if shutil.which(os.environ.get("CXX") or "c++") is None:
        pytest.skip("there is no C++ compiler")
    return native_receiver()


@pytest.fixture(params=["native", "python"])
def receiver(request):
    return compiled() if request.param == "native" else receive_in_python


@pytest.fixture
def memory():
    return mmap.mmap(-1, MEMORY_BYTES)


class Receiving:
    """A receiver at work in a thread of its own, and its writer's end of the connection."""

    def __init__(self, receiver, memory, word=WORD):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.writer = socket.create_connection(listener.getsockname())
            self.connection = listener.accept()[0]
        tune(self.writer)
        self.word = Word(memory, word)
        self._receive = lambda: receiver(self.connection, memory, DATA_OFFSET)
        self._pool = ThreadPoolExecutor(1)
        self.go_on()

    def go_on(self):
        self._ended = self._pool.submit(self._receive)

    def result(self):
        """What the receiver returns; raises what it raises."""
        return self._ended.result(LIMIT_S)

    def until(self, value):
        assert self.word.wait_at_least(value, LIMIT_S * 1000, 100, lambda: True) == value

    def close(self):
        shut(self.connection)
        self._pool.shutdown()
        self.connection.close()
        self.writer.close()


@pytest.fixture
def start(receiver, memory):
    """Starts receivers into the memory, each with another word."""
    started = []

    def start(word=WORD):
        started.append(Receiving(receiver, memory, word))
        return started[-1]

    yield start
    for each in started:
        each.close()


class Peer:
    """A writer of random puts into a part of the memory, in pieces of random sizes."""

    def __init__(self, receiving, begin, num_bytes, rng):
        self.receiving, self.begin, self.rng = receiving, begin, rng
        self.expected = bytearray(num_bytes)
        self.num_put = 0
        self.pieces = []

    def put(self):
        """Queue the pieces of one to three puts."""
        messages = b"".join(self._message() for _ in range(self.rng.randint(1, 3)))
        largest = self.rng.choice((5, 200) if len(messages) < 2000 else (3000, 1 << 18))
        while messages:
            size = self.rng.randint(1, largest)
            self.pieces.append(messages[:size])
            messages = messages[size:]

    def _message(self):
        self.num_put += 1
        chunks, data = [], b""
        largest = self.rng.choice((0, 9, 70_000))
        for _ in range(self.rng.randint(0, tcp_messages.MAX_CHUNKS)):
            size = self.rng.randint(0, largest)
            at = self.rng.randint(0, len(self.expected) - size)
            self.expected[at : at + size] = part = self.rng.randbytes(size)
            chunks.append((self.begin + at, size))
            data += part
        return put_header(self.receiving.word.offset, self.num_put, chunks) + data


@pytest.mark.parametrize("seed", range(3))
def test_puts_of_any_size_arrive_whole_in_any_pieces_from_several_peers(start, memory, seed):
    rng = random.Random(seed)
    words, part_bytes = 3 * 64, 300_000
    peers = [
        Peer(start(WORD + 64 * i), DATA_OFFSET + words + part_bytes * i, part_bytes, rng)
        for i in range(3)
    ]
    for _ in range(6000):
        peer = rng.choice(peers)
        if not peer.pieces:
            peer.receiving.until(peer.num_put)
            assert memory[peer.begin : peer.begin + part_bytes] == peer.expected
            peer.put()
        peer.receiving.writer.sendall(peer.pieces.pop(0))
    assert min(peer.num_put for peer in peers) > 20
    assert memory[:DATA_OFFSET] == bytes(DATA_OFFSET)


def interrupt(thread):
    """Signal a thread that sleeps, and wait until it has gone on."""
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    signal.pthread_kill(thread.ident, signal.SIGUSR1)
    until(lambda: time.clock_gettime(clock) > before)


def test_a_signal_in_a_put_costs_no_byte(start, memory):
    """A signal ends a system call with what has come so far."""
    receiving = start()
    (thread,) = receiving._pool._threads
    data = bytes(range(1, 251)) * 2
    message = put_header(WORD, 1, [(4096, 200), (8192, 300)]) + data
    ends = [50, HEADER.size, HEADER.size + 90, HEADER.size + 200, len(message)]
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        for begin, end in pairwise([0, *ends]):
            if begin:
                time.sleep(0.02)
                interrupt(thread)
            receiving.writer.sendall(message[begin:end])
        receiving.until(1)
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert memory[4096:4296] == data[:200]
    assert memory[8192:8492] == data[200:]


def test_a_word_is_raised_after_the_last_byte(start, memory):
    receiving = start()
    data = b"\xff" * 1000
    message = put_header(WORD, 1, [(4096, 400), (8192, 600)]) + data
    receiving.writer.sendall(message[:-1])
    until(lambda: memory[8192:8791] == data[:599])
    assert receiving.word.load() == 0
    receiving.writer.sendall(message[-1:])
    receiving.until(1)
    assert memory[8791] == 255


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("sent", [0, 70, HEADER.size, HEADER.size + 500])
def test_a_peer_that_dies_in_a_put_raises_no_word(start, sent, is_reset):
    receiving = start()
    receiving.writer.sendall((put_header(WORD, 1, [(4096, 1000)]) + bytes(1000))[:sent])
    if is_reset:
        receiving.writer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    receiving.writer.close()
    with pytest.raises(ConnectionError):
        receiving.result()
    assert receiving.word.load() == 0


@pytest.mark.parametrize(("word", "chunks"), [
    (8, ()),
    (DATA_OFFSET + 1, ()),
    (MEMORY_BYTES, ()),
    (MEMORY_BYTES - 7, ()),
    (1 << 40, ()),
    (U64 - 8, ()),
    (WORD, [(0, 8)]),
    (WORD, [(DATA_OFFSET - 1, 8)]),
    (WORD, [(4096, 1 << 40)]),
    (WORD, [(MEMORY_BYTES - 8, 9)]),
    (WORD, [(4096, 8), (MEMORY_BYTES + 1, 0)]),
    (WORD, [(4096, U64 - 4096)]),
    (WORD, [(U64 - 8, 16)]),
    (WORD, [(4096, 8)] * 9),
])  # fmt: skip
def test_a_put_outside_the_memory_is_refused(start, memory, word, chunks):
    receiving = start()
    table = [number for chunk in chunks for number in chunk][:16]
    header = HEADER.pack(word, 1, len(chunks), *table, *[0] * (16 - len(table)))
    receiving.writer.sendall(header + b"\xff" * 100)
    receiving.writer.shutdown(socket.SHUT_WR)
    with pytest.raises(ValueError, match=f"a word at {word} after {len(chunks)} chunks"):
        receiving.result()
    assert memory[:] == bytes(MEMORY_BYTES)


def test_a_put_up_to_the_end_of_the_memory_is_taken(start, memory):
    receiving = start(MEMORY_BYTES - 8)
    chunks = [(MEMORY_BYTES, 0), (MEMORY_BYTES - 9, 1), (DATA_OFFSET, 0)]
    receiving.writer.sendall(put_header(MEMORY_BYTES - 8, 7, chunks) + b"\x05")
    receiving.until(7)
    assert memory[MEMORY_BYTES - 9] == 5


def test_an_announcement_returns_its_limit_and_puts_go_on(start):
    receiving = start()
    announced, put = put_header(ANNOUNCED, 1234, ()), put_header(WORD, 1, ())
    receiving.writer.sendall(put + announced + put_header(WORD, 2, ()))
    assert receiving.result() == 1234
    assert receiving.word.load() == 1
    receiving.go_on()
    receiving.until(2)


@pytest.mark.parametrize("sent", [0, 70, HEADER.size + 500])
def test_a_connection_that_is_shut_ends_the_receiver(start, sent):
    receiving = start()
    receiving.writer.sendall((put_header(WORD, 1, [(4096, 1000)]) + bytes(1000))[:sent])
    time.sleep(0.01)
    shut(receiving.connection)
    with pytest.raises(ConnectionError):
        receiving.result()


def test_a_receiver_sleeps_until_something_comes(start):
    receiving = start()
    receiving.writer.sendall(put_header(WORD, 1, ()) + b"\0")
    receiving.until(1)
    (thread,) = receiving._pool._threads
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.1


def receive_without_the_lock():
    memory = mmap.mmap(-1, MEMORY_BYTES)
    receiving = Receiving(compiled(), memory)
    receiving.writer.sendall(put_header(WORD, 1, ()))
    receiving.until(1)
    message = put_header(WORD, 2, [(4096, 4)]) + b"rows"
    # Calls by PyDLL keep the lock, and with this interval nothing else takes it.
    holding, interval = ctypes.PyDLL(None), sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        holding.send(receiving.writer.fileno(), message, len(message), 0)
        for _ in range(5000):
            if receiving.word.load() == 2:
                break
            holding.usleep(1000)
        assert receiving.word.load() == 2
    finally:
        sys.setswitchinterval(interval)
        receiving.close()
    assert memory[4096:4100] == b"rows"


def test_the_compiled_receiver_needs_no_interpreter_lock():
    """In a process of its own: a receiver that kept the lock would hang this one."""
    compiled()
    program = f"import {__name__.rpartition('.')[2]} as this; this.receive_without_the_lock()"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=LOCK_S)


def test_a_server_that_closes_leaves_no_thread_and_no_socket(receiver):
    threads, sockets = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    server = TcpSegmentServer("127.0.0.1", receiver)
    cluster_id = f"test-{uuid.uuid4().hex}"
    owner = Segments(cluster_id, server, node="a")
    segment = owner.own("exchange", 0, "", 4096)
    names = [f"writer {number}" for number in range(4)]
    writers = [
        TcpSegment(segment.name, 0, server.address, name, LIMITS, START_MS, Term())
        for name in names
    ]
    half_a_put = put_header(segment.data_offset, 1, [(segment.data_offset, 99)]) + bytes(50)
    for writer in writers[:2]:
        writer._connection.sendall(half_a_put)
    assert all(server.is_attached(segment.name, name) for name in names)
    owner.close()
    until(lambda: not any(writer.owner_is_alive() for writer in writers))
    for writer in writers:
        writer.close()
    until(lambda: set(threading.enumerate()) <= threads)
    until(lambda: len(os.listdir("/proc/self/fd")) <= sockets)


def test_headers_of_another_size_are_refused():
    receiver = compiled()
    call = receiver.args[0]
    header = ctypes.create_string_buffer(HEADER.size)
    assert call(-1, None, MEMORY_BYTES, DATA_OFFSET, header, HEADER.size - 16) == errno.EINVAL


def test_without_a_home_there_is_no_compiled_library(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.Path, "home", home)
    build._load.cache_clear()
    with pytest.raises(NativeUnavailable, match="Could not determine home directory"):
        native_receiver()


def test_without_a_compiler_puts_are_received_in_python(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such")
    build._load.cache_clear()
    caplog.set_level("INFO")
    assert fastest_receiver.__wrapped__() is receive_in_python
    assert "no C++ compiler" in caplog.text
