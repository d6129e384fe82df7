"""Faults in puts across TCP."""

from mutant import Mutant

RECEIVER = ("tests/data_plane/transport/test_tcp_receiver.py", "-k")

OF_TCP = [
    Mutant(
        name="native-lock",
        why="a compiled call keeps the interpreter's lock, so a receiver that waits stops all",
        path="data_plane/native/build.py",
        text="return ctypes.CDLL(str(path))",
        fault="return ctypes.PyDLL(str(path))",
        tests=(*RECEIVER, "interpreter_lock"),
    ),
    Mutant(
        name="nixl-peer",
        why="another instance than the one that died is blamed for pages by NIXL",
        path="data_plane/transport/nixl/pages.py",
        text="self._agent.post(write, what, self._instance)",
        fault="self._agent.post(write, what, self._instance + 1)",
        tests=("tests/data_plane/transport/test_nixl.py", "-k", "number"),
    ),
    Mutant(
        name="nixl-forgotten",
        why="a peer that NIXL has forgotten is no lost peer, and its instance is blamed",
        path="data_plane/transport/nixl/pages.py",
        text="known.nixlBackendError, known.nixlNotFoundError",
        fault="known.nixlBackendError",
        tests=("tests/data_plane/transport/test_nixl.py", "-k", "forgotten"),
    ),
    Mutant(
        name="tcp-order",
        why="a word that came by TCP is raised before the rows that it announces are there",
        path="data_plane/transport/tcp/receiver.py",
        text="receive_into(connection, chunks)\nif offset not in words:\n"
        "    words[offset] = Word(memory, offset)\nwords[offset].store(value)",
        fault="if offset not in words:\n    words[offset] = Word(memory, offset)\n"
        "words[offset].store(value)\nreceive_into(connection, chunks)",
        tests=(*RECEIVER, "python and last_byte"),
    ),
    Mutant(
        name="tcp-order-native",
        why="the compiled receiver raises a word before the rows that it announces are there",
        path="data_plane/native/receive.cpp",
        text="if (const int ended = receive_all(connection, parts, num_parts)) return ended;\n"
        "raise_flag(reinterpret_cast<uint64_t*>(memory + header->word), header->value);",
        fault="raise_flag(reinterpret_cast<uint64_t*>(memory + header->word), header->value);\n"
        "if (const int ended = receive_all(connection, parts, num_parts)) return ended;",
        tests=(*RECEIVER, "native and last_byte"),
    ),
    Mutant(
        name="tcp-interrupted",
        why="what comes after a signal is written over what came before it",
        path="data_plane/native/receive.cpp",
        text="parts->iov_base = static_cast<char*>(parts->iov_base) + received;",
        fault="",
        tests=(*RECEIVER, "native and signal"),
    ),
    Mutant(
        name="tcp-wrap",
        why="the sum of a put's offset and bytes wraps, and it is written before the segment",
        path="data_plane/native/receive.cpp",
        text="begin > memory_bytes || num_bytes > memory_bytes - begin",
        fault="begin + num_bytes > memory_bytes",
        tests=(*RECEIVER, "native and refused"),
    ),
    Mutant(
        name="tcp-description",
        why="a peer on another node may write over the segment's description",
        path="data_plane/native/receive.cpp",
        text="begin < data_offset || begin > memory_bytes",
        fault="begin > memory_bytes",
        tests=(*RECEIVER, "native and refused"),
    ),
    Mutant(
        name="tcp-rows",
        why="a put across TCP leaves out the last of the rows that were written",
        path="data_plane/transport/shm.py",
        text="min(self.num_rows, num_rows)",
        fault="min(self.num_rows, num_rows - 1)",
        tests=("tests/data_plane/transport/test_tcp.py", "-k", "rows"),
    ),
]
