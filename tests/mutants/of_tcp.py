"""Faults in puts across TCP."""

from mutant import Mutant

RECEIVER = ("tests/data_plane/transport/test_tcp_receiver.py", "-k")

OF_TCP = [
    Mutant("native-lock", path="data_plane/native/build.py", tests=(*RECEIVER, "interpreter_lock"),
           why="a compiled call keeps the interpreter's lock, so a receiver that waits stops all",
           text="return ctypes.CDLL(str(path))", fault="return ctypes.PyDLL(str(path))"),
    Mutant("nixl-peer", path="data_plane/transport/nixl/pages.py",
           tests=("tests/data_plane/transport/test_nixl.py", "-k", "number"),
           why="another instance than the one that died is blamed for pages by NIXL",
           text="self._agent.post(write, what, self._instance)",
           fault="self._agent.post(write, what, self._instance + 1)"),
    Mutant("nixl-forgotten", path="data_plane/transport/nixl/pages.py",
           tests=("tests/data_plane/transport/test_nixl.py", "-k", "forgotten"),
           why="a peer that NIXL has forgotten is no lost peer, and its instance is blamed",
           text="known.nixlRemoteDisconnectError, known.nixlBackendError, "
                "known.nixlNotFoundError",
           fault="known.nixlRemoteDisconnectError, known.nixlBackendError"),
    Mutant("tcp-order", path="data_plane/transport/tcp/receiver.py",
           tests=(*RECEIVER, "python and last_byte"),
           why="a word that came by TCP is raised before the rows that it announces are there",
           text=("receive_into(connection, chunks)\nif offset not in words:\n"
                 "    words[offset] = Word(memory, offset)\nwords[offset].store(value)"),
           fault=("if offset not in words:\n    words[offset] = Word(memory, offset)\n"
                  "words[offset].store(value)\nreceive_into(connection, chunks)")),
    Mutant("tcp-order-native", path="data_plane/native/receive.cpp",
           tests=(*RECEIVER, "native and last_byte"),
           why="the compiled receiver raises a word before the rows that it announces are there",
           text=("if (const int ended = receive_all(connection, parts, num_parts)) return ended;\n"
                 "raise_flag(reinterpret_cast<uint64_t*>(memory + header->word), header->value);"),
           fault=(
               "raise_flag(reinterpret_cast<uint64_t*>(memory + header->word), header->value);\n"
               "if (const int ended = receive_all(connection, parts, num_parts)) return ended;"
           )),
    Mutant("tcp-interrupted", path="data_plane/native/receive.cpp",
           tests=(*RECEIVER, "native and signal"),
           why="what comes after a signal is written over what came before it",
           text="parts->iov_base = static_cast<char*>(parts->iov_base) + received;", fault=""),
    Mutant("tcp-wrap", path="data_plane/native/receive.cpp",
           tests=(*RECEIVER, "native and refused"),
           why="the sum of a put's offset and bytes wraps, and it is written before the segment",
           text="begin > memory_bytes || num_bytes > memory_bytes - begin",
           fault="begin + num_bytes > memory_bytes"),
    Mutant("tcp-description", path="data_plane/native/receive.cpp",
           tests=(*RECEIVER, "native and refused"),
           why="a peer on another node may write over the segment's description",
           text="begin < data_offset || begin > memory_bytes", fault="begin > memory_bytes"),
    Mutant("tcp-rows", path="data_plane/transport/shm.py",
           tests=("tests/data_plane/transport/test_tcp.py", "-k", "rows"),
           why="a put across TCP leaves out the last of the rows that were written",
           text="min(self.num_rows, num_rows)", fault="min(self.num_rows, num_rows - 1)"),
]  # fmt: skip
