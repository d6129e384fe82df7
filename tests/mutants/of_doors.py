"""Faults of what coding agents send: messages and tools that reach a template otherwise."""

from mutant import Mutant

_INSTRUCTIONS = "tests/control_plane/frontend/http/test_instructions.py"
_CONVERSATION = "control_plane/frontend/http/tools/conversation.py"
_HABITS = "control_plane/frontend/http/tools/template_habits.py"

OF_DOORS = [
    Mutant("late-system-lost", path=_CONVERSATION,
           tests=(_INSTRUCTIONS, "-k", "in_its_order and late_lost"),
           why="a system message behind a user's goes to a template that loses it in silence",
           text="role not in habits.late_roles", fault="False"),
    Mutant("late-system-hoisted", path=_CONVERSATION,
           tests=(_INSTRUCTIONS, "-k", "in_its_order and late_refused"),
           why="a late system message joins the first one, and changes the prompt's top",
           text="if is_joined:\n    contents[-1].append(fields[\"content\"])",
           fault="if is_joined or is_moved:\n    contents[0].append(fields[\"content\"])"),
    Mutant("user-in-a-row", path=_CONVERSATION, tests=(_INSTRUCTIONS, "-k", "would_refuse"),
           why="a moved message and the user's next one stay two, which templates refuse",
           text="(is_joined or is_moved or was_moved)", fault="(is_joined or is_moved)"),
    Mutant("one-of-two-counts", path=_HABITS,
           tests=(_INSTRUCTIONS, "-k", "found_by_rendering or in_its_order"),
           why="only one of two system messages is looked for, so a lost one counts as written",
           text="return -1 not in places and places == sorted(places)",
           fault="return max(places) >= 0"),
    Mutant("hoisted-counts-as-kept", path=_HABITS,
           tests=(_INSTRUCTIONS, "-k", "in_its_order and late_hoisted"),
           why="a template that gathers system messages gets late ones, which change the top",
           text="return -1 not in places and places == sorted(places)",
           fault="return -1 not in places"),
]  # fmt: skip
