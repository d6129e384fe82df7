"""Mutants of prefill by vLLM."""

from mutant import Mutant

MUTANTS = [
    Mutant(
        name="connector-early-free",
        why="vLLM frees the blocks of an ended prompt whose pages are still being sent",
        path="data_plane/connectors/requests.py",
        text="return True, accepted(tracked.num_pages, self._engine)",
        fault="return False, accepted(tracked.num_pages, self._engine)",
        tests=("tests/data_plane/connectors", "-k", "held_until"),
    ),
    Mutant(
        name="connector-early-report",
        why="the worker reports a prompt as sent while parts of it are queued",
        path="data_plane/connectors/sender.py",
        text="if not self._num_queued[request_id]}",
        fault="if True}",
        tests=("tests/data_plane/connectors", "-k", "held_until"),
    ),
    Mutant(
        name="connector-preempted",
        why="pages of a preempted prompt are read from the blocks that it has lost",
        path="data_plane/connectors/vllm.py",
        text="self._sender.drop(kv_connector_metadata.work.dropped)",
        fault="pass",
        tests=("tests/data_plane/connectors/test_vllm_adapter.py",),
    ),
    Mutant(
        name="connector-drop",
        why="a request that was dropped is sent on from blocks that another prompt has",
        path="data_plane/connectors/sender.py",
        text="if queued.is_cancelled:\nreturn\nqueued.ready()",
        fault="queued.ready()",
        tests=("tests/data_plane/connectors", "-k", "preempted_prompt or every_page"),
    ),
    Mutant(
        name="connector-resumed",
        why="a preempted prompt goes on after the pages that were only queued",
        path="data_plane/connectors/requests.py",
        text="tracked.blocks, tracked.num_pages = [], 0",
        fault="tracked.blocks = []",
        tests=("tests/data_plane/connectors", "-k", "preempted_prompt"),
    ),
    Mutant(
        name="connector-half-page",
        why="a page is sent before its last tokens are computed",
        path="data_plane/connectors/requests.py",
        text="end = num_tokens // PAGE_SIZE",
        fault="end = -(-num_tokens // PAGE_SIZE)",
        tests=("tests/data_plane/connectors", "-k", "every_page"),
    ),
    Mutant(
        name="connector-offset",
        why="a page that begins in the middle of a block is read from the block's begin",
        path="data_plane/connectors/paged_kv.py",
        text="skipped = first % size",
        fault="skipped = 0",
        tests=("tests/data_plane/connectors", "-k", "every_page"),
    ),
    Mutant(
        name="connector-restarted",
        why="an engine that was restarted with other weights serves before it is probed",
        path="data_plane/connectors/requests.py",
        text='elif ticket.engine not in ("", self._engine):',
        fault="elif False:",
        tests=("tests/nanocp/serve/test_serve_engines.py", "-k", "comes_back_with_other_kv"),
    ),
    Mutant(
        name="connector-rank",
        why="every tensor-parallel rank sends its copy of the pages",
        path="data_plane/connectors/vllm.py",
        text="if get_tensor_model_parallel_rank() != 0:",
        fault="if False:",
        tests=("tests/data_plane/connectors/test_vllm_adapter.py", "-k", "first_rank"),
    ),
]
