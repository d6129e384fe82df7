"""Faults in the persistent kernel of a fused mixture, each with the tool that finds it.

The explorer meets every order of whole tasks, the weaver half-written rows and programs that race,
the lint a missing barrier or scope (tests/harness/kernels/fused_schedules.py, fused_roles.py).
What one of them finds the others may not: test names below are of the tool that must. Two faults
cannot be planted. A missing barrier before a release is none with Triton 3.9, which adds one; so
the lint's tests strike the barriers out of what was compiled. An epoch that is counted before its
counters are cleared is none either: only the next launch reads it, and a stream begins that one
afterwards.
"""

from mutant import Mutant

FILE = "tests/data_plane/kernels/test_fused_interpreted.py"
EXPLORED = (FILE, "-k", "epochs_overlap", "-m", "not system")
TWO_TILES = (FILE, "-k", "any_order and tiles")
AHEAD = (FILE, "-k", "epoch_ahead")
LATER_FLAG = (FILE, "-k", "flag_that_is_ahead")
WOVEN = (FILE, "-k", "woven_instances", "-m", "not system")
WOVEN_PROGRAMS = (FILE, "-k", "woven_programs", "-m", "not system")
GATES = (FILE, "-k", "gate_chooses and sigmoid")
BITS = (FILE, "-k", "bit_by_bit", "-m", "not system")
ABANDONED = (FILE, "-k", "abandoned_is_forgotten")
LOOKS = (FILE, "-k", "wait_ends_with_its_term and looks")
LINT = ("tests/data_plane/kernels/test_fused_compilation.py", "-k", "puts_releases and dispatch")

STATE = "data_plane/moe/fused/state.py"
GATE = "data_plane/moe/fused/gate.py"
TASKS = "data_plane/moe/fused/tasks.py"
KERNEL = "data_plane/moe/fused/kernel.py"

