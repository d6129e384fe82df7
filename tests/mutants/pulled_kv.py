"""Mutants of prompts' KV that is read from other engines."""

from mutant import Mutant

_READER = "data_plane/prefill/pull/reader.py"
_TESTS = "tests/data_plane/prefill/pull/test_reader.py"

MUTANTS = [
    Mutant("pull-read-once", path=_READER, tests=(_TESTS, "-k", "during_the_read"),
           why="a page has the layers of two prompts, since its block was written during the read",
           text="if not torch.equal(areas[0, : len(where)], areas[-1, : len(where)]):",
           fault="if False:"),
    Mutant("pull-unchecked", path=_READER, tests=(_TESTS, "-k", "used_again or lease_ended"),
           why="pages are those of another prompt, which has the blocks since the lease ended",
           text="if error is None:\nreturn order", fault="if True:\n    return order"),
    Mutant("pull-alike", path=_READER, tests=(_TESTS, "-k", "each_token or begins_its_blocks"),
           why="KV of another prompt serves, and is shared, which is alike where blocks begin",
           text="error = kv_error(found[:, layer.unmoved], unmoved, dtype, is_first_layer=True)",
           fault="error = None"),
    Mutant("pull-other-beginning", path=_READER, tests=(_TESTS, "-k", "each_token"),
           why="pages are shared whose KV is that of another beginning",
           text="others = [number for number in range(wanted[-1]) if number not in asked]",
           fault="others = []"),
    Mutant("pull-hung", path=_READER, tests=(_TESTS, "-k", "bounded_memory"),
           why="an engine that hangs takes more memory with each read",
           text="if len(self._abandoned) == _MAX_ABANDONED:", fault="if False:"),
    Mutant("pull-read-late", path=_READER, tests=(_TESTS, "-k", "during_the_last_read"),
           why="a read that ended after the deadline is taken",
           text="if sentence := obstacle():", fault="if len(into) > len(far):"),
    Mutant("pull-memory-shared", path=_READER, tests=(_TESTS, "-k", "leaves_its_memory_alone"),
           why="a read that was given up writes into the pages of the next one",
           text="self._reader.abandon(place, read)", fault="pass"),
    Mutant("pull-dense-blocks", path=_READER, tests=(_TESTS, "-k", "every_page and large"),
           why="blocks are taken to lie side by side, whatever their stride is",
           text="memory.device_id, strides[each]", fault="memory.device_id, self._block_bytes"),
    Mutant("pull-one-rank-told", path=_READER, tests=(_TESTS, "-k", "all_are_told"),
           why="only the first rank of an engine frees the blocks",
           text="for peer in list(self._ranks):", fault="for peer in list(self._ranks)[:1]:"),
    Mutant("pull-unconnected", path=_READER, tests=(_TESTS, "-k", "before_anything_is_read"),
           why="heartbeats for a prompt that waits do not leave this process",
           text="self._read(peer, place, np.zeros(1), np.zeros(1))", fault="pass"),
    Mutant("pull-names-address", path=_READER, tests=(_TESTS, "-k", "was_checked_is_dialled"),
           why="the name is resolved again for the connection, to another address",
           text="shake_hands(address, blocks, 0)", fault="shake_hands(blocks.host, blocks, 0)"),
    Mutant("pull-unproven-ranks", path=_READER, tests=(_TESTS, "-k", "all_are_told"),
           why="any client can have an engine asked for ranks that it lacks",
           text="order = self._order_of(kvs, near, ends, edges, token_ids)",
           fault="for rank in range(1, blocks.tp_size):\n"
                 "    self._connect(shake_hands(self._address, blocks, rank))\n"
                 "order = self._order_of(kvs, near, ends, edges, token_ids)"),
    Mutant("pull-first-address", path="data_plane/prefill/pull/side_channel.py",
           tests=(_TESTS, "-k", "never_dialled"),
           why="a name with an address outside the allowed networks is dialled",
           text="for address in found:", fault="for address in found[:1]:"),
    Mutant("pull-order-of-names", path="data_plane/prefill/pull/kv_shape.py",
           tests=("tests/data_plane/prefill/pull/test_side_channel.py", "-k", "their_numbers"),
           why="layer 10 is read in the place of layer 2",
           text="key=numbers.__getitem__", fault="key=names.__getitem__"),
]  # fmt: skip
