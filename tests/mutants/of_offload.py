"""Mutants of pages outside the frames."""

from mutant import Mutant

STORY = ("tests/control_plane/scheduler/pages/test_offload.py",)

OF_OFFLOAD = [
    Mutant(
        name="slot-not-pinned",
        why="a page is given up while it is being fetched",
        path="control_plane/scheduler/pages/offload.py",
        text="taken = host.take(self.pins)",
        fault="taken = host.take(())",
        tests=(*STORY, "-k", "not_given_up"),
    ),
    Mutant(
        name="stow-without-quarantine",
        why="a frame is free while its page is being copied out (quarantine)",
        path="control_plane/scheduler/pages/offload.py",
        text="self._quarantine.hold({instance: frames}, None, (), ticket, (instance,))",
        fault="self._state.free({instance: frames})",
        tests=(*STORY, "-k", "quarantined_until"),
    ),
    Mutant(
        name="page-copied-while-written",
        why="a page is reported as full, and copied, in the step that begins to write it",
        path="data_plane/instance/rows.py",
        text="self.written = WrittenPage(self.request_id, self.attempt, page - 1, self.page_hash)",
        fault="self.written = WrittenPage(self.request_id, self.attempt, page, self.page_hash)",
        tests=("tests/data_plane/fake/test_hash_offload.py", "-k", "find_their_history"),
    ),
    Mutant(
        name="held-row-rewrites",
        why="a held request's row starts again in a page that others may find",
        path="control_plane/scheduler/terms/held_requests.py",
        text="rewrites = arrival.prompt_len - 1 < len(request.page_hashes) * PAGE_SIZE",
        fault="rewrites = False",
        tests=(*STORY, "-k", "starts_again_before"),
    ),
    Mutant(
        name="copy-fails-silently",
        why="an instance whose copier has failed goes on, and its tickets are never answered",
        path="data_plane/kv/page_copier.py",
        text="self._failure = done",
        fault="pass",
        tests=("tests/data_plane/kv/test_page_copier.py", "-k", "copy_that_fails"),
    ),
    Mutant(
        name="closed-ledger-below-zero",
        why="a frame that is shared on an instance that is left counts as free and withheld",
        path="control_plane/scheduler/state/frame_ledger.py",
        text="self.num_withheld -= 1",
        fault="self.num_free -= 1",
        tests=("tests/control_plane/scheduler/state/test_frame_ledger.py", "-k", "closed_ledger"),
    ),
]
