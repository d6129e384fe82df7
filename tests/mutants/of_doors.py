"""Faults of what coding agents send: messages and tools that reach a template otherwise."""

from mutant import Mutant

_INSTRUCTIONS = "tests/control_plane/frontend/http/test_instructions.py"
_MESSAGES = "tests/control_plane/frontend/http/test_messages.py"
_MESSAGES_ROOM = "control_plane/frontend/http/messages"
_CONVERSATION = "control_plane/frontend/http/tools/conversation.py"
_RESPONSES = "tests/control_plane/frontend/http/test_responses_api.py"
_STORE = "tests/control_plane/frontend/http/test_responses_store.py"
_RESPONSES_ROOM = "control_plane/frontend/http/responses_api"
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
    Mutant("namespace-dropped", path=f"{_RESPONSES_ROOM}/client_tools.py",
           tests=(_RESPONSES, "-k", "must_be_called or every_kind"),
           why="a call of a namespace's tool comes back without it, which clients cannot run",
           text="if self.namespace else {}", fault="if False else {}"),
    Mutant("last-output-made-anew", path=f"{_RESPONSES_ROOM}/writer.py",
           tests=(_RESPONSES, "-k", "adds_up"),
           why="the items of response.completed are not those that were streamed",
           text="[self._item(block) for block in self.blocks]",
           fault='[{**self._item(block), "id": f"x{block.number}"} for block in self.blocks]'),
    Mutant("all-tenants-responses", path=f"{_RESPONSES_ROOM}/store.py",
           tests=(_STORE, "-k", "another_tenants"),
           why="a response is served to another tenant who knows its id",
           text="if kept is None or kept.owner != owner:", fault="if kept is None:"),
    Mutant("store-counts-no-input", path=f"{_RESPONSES_ROOM}/store.py",
           tests=(_STORE, "-k", "least_recently or below_its_bound"),
           why="bytes that are given back are not those that were taken",
           text="self.num_bytes -= kept.num_bytes", fault="self.num_bytes -= len(kept.head)"),
    Mutant("thread-ignored", path=f"{_MESSAGES_ROOM}/translate.py",
           tests=("tests/cases", "-k", "thread_is_refused"),
           why="a client that sends the new message only gets an answer that knows nothing else",
           text="if extra.get(\"thread\"):", fault="if False:"),
    Mutant("deferred-tools-at-the-top", path="control_plane/frontend/http/client_requests.py",
           tests=(_MESSAGES, "-k", "shares_the_turn_before"),
           why="a tool that is loaded changes the prompt's top, and nothing behind it is shared",
           text="if not hidden:", fault="if True:"),
    Mutant("blocks-run-together", path="control_plane/frontend/http/answers/blocks.py",
           tests=(_MESSAGES, "-k", "any_cutting"),
           why="a block goes on where another kind of part begins, so texts run into each other",
           text="self.blocks[-1].kind is not part.kind", fault="False"),
]  # fmt: skip