MUTANTS = [
    Mutant("fused-flag-before-rows", path=TASKS, tests=WOVEN,
           why="a peer sees the flag of a dispatch before its rows (weaver)",
           text="hidden_ptr = rows_of(base, S.dispatch_hidden, rows.x, region, S, X)",
           fault=("hidden_ptr = rows_of(base, S.dispatch_hidden, rows.x, region, S, X)\n"
                  "tl.store(field(base, S.dispatch_count, state.count) + region, count)\n"
                  "tl.store(field(base, S.dispatch_flag, state.epoch) + region, epoch)")),
    Mutant("fused-stale-flag", path=KERNEL, tests=EXPLORED,
        why="rows of two epochs ago are taken in as if they had just come (explorer, equal epochs)",
        text="is_new = is_out & (found == epoch)", fault="is_new = is_out & (found > 0)"),
    Mutant("fused-flag-ahead", path=KERNEL, tests=LATER_FLAG,
           why="rows of a later epoch are taken in where an error is due (equal epochs)",
           text="is_wrong = (is_out & (found > epoch)) | is_over",
           fault="is_new = is_out & (found >= epoch)\nis_wrong = is_over"),
    Mutant("fused-one-deep", path=STATE, tests=AHEAD,
           why="a peer that is one epoch ahead overwrites what is still read (explorer)",
           text="return (epoch & 1) * S.num_instances",
           fault="return (epoch & 0) * S.num_instances"),
    Mutant("fused-outputs-early", path=TASKS, tests=TWO_TILES,
           why="an expert's outputs begin before all of its inner columns are there (explorer)",
           text="if done == tl.cdiv(I, N) - 1:", fault="if done == 0:"),
    Mutant("fused-return-early", path=TASKS, tests=EXPLORED,
           why="a source gets its sums back one pair early (explorer)",
           text="(row < count) & (left == 1)", fault="(row < count) & (left == 2)"),
    Mutant("fused-counters-kept", path=KERNEL, tests=EXPLORED,
           why="a replay finds the counters of the epoch before (explorer)",
           text="tl.store(state.counter + index, index * 0, mask=index < S.num_counters)",
           fault="tl.store(state.counter + index, index * 0, mask=index < 0)"),
    Mutant("fused-epoch-too-soon", path=KERNEL, tests=EXPLORED,
           why="the last program out ends an epoch that is not complete (explorer)",
           text="if is_complete(state, S) & (tl.load(state.error, volatile=True) == 0):",
           fault="if tl.load(state.error, volatile=True) == 0:"),
    Mutant("fused-lock-kept", path=KERNEL, tests=EXPLORED,
           why="nobody can sweep any more (explorer: stuck within a bound)",
           text='tl.atomic_xchg(word(state, LOCK), 0, sem="release", scope="gpu")',
           fault='tl.atomic_xchg(word(state, LOCK), 1, sem="release", scope="gpu")'),
    Mutant("fused-no-lock", path=KERNEL, tests=WOVEN_PROGRAMS,
           why="two programs take the same rows in (weaver)",
           text='if tl.atomic_cas(word(state, LOCK), 0, 1, sem="acq_rel", scope="gpu") == 0:',
           fault="if num_programs > 0:"),
    Mutant("fused-task-twice", path=KERNEL, tests=WOVEN_PROGRAMS,
           why="two programs draw the same task (weaver)",
           text='drawn = tl.atomic_add(drawn_ptr, 1, sem="relaxed", scope="gpu")',
           fault="drawn = tl.load(drawn_ptr)\ntl.store(drawn_ptr, drawn + 1)"),
    Mutant(
        name="fused-other-order",
        why="a row's pairs are summed in an order that depends on what came when (bits)",
        path=TASKS,
        text="for k in range(K):",
        fault=(
            "for turn in range(K):\n"
            "    is_odd = tl.load(state.statistic).to(tl.int32) % 2\n"  # sweeps so far
            "    k = turn + is_odd * (K - 1 - 2 * turn)"
        ),
        tests=BITS,
    ),
    Mutant("fused-choice-early", path=GATE, tests=EXPLORED,
           why="a row's experts are chosen before the last piece of its scores is there (explorer)",
           text="if done == tl.cdiv(G, N) * S.gate_parts - 1:",
           fault="if done == tl.cdiv(G, N) * S.gate_parts - 2:"),
    Mutant("fused-route-early", path=GATE, tests=EXPLORED,
           why="rows are routed before the experts of all of them are chosen (explorer)",
           text="if done == num_rows - 1:", fault="if done == 0:"),
    Mutant("fused-biased-weight", path=GATE, tests=GATES,
           why="the bias of the choice weighs the experts too",
           text="tl.where(expert == best, score, 0.0)",
           fault="tl.where(expert == best, choice, 0.0)"),
    Mutant("fused-shared-not-awaited", path=KERNEL, tests=EXPLORED,
           why="a row is added up before its shared expert has ended (explorer)",
           text="if own_left == 0:", fault="if own_left >= 0:"),
    Mutant("fused-gpu-scope", path=TASKS, tests=LINT,
           why="a peer on another GPU may see the flag before the rows (lint)",
           text=('done = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="sys")\n'
                 "if (done == num_parts(count, S) - 1) & (base != 0):\n"
                 '    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")'),
           fault=('done = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu")\n'
                  "if done == num_parts(count, S) - 1:\n"
                  '    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="gpu")')),
    Mutant("fused-loads-twice", path=KERNEL, tests=EXPLORED,
           why="what came in the first wave counts again with the second (explorer)",
           text="tl.atomic_add(weights.load + expert, size, mask=size > 0",
           fault="tl.atomic_add(weights.load + expert, after, mask=size > 0"),
    Mutant("fused-absent-awaited", path=KERNEL, tests=ABANDONED,
           why="a fused mixture awaits an instance that is not in the term (explorer)",
           text="add(word(state, TAKEN_IN), tl.sum((is_source & (is_there == 0)).to(tl.int32)))",
           fault=""),
    Mutant("fused-deaf-wait", path=KERNEL, tests=LOOKS,
           why="a wait inside a fused mixture does not see that its term is over (bounded waits)",
           text="if polls % _POLLS_A_LOOK == _POLLS_A_LOOK - 1:", fault="if polls < 0:"),
]  # fmt: skip
