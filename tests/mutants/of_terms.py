"""Mutants of terms: of what a lost member and the term before could still do."""

from mutant import Mutant

OF_TERMS = [
    Mutant(
        name="same-segments",
        why="a term has the segments of the one before, which a lost process may write (terms)",
        path="data_plane/transport/shared_memory.py",
        text='return f"nanocp-{cluster_id}-t{term}-{kind}-{instance}"',
        fault='return f"nanocp-{cluster_id}-t1-{kind}-{instance}"',
        tests=("tests/data_plane/transport/test_term_over.py",),
    ),
    Mutant(
        name="deaf-wait",
        why="a wait inside a step does not see that its term is over (bounded waits)",
        path="data_plane/transport/shm.py",
        text="go_on=lambda: not term.is_over and self._is_alive(source)",
        fault="go_on=lambda: self._is_alive(source)",
        tests=("tests/data_plane/transport/test_term_over.py", "-k", "inside_a_step and aa"),
    ),
    Mutant(
        name="old-epochs",
        why="a survivor goes on with its epochs, a new process begins at 0 (equal epochs)",
        path="data_plane/transport/regions.py",
        text="self.attention_epoch = self.moe_epoch = 0",
        fault="pass",
        tests=("tests/data_plane/transport/test_term_over.py",),
    ),
    Mutant(
        name="old-plans",
        why="an instance runs a plan of the term before (terms)",
        path="data_plane/member/instance_runner.py",
        text="if message.term != self._segments.term.number:",
        fault="if False:",
        tests=("tests/data_plane/member/test_instance_runner.py", "-k", "term_that_ends"),
    ),
    Mutant(
        name="old-member-reports",
        why="the controller takes a report of the term before (terms)",
        path="control_plane/members/members.py",
        text="case kind if message.term != self.terms.number or not self.terms.is_serving:",
        fault="case kind if not self.terms.is_serving:",
        tests=("tests/control_plane/members/test_members.py",),
    ),
    Mutant(
        name="old-words",
        why="an instance that has left an earlier term counts as out of this one (terms)",
        path="control_plane/members/terms.py",
        text="if self.standing[instance] is Standing.LEAVING and term == self.number:",
        fault="if self.standing[instance] is Standing.LEAVING:",
        tests=("tests/control_plane/members/test_terms.py",),
    ),
    Mutant(
        name="two-prefills",
        why="a prefill that may live on shares its rings with its successor (terms)",
        path="control_plane/members/replacements.py",
        text="if not gone.is_set():",
        fault="if False:",
        tests=("tests/control_plane/members/test_members.py",),
    ),
    Mutant(
        name="no-fence",
        why="a lost process that is only stopped is not killed (terms)",
        path="control_plane/members/replacements.py",
        text="""await asyncio.to_thread(self._processes.kill, member)
                with suppress""",
        fault="with suppress",
        tests=("tests/control_plane/members/test_members.py",),
    ),
    Mutant(
        name="beats-ignored",
        why="a heartbeat does not end the silence before it",
        path="control_plane/members/heartbeats.py",
        text="self._silent_ticks[member] = 0",
        fault="self._silent_ticks.setdefault(member, 0)",
        tests=("tests/control_plane/members/test_heartbeats.py",),
    ),
    Mutant(
        name="lost-prompts",
        why="prompts that a lost prefill had not filled are forgotten",
        path="control_plane/transfers.py",
        text="if unanswered.request is not None:",
        fault="if False:",
        tests=("tests/control_plane/test_transfers.py",),
    ),
]
