"""Mutants of pages outside the frames."""

from mutant import Mutant

STORY = ("tests/control_plane/scheduler/pages/test_offload.py",)
_ON_GPU = ("tests/data_plane/kv/test_gpu_copies.py",)

OF_OFFLOAD = [
    Mutant("slot-not-pinned", path="control_plane/scheduler/pages/offload.py",
           tests=(*STORY, "-k", "not_given_up"),
           why="a page is given up while it is being fetched",
           text="taken = host.take(self.pins)", fault="taken = host.take(())"),
    Mutant("stow-without-quarantine", path="control_plane/scheduler/pages/offload.py",
           tests=(*STORY, "-k", "quarantined_until"),
           why="a frame is free while its page is being copied out (quarantine)",
           text="self._quarantine.hold({instance: frames}, None, (), ticket, (instance,))",
           fault="self._state.free({instance: frames})"),
    Mutant("page-copied-while-written", path="data_plane/instance/rows.py",
        tests=("tests/hash_clusters/test_hash_offload.py", "-k", "find_their_history"),
        why="a page is reported as full, and copied, in the step that begins to write it",
        text="self.written = WrittenPage(self.request_id, self.attempt, page - 1, self.page_hash)",
        fault="self.written = WrittenPage(self.request_id, self.attempt, page, self.page_hash)"),
    Mutant("held-row-rewrites", path="control_plane/scheduler/terms/held_requests.py",
           tests=(*STORY, "-k", "starts_again_before"),
           why="a held request's row starts again in a page that others may find",
           text="rewrites = arrival.prompt_len - 1 < len(request.page_hashes) * PAGE_SIZE",
           fault="rewrites = False"),
    Mutant("copy-fails-silently", path="data_plane/kv/page_copier.py",
           tests=("tests/data_plane/kv/test_page_copier.py", "-k", "copy_that_fails"),
           why="an instance whose copier has failed goes on, and its tickets are never answered",
           text="self._failure = done", fault="pass"),
    Mutant("gpu-copies-before-the-step", path="data_plane/kv/gpu_copies.py", tests=_ON_GPU,
           why="a page leaves a GPU before the step that ends it has written there",
           text="self._stream.wait_stream(torch.cuda.current_stream(self._device))", fault="pass"),
    Mutant("slot-before-its-bytes", path="data_plane/kv/gpu_copies.py", tests=_ON_GPU,
           why="a ticket is answered, and its frame free, while the GPU still copies it",
           text="self._stream.synchronize()", fault="pass"),
    Mutant("copies-among-the-steps", path="data_plane/kv/page_copier.py", tests=_ON_GPU,
           why="pages of a GPU are copied on the stream of its steps",
           text="nullcontext() if self._gpu is None else self._gpu.stream()",
           fault="nullcontext()"),
    Mutant("memory-stays-pinned", path="data_plane/kv/gpu_copies.py", tests=_ON_GPU,
           why="pinned memory is never given back",
           text="self._runtime.unpin(self._pinned)", fault="pass"),
    Mutant("closed-ledger-below-zero", path="control_plane/scheduler/state/frame_ledger.py",
        tests=("tests/control_plane/scheduler/state/test_frame_ledger.py", "-k", "closed_ledger"),
        why="a frame that is shared on an instance that is left counts as free and withheld",
        text="self.num_withheld -= 1", fault="self.num_free -= 1"),
]  # fmt: skip
