"""Faults of states: of the fold, of where a state lies, and of how it travels."""

from mutant import Mutant

_KERNEL = "tests/data_plane/kernels/test_carry_interpreted.py"
_POOL = "tests/data_plane/kv/test_carry_pool.py"
_MOVES = "tests/control_plane/scheduler/windows/test_carry_moves.py"
_NATIVE = "tests/data_plane/native/test_delta.py"
_HELD = "tests/control_plane/scheduler/terms/test_held_requests.py"
_PREFILL = "tests/data_plane/startup/test_prefill.py"
_SLOTS = "tests/control_plane/scheduler/pages/test_offload.py"


def _played(seed: int) -> tuple[str, ...]:
    """The play of one seed, which this fault turns red."""
    return ("tests/hash_clusters/test_hash_states.py", "-k", f"planted and {seed}")


OF_STATES = [
    Mutant(
        name="fold-at-once",
        why="a state takes the token of its own step, which may run again (late fold)",
        path="data_plane/kv/carry_pool.py",
        text="u_BHV = correction(state, decay, key_BHK, value_BHV, given.beta_BH)",
        fault="u_BHV = correction(state, decay, key_BHK, value_BHV, given.beta_BH)\n"
        "fields.folded[frame_B[live_B]] += 1",
        tests=(_POOL, "-k", "torn"),
    ),
    Mutant(
        name="fold-one-record",
        why="records that are not folded yet are left out (late fold)",
        path="data_plane/kv/carry_pool.py",
        text="for back in range(self.depth - 1, 0, -1):",
        fault="for back in range(self.depth - 2, 0, -1):",
        tests=(_POOL, "-k", "prompt_of_the_same"),
    ),
    Mutant(
        name="state-ahead",
        why="a state that is ahead of its row is taken (late fold)",
        path="data_plane/kv/carry_pool.py",
        text="if bool((live_B & (num_behind_B < 0)).any()):",
        fault="if False:",
        tests=(_POOL, "-k", "ahead"),
    ),
    Mutant(
        name="native-fold-not-counted",
        why="compiled code folds a record and does not count it (late fold)",
        path="data_plane/native/delta.h",
        text="if (live[b]) std::fill_n(folded(b), of.H, int32_t(position[b]));",
        fault=";",
        tests=(_NATIVE, "-k", "torn and float32"),
    ),
    Mutant(
        name="native-fold-at-once",
        why="compiled code counts the token of its own step (late fold)",
        path="data_plane/native/delta.h",
        text="std::fill_n(folded(b), of.H, int32_t(position[b]));",
        fault="std::fill_n(folded(b), of.H, int32_t(position[b] + 1));",
        tests=(_NATIVE, "-k", "torn and float32"),
    ),
    Mutant(
        name="native-state-ahead",
        why="compiled code takes a state that is ahead of its row (late fold)",
        path="data_plane/native/delta.h",
        text="if (behind < 0 || behind > 1)",
        fault="if (behind > 1)",
        tests=(_NATIVE, "-k", "refused"),
    ),
    Mutant(
        name="native-row-that-stopped",
        why="in compiled code a row that stopped changes its state (late fold)",
        path="data_plane/native/delta.h",
        text="if (live[b])\nkey_head",
        fault="if (true)\nkey_head",
        tests=(_NATIVE, "-k", "refused"),
    ),
    Mutant(
        name="native-norms-rounded",
        why="compiled code rounds a row in bf16 before a norm's weight in fp32",
        path="data_plane/native/norm.h",
        text="rounded(load(x + i, mask) * by, weight)",
        fault="rounded(load(x + i, mask) * by, x)",
        tests=("tests/data_plane/native/test_heads.py", "-k", "norms_of and next and bfloat16"),
    ),
    Mutant(
        name="state-inputs",
        why="inputs of the convolution stay behind (state of the position)",
        path="data_plane/kv/carry_pool.py",
        text="ring[(first + kept) % len(ring)] = given.channels_BC[kept]",
        fault="pass",
        tests=(_POOL, "-k", "prompt"),
    ),
    Mutant(
        name="state-scratch",
        why="padding and rows that stopped change the state of another (late fold)",
        path="data_plane/step/cpu.py",
        text="frame = np.where(rows.live, context.tables.carry_frame, carry.scratch)",
        fault="frame = np.array(context.tables.carry_frame)",
        tests=("tests/data_plane/step/test_cpu.py",),
    ),
    Mutant(
        name="gpu-fold-behind-a-wait",
        why="behind a wait that failed states change on a GPU (late fold)",
        path="data_plane/kv/triton_carry.py",
        text="if (tl.load(live_ptr + row) == 0) | (tl.load(error_ptr) != 0):",
        fault="if tl.load(live_ptr + row) == 0:",
        tests=(_KERNEL, "-k", "failed_wait"),
    ),
    Mutant(
        name="gpu-fold-count",
        why="one head's count speaks for all on a GPU (late fold)",
        path="data_plane/kv/triton_carry.py",
        text="folded = tl.load(folded_ptr + words + head)",
        fault="folded = tl.load(folded_ptr + words)",
        tests=(_KERNEL, "-k", "each_head"),
    ),
    Mutant(
        name="gpu-state-ahead",
        why="a state that is not of its row's position is taken on a GPU (state of the position)",
        path="data_plane/kv/triton_carry.py",
        text="if (behind < 0) | (behind > PLACES - 1):",
        fault="if behind > 1000:",
        tests=(_KERNEL, "-k", "another_position"),
    ),
    Mutant(
        name="state-not-cleared",
        why="a row at position 0 begins with another's state (state of the position)",
        path="data_plane/instance/window_edge.py",
        text="if self._carry is not None and start.position == 0:",
        fault="if False:",
        tests=_played(71013),
    ),
    Mutant(
        name="state-of-another-position",
        why="a prompt's state is of a token more (state of the position)",
        path="data_plane/step/stage.py",
        text="carry.extend(place, frame, span.first, given, weights.attention)",
        fault="carry.extend(place, frame, span.first + 1, given, weights.attention)",
        tests=(_PREFILL, "-k", "next"),
    ),
    Mutant(
        name="state-of-the-last-layer",
        why="a prefill that stops early leaves the last layer's state behind",
        path="data_plane/step/stage.py",
        text="parts.append(carry.extend(place, frame, span.first, given, weights.attention))",
        fault=(
            "parts.append(given if self._ends_at(layer, batch) else "
            "carry.extend(place, frame, span.first, given, weights.attention))"
        ),
        tests=(_PREFILL, "-k", "next"),
    ),
    Mutant(
        name="state-of-another-stage",
        why="a stage of the prefill puts its layers' states where another's belong",
        path="data_plane/kv/carry_pool.py",
        text="before = max(self._first_byte - number * self._page_bytes, 0)",
        fault="before = 0",
        tests=("tests/data_plane/member/test_staged_prefill.py", "-k", "states and next and 6"),
    ),
    Mutant(
        name="row-runs-while-its-state-moves",
        why="a row is in windows while its state travels (one state)",
        path="control_plane/scheduler/windows/row_windows.py",
        text="self.stop(request)\nself.carried[request.request_id] = request",
        fault="self._suspend(request)\nself._park(request)\n"
        "self.carried[request.request_id] = request",
        tests=(_MOVES, "-k", "stands_still"),
    ),
    Mutant(
        name="state-leaves-early",
        why="a state travels while a window in flight changes it (one state)",
        path="control_plane/scheduler/windows/carry_moves.py",
        text="if is_waiting and last is not None and last <= self._quarantine.last_complete:",
        fault="if is_waiting and last is not None:",
        tests=_played(71006),
    ),
    Mutant(
        name="state-placement",
        why="the front end is told of the new instance before it runs the row (ordered tokens)",
        path="control_plane/scheduler/state/request.py",
        text="binding = self.moe_binding if self.ran_at is None else self.ran_at",
        fault="binding = self.moe_binding",
        tests=_played(71004),
    ),
    Mutant(
        name="state-end-at-the-old-binding",
        why="a row that was never handed over ends where it is not (hand-offs)",
        path="control_plane/scheduler/windows/lowering.py",
        text="self._pending[self._row_at(request)].ends.append(request_id)",
        fault="self._pending[request.moe_binding].ends.append(request_id)",
        tests=(_MOVES, "-k", "before_its_hand_off"),
    ),
    Mutant(
        name="state-shared-away",
        why="a prompt whose pages are all shared begins without a state",
        path="control_plane/scheduler/scheduler.py",
        text="num_there = request.num_shared * PAGE_SIZE if request.carry is None else 0",
        fault="num_there = request.num_shared * PAGE_SIZE",
        tests=(_MOVES, "-k", "all_there"),
    ),
    Mutant(
        name="state-grown-before-it-stops",
        why="a row grows for a window, and is stopped before it",
        path="control_plane/scheduler/scheduler.py",
        text="rows.rebind(self._change.rebindings(), may_carry=not is_ending)",
        fault="rows.grow()\nrows.rebind(self._change.rebindings(), may_carry=not is_ending)",
        tests=_played(71172),
    ),
    Mutant(
        name="state-restart",
        why="an instance says of its state that it is one position further (state of the position)",
        path="data_plane/instance/window_edge.py",
        text="(request_id, self._carry.num_folded(self._carry_frame(request_id)), row.position)",
        fault="(request_id, 0, row.position)",
        tests=_played(71037),
    ),
    Mutant(
        name="state-restart-anywhere",
        why="a row goes on with a state of another position (state of the position)",
        path="control_plane/scheduler/terms/held_requests.py",
        text="if least <= position <= most:",
        fault="if True:",
        tests=(_HELD, "-k", "another_position"),
    ),
    Mutant(
        name="state-of-a-lost-member",
        why="what a member said before it was lost counts (one state)",
        path="control_plane/coordinator/members/kept_pages.py",
        text="self._restarts.pop(member, None)",
        fault="pass",
        tests=("tests/control_plane/coordinator/members/test_members.py", "-k", "states"),
    ),
    Mutant(
        name="state-between-terms",
        why="a ticket for a state is issued between two terms (terms)",
        path="control_plane/scheduler/scheduler.py",
        text="self._held.begin_attempt(request, arrival, not self._is_between_terms)",
        fault="self._held.begin_attempt(request, arrival)",
        tests=(_HELD, "-k", "between_two_terms"),
    ),
    Mutant(
        name="state-not-stowed",
        why="a page of a preempted row's state is not stowed",
        path="control_plane/scheduler/pages/offload.py",
        text="runs.append(request.carry)",
        fault="runs.append(request.carry._replace(num_pages=request.carry.num_pages - 1))",
        tests=(_SLOTS, "-k", "with_its_state"),
    ),
    Mutant(
        name="half-a-state",
        why="some pages of a state come from slots and some from the prefill (one state)",
        path="control_plane/scheduler/pages/offload.py",
        text="return [each for each in found if each[1].page < CARRY_PAGE]",
        fault="return found",
        tests=(_SLOTS, "-k", "with_its_state"),
    ),
    Mutant(
        name="state-of-another-copy",
        why="pages of two copies of a state are found together (one state)",
        path="control_plane/scheduler/pages/offload.py",
        text="own is not None and own[1] == event.ticket",
        fault="own is not None",
        tests=(_SLOTS, "-k", "two_copies"),
    ),
    Mutant(
        name="state-in-slots-of-another-position",
        why="a row goes on with the state that it had at another position",
        path="control_plane/scheduler/pages/offload.py",
        text="elif num_then != num_tokens:",
        fault="elif False:",
        tests=(_SLOTS, "-k", "with_its_state"),
    ),
    Mutant(
        name="states-in-plan",
        why="memory need forgets states",
        path="data_plane/startup/memory_need.py",
        text="return self.experts + self.other_weights + self.exchange + self.states",
        fault="return self.experts + self.other_weights + self.exchange",
        tests=("tests/nanocp/cli/test_plan.py", "-k", "states"),
    ),
]
