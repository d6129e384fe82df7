"""The mutants: faults that look harmless, each with the tests that must see it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault: in `path`, `text` becomes `fault`, and one of `tests` must then fail."""

    name: str
    why: str
    """What goes wrong; if it breaks a law of docs/protocol.md, its name in brackets."""
    path: str
    text: str
    """Stands in the file once. White space may differ, and a comma before a closing bracket."""
    fault: str
    """Lines after the first are indented as the file's line with the text is."""
    tests: tuple[str, ...]
    """Arguments of pytest."""


HASH = ("tests/data_plane/fake/test_hash_cluster.py",)
EXACT = ("tests/data_plane/instance/test_decode_exact.py", "-k", "forced_degree or chaos")

RECOVERY = (
    "tests/data_plane/fake/test_hash_recovery.py",
    "tests/control_plane/scheduler/test_regroup.py",
)

MUTANTS = [
    Mutant(
        name="base-digest",
        why="an instance applies changes to a table that they were not made for (table digests)",
        path="data_plane/instance/window_edge.py",
        text="elif self._table.digest != plan.base_digest:",
        fault="elif False:",
        tests=("tests/data_plane/instance/test_window_edge.py", "-k", "another_table"),
    ),
    Mutant(
        name="full-on-old",
        why="the full table of a resync is applied onto the table that was wrong (table digests)",
        path="data_plane/instance/window_edge.py",
        text="self._table = InstanceTable(self._instance, self._num_instances)",
        fault="pass",
        tests=("tests/data_plane/instance/test_window_edge.py", "-k", "whatever_was_in_it"),
    ),
    Mutant(
        name="between-steps",
        why="tickets and pages wait for the end of a long window",
        path="data_plane/member/instance_runner.py",
        text="self._instance.run_step()\nself._deliver()\nself._between_steps()",
        fault="self._instance.run_step()\nself._deliver()",
        tests=("tests/data_plane/member", "-k", "between_the_steps"),
    ),
    Mutant(
        name="extension-node",
        why="a KV binding is extended to another node while its own node has a free frame",
        path="control_plane/scheduler/layout.py",
        text="(state.cluster.node_of(i) != node, state.kv_tokens(i), i)",
        fault="(state.cluster.node_of(i) == node, state.kv_tokens(i), i)",
        tests=("tests/control_plane/scheduler/test_layout.py",),
    ),
    Mutant(
        name="sharing-peak",
        why="sharing may raise the peak by 200 prompt lengths instead of 2",
        path="control_plane/scheduler/prefix_sharing.py",
        text="own_peak + 2 * prompt_len",
        fault="own_peak + 200 * prompt_len",
        tests=("tests/control_plane/scheduler/test_prefix_sharing.py", "-k", "two_prompt_lengths"),
    ),
    Mutant(
        name="queue-walk",
        why="a full queue is walked to its end in every call",
        path="control_plane/scheduler/scheduler.py",
        text="if num_passed == _MAX_PASSED or not may_be_passed:",
        fault="if not may_be_passed:",
        tests=("tests/control_plane/scheduler/test_scheduler.py", "-k", "full_queue"),
    ),
    Mutant(
        name="lse-merge",
        why="partials are weighed by the maximum instead of the sum of their exponentials",
        path="data_plane/attention/lse_merge.py",
        text="lse_BH = lse_QBH.logsumexp(dim=0)",
        fault="lse_BH = lse_QBH.amax(dim=0)",
        tests=EXACT,
    ),
    Mutant(
        name="transpose",
        why="Res-route names the slots of the wrong peer when a link changes",
        path="control_plane/scheduler/routing.py",
        text="res_of_holder.append(_route_change((moe_binding, slot, request_id)))",
        fault="res_of_holder.append(_route_change((holder, slot, request_id)))",
        tests=HASH,
    ),
    Mutant(
        name="quarantine",
        why="a freed frame is reused while a window that writes to it is still to run (quarantine)",
        path="control_plane/scheduler/quarantine.py",
        text="if self.last_reported[instance] < last_window:",
        fault="if self.last_reported[instance] < last_window - 2:",
        tests=HASH,
    ),
    Mutant(
        name="fence",
        why="a freed frame is reused while the prefill may still write to it (quarantine)",
        path="control_plane/scheduler/quarantine.py",
        text="if ticket is not None:\n    for instance in receivers:",
        fault="if ticket is None:\n    for instance in receivers:",
        tests=("tests/control_plane/scheduler/test_transcripts.py",),
    ),
    Mutant(
        name="tcp-order",
        why="a word that came by TCP is raised before the rows that it announces are there",
        path="data_plane/transport/tcp_server.py",
        text="receive_into(connection, chunks)\nif offset not in words:\n"
        "    words[offset] = Word(memory, offset)\nwords[offset].store(value)",
        fault="if offset not in words:\n    words[offset] = Word(memory, offset)\n"
        "words[offset].store(value)\nreceive_into(connection, chunks)",
        tests=("tests/data_plane/transport/test_shm_exchange.py", "-k", "between_nodes"),
    ),
    Mutant(
        name="tcp-rows",
        why="a put across TCP leaves out the last of the rows that were written",
        path="data_plane/transport/shm.py",
        text="min(rows, num_rows)",
        fault="min(rows, num_rows - 1)",
        tests=("tests/data_plane/transport/test_tcp.py", "-k", "rows"),
    ),
    Mutant(
        name="stale-epoch",
        why="buffers are one deep: a region is read twice or overwritten (equal epochs)",
        path="data_plane/transport/shm.py",
        text="region = self._incoming[source][channel][epoch & 1]",
        fault="region = self._incoming[source][channel][0]",
        tests=("tests/data_plane/transport/test_shm_exchange.py",),
    ),
    Mutant(
        name="expert-owner",
        why="rows visit the neighbour of the instance that holds their expert",
        path="data_plane/moe/all_to_all_cpu.py",
        text="self._experts_each = num_experts // self._num_instances",
        fault="self._experts_each = num_experts // self._num_instances + 1",
        tests=EXACT,
    ),
    Mutant(
        name="append-address",
        why="a row that stopped appends to its frames, not to the scratch frame (frozen window)",
        path="data_plane/kv/frame_pool.py",
        text="has_tail & live,",
        fault="has_tail,",
        tests=("tests/data_plane/kv/test_frame_pool.py",),
    ),
    Mutant(
        name="append-offset",
        why="new KV is written one token late",
        path="data_plane/kv/frame_pool.py",
        text="* PAGE_SIZE + offset,",
        fault="* PAGE_SIZE + (offset + 1) % PAGE_SIZE,",
        tests=EXACT,
    ),
    Mutant(
        name="hand-off",
        why="a row changes its MoE binding without its output ids (hand-offs)",
        path="data_plane/instance/rows.py",
        text="            tuple(self.output_ids),\n            tuple(self.prompt_ids),\n",
        fault="            (),\n            tuple(self.prompt_ids),\n",
        tests=EXACT,
    ),
    Mutant(
        name="hand-off-prompt",
        why="a row changes its MoE binding without the prompt that repetition_penalty needs",
        path="data_plane/instance/rows.py",
        text="            tuple(self.output_ids),\n            tuple(self.prompt_ids),\n",
        fault="            tuple(self.output_ids),\n            (),\n",
        tests=("tests/data_plane/instance/test_decode_exact.py", "-k", "any_degree"),
    ),
    Mutant(
        name="hash-hand-off",
        why="the same on HashInstance: its next token depends on the output ids",
        path="nanocp/wire/convert.py",
        text="output_ids=row.output_ids,",
        fault="",
        tests=HASH,
    ),
    Mutant(
        name="resume",
        why="a preempted row comes back without its tokens: its indices begin at 0 again",
        path="control_plane/frontend/streams.py",
        text="stream.params, self._front_end, tuple(stream.output_ids), penalized_ids",
        fault="stream.params, self._front_end, (), penalized_ids",
        tests=("tests/control_plane/frontend/test_streams.py",),
    ),
    Mutant(
        name="stop-string",
        why="a stop string is looked for in the text of one token, not across tokens",
        path="control_plane/frontend/tokenizer.py",
        text="max(0, num_old - len(string) + 1)",
        fault="num_old",
        tests=("tests/control_plane/frontend/test_text.py",),
    ),
    Mutant(
        name="promised-once",
        why="a preempted request is promised no more than before, and may be preempted for ever",
        path="control_plane/scheduler/scheduler.py",
        text="arrival.max_tokens if arrival.resumes "
        "else self._promise.num_tokens(arrival.max_tokens)",
        fault="self._promise.num_tokens(arrival.max_tokens)",
        tests=("tests/control_plane/scheduler/test_transcripts.py",),
    ),
    Mutant(
        name="moved-frames",
        why="the frames that a page leaves are reused while a window still reads them (quarantine)",
        path="control_plane/scheduler/scheduler.py",
        text="self._quarantine.hold(frames, last, request.ever_bound, None, ())",
        fault="self._quarantine.hold(frames, None, request.ever_bound, None, ())",
        tests=("tests/control_plane/scheduler/test_page_moves.py",),
    ),
    Mutant(
        name="moved-unfilled",
        why="a page moves while the row may still write to it",
        path="control_plane/scheduler/cluster_state.py",
        text="(request.position_at(self.step) - self._steps_in_flight) // PAGE_SIZE",
        fault="-(-request.position_at(self.step) // PAGE_SIZE)",
        tests=HASH,
    ),
    Mutant(
        name="choice-seed",
        why="every choice of a seed draws the same tokens",
        path="control_plane/frontend/validation.py",
        text="(seed + choice) % NUM_SEEDS",
        fault="seed % NUM_SEEDS",
        tests=("tests/control_plane/frontend/test_choices.py",),
    ),
    Mutant(
        name="front-end-ids",
        why="two front ends give out the same request ids",
        path="control_plane/frontend/front_end.py",
        text="first_id=1 + self._index,",
        fault="first_id=1,",
        tests=("tests/control_plane/frontend/test_front_ends.py", "-k", "owner"),
    ),
    Mutant(
        name="prompt-logprobs",
        why="a prompt's log probabilities are those of the token itself, not of the next one",
        path="data_plane/prefill/pages.py",
        text="token_ids[begin + 1 : end + 1], prompt_logprobs",
        fault="token_ids[begin:end], prompt_logprobs",
        tests=("tests/data_plane/prefill/test_pages.py", "-k", "logprobs"),
    ),
    Mutant(
        name="split-slot",
        why="the first piece of a row lands where its part put the last piece of the row before",
        path="data_plane/attention/triton_split.py",
        text="tl.where(lo == 0, 1, 0)",
        fault="0",
        tests=("tests/data_plane/kernels/test_kernels_interpreted.py",),
    ),
    Mutant(
        name="shared-freed",
        why="a frame is free as soon as the first of the requests that share it has left",
        path="control_plane/scheduler/frame_ledger.py",
        text="if page.num_owners == page.num_holds == 0:",
        fault="if page.num_holds == 0:",
        tests=HASH,
    ),
    Mutant(
        name="shared-unwritten",
        why="pages are shared before the receivers have said that they are written",
        path="control_plane/scheduler/scheduler.py",
        text="request.state = TRANSFERRING",
        fault="request.state = TRANSFERRING\nself.prefix_sharing.written(request)",
        tests=HASH,
    ),
    Mutant(
        name="members-secret",
        why="a call at a members' port needs no secret: a client can write another's answer",
        path="control_plane/members_port.py",
        text="return secret is not None and hmac.compare_digest(secret.encode(), given)",
        fault="return secret is not None",
        tests=("tests/control_plane/test_members_port.py",),
    ),
    Mutant(
        name="token-owner",
        why="the token sink takes tokens of a request from any instance",
        path="control_plane/frontend/streams.py",
        text="if (owner := stream.owners.of(token.index)) != instance:",
        fault="if (owner := stream.owners.of(token.index)) is None:",
        tests=("tests/control_plane/frontend/test_token_owners.py",),
    ),
    Mutant(
        name="owner-window",
        why="a new MoE binding is taken to own tokens from the end of its first window on",
        path="control_plane/frontend/token_owners.py",
        text="num_new // self._steps_per_window * self._steps_per_window",
        fault="num_new",
        tests=("tests/control_plane/frontend/test_token_owners.py", "-k", "seeds"),
    ),
    Mutant(
        name="attempt",
        why="tokens of an earlier attempt are taken (one history)",
        path="control_plane/frontend/streams.py",
        text="if stream is None or token.attempt != stream.attempt:",
        fault="if stream is None:",
        tests=RECOVERY,
    ),
    Mutant(
        name="early-tokens",
        why="a new attempt keeps tokens that came out of order (one history)",
        path="control_plane/frontend/streams.py",
        text="self._early.clear()",
        fault="",
        tests=("tests/control_plane/frontend/test_streams.py",),
    ),
    Mutant(
        name="one-ahead",
        why="a row restarts one position after its last known token (kept KV)",
        path="control_plane/scheduler/request.py",
        text="self.attempt = arrival.attempt\n        self.position = arrival.prompt_len - 1",
        fault="self.attempt = arrival.attempt\nself.position = arrival.prompt_len",
        tests=RECOVERY,
    ),
    Mutant(
        name="lost-pages",
        why="pages of a lost instance are trusted (kept KV)",
        path="control_plane/scheduler/regroup.py",
        text="if request.state is TRANSFERRING or not lost.isdisjoint(request.pages_on):",
        fault="if request.state is TRANSFERRING:",
        tests=RECOVERY,
    ),
    Mutant(
        name="lost-prefix",
        why="the cached pages of a lost instance are still found",
        path="control_plane/scheduler/scheduler.py",
        text="self._state.lose(instance)",
        fault="pass",
        tests=RECOVERY,
    ),
    Mutant(
        name="whole-gpu-twice",
        why="nano-operations that run at once may have more than the whole GPU",
        path="nanocp/overlap/search.py",
        text="program.add(used <= 1)",
        fault="program.add(used <= 1.1)",
        tests=("tests/nanocp/overlap/test_search.py",),
    ),
    Mutant(
        name="range-test",
        why="nano-operations wait for those of other rows too",
        path="nanocp/overlap/operations.py",
        text="return self.begin < other.end and other.begin < self.end",
        fault="return True",
        tests=("tests/nanocp/overlap/test_search.py",),
    ),
    Mutant(
        name="old-tickets",
        why="a survivor takes pages of a ticket of the term before (terms)",
        path="data_plane/instance/page_transfers.py",
        text="self._to_send.clear()\n        self._expected.clear()",
        fault="self._to_send.clear()",
        tests=("tests/data_plane/instance/test_page_transfers.py",),
    ),
    Mutant(
        name="old-reports",
        why="reports of the term before count in this one (terms)",
        path="tests/harness/hash_recovery.py",
        text="return event if term == self.term else None",
        fault="return event",
        tests=RECOVERY,
    ),
]
