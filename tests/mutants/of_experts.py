"""Mutants of experts that move: of the balancer, of changes of the table, and of slots."""

from mutant import Mutant

MOVES = "control_plane/coordinator/members/expert_moves.py"
MOVES_TEST = "tests/control_plane/coordinator/members/test_expert_moves.py"
CHANGES = "control_plane/coordinator/flights/expert_changes.py"
CHANGES_TEST = "tests/control_plane/coordinator/flights/test_expert_changes.py"
SLOTS = "data_plane/moe/expert_slots.py"
SLOTS_TEST = "tests/data_plane/moe/test_expert_slots.py"
PLAYED = ("tests/hash_clusters/test_hash_experts.py", "-k", "quick")
TABLES = "data_plane/moe/expert_tables.py"

MUTANTS = [
    Mutant("loads-of-the-old-table", path=MOVES, tests=(MOVES_TEST, "-k", "another_table"),
           why="pairs of a slot are counted for the expert that is there now",
           text="if number != self._number:\n    return\nage", fault="if False:\n    return\nage"),
    Mutant("chance-is-moved", path=MOVES, tests=(MOVES_TEST, "-k", "chance"),
           why="experts are loaded because few rows went here and there by chance",
           text="max(self._start_above, 1 + noise)", fault="self._start_above"),
    Mutant("expert-lost-by-an-exchange", path=MOVES, tests=(MOVES_TEST, "-k", "keep_every"),
           why="an exchange writes the only slot of an expert, which is nowhere until it is loaded",
           text="lends if old in wanted else left[old] > 1",
           fault="lends if old in wanted else True"),
    Mutant("last-slot-lent", path=MOVES, tests=(MOVES_TEST, "-k", "keep_every"),
           why="the last slot of an expert that stays is lent to another one",
           text="and stay[old] > 1", fault="and stay[old] > 0"),
    Mutant("replica-beside-the-hottest", path=MOVES, tests=(CHANGES_TEST, "-k", "leave_a_slot"),
           why="the hottest instance keeps its load since a replica there takes over a little",
           text="loads[at] - relief * (at in self._holders[expert])", fault="loads[at]"),
    Mutant("both-must-lend", path=MOVES, tests=(MOVES_TEST, "-k", "round_by_round"),
           why="experts stay where they are once one of two instances has no slot to lend",
           text="product((False, True), _COLDEST)", fault="product((False,), _COLDEST)"),
    Mutant("written-while-it-is-named", path=CHANGES, tests=PLAYED,
           why="a slot is written at the first mark, while windows in flight name it (named slots)",
           text="if self._done >= self._leaving:", fault="if True:"),
    Mutant("a-table-behind", path=TABLES, tests=PLAYED,
           why="a sender follows the table of the change before (named slots)",
           text="self.slots.follow(self._coming[number])",
           fault="late, self.late = getattr(self, 'late', None), self._coming[number]\n"
                 "if late: self.slots.follow(late)"),
    Mutant("named-before-all-have-it", path=CHANGES, tests=(CHANGES_TEST, "-k", "leave_a_slot"),
           why="rows go to an expert that one instance has and another not yet (named slots)",
           text="if not self._awaited:\n    self._use()", fault="self._use()"),
    Mutant("pairs-of-another-table", path=CHANGES, tests=(CHANGES_TEST, "-k", "is_over"),
           why="loads of slots count for the experts that are there now",
           text="window, pairs) if number == self.number:", fault="window, pairs):"),
    Mutant("change-survives-a-loss", path=CHANGES, tests=(CHANGES_TEST, "-k", "a_loss_drops"),
           why="windows of the next term name a table of the last one",
           text="self.number = self._newest = self._next = 0", fault="pass"),
    Mutant("failed-load-at-once-again", path=CHANGES, tests=(CHANGES_TEST, "-k", "does_not_end"),
           why="a checkpoint that cannot be read is read again and again",
           text="self._resume_at = self._done + self.rest", fault="pass"),
    Mutant("unfilled-slots-are-known", path=CHANGES, tests=(CHANGES_TEST, "-k", "a_loss_drops"),
           why="a term begins with experts in slots that were being written",
           text='"""Let instances fill slots, which no window in flight names."""\n'
                "self._remember()",
           fault="self._put(self._loads)\nself._remember()"),
    Mutant("here-before-it-is-read", path=SLOTS, tests=(SLOTS_TEST, "-k", "half_there"),
           why="an instance says that its experts are here, and reads them yet",
           text="try:\n    self._weights.load(table, self._pause)",
           fault="try:\n    self._filled.append((number, problem))\n"
                 "    self._weights.load(table, self._pause)"),
    Mutant("half-read-and-known", path="data_plane/moe/expert_weights.py",
           tests=(SLOTS_TEST, "-k", "half_there"),
           why="a slot passes for filled that a stopped load has half written",
           text="moe.held[slot] = -1", fault="pass"),
    Mutant("experts-of-the-first-layer", path="data_plane/moe/expert_weights.py",
           tests=(SLOTS_TEST, "-k", "each_layer"),
           why="slots of all layers get the experts of the first one",
           text="table.at(self.seat, number)", fault="table.at(self.seat, 0)"),
    Mutant("loaded-though-there-is-a-replica", path="nanocp/values/experts.py",
           tests=("tests/nanocp/values/test_experts.py",),
           why="a lost seat's experts are loaded that have a replica elsewhere",
           text="if not replicas[each]", fault="if replicas[each] < list(before).count(each)"),
    Mutant("experts-at-home-again", path="control_plane/coordinator/members/members.py",
           tests=("tests/control_plane/coordinator/members/test_takeover.py", "-k", "experts_are"),
           why="a controller that follows loads all experts anew",
           text="self._seats.hold(hello.instance, hello.experts)", fault="pass"),
]  # fmt: skip
