"""Mutants of costs, TTFT targets, searches for a rate, and streams that instances share."""

from mutant import Mutant

OF_SCHEDULING = [
    Mutant(
        name="late-not-first",
        why="of late placements the cheapest is taken, and not the least late",
        path="control_plane/scheduler/policies/cost_aware.py",
        text="return min(early, key=itemgetter(0, 1))[2]",
        fault="return min(early, key=itemgetter(1, 0))[2]",
        tests=("tests/control_plane/scheduler/policies/test_on_time.py",),
    ),
    Mutant(
        name="under-way",
        why="KV of a request that has ended counts as under way for ever",
        path="control_plane/scheduler/tickets.py",
        text="self._forget(request.ticket)\nself._count(request, -1)",
        fault="self._forget(request.ticket)",
        tests=("tests/control_plane/scheduler/policies/test_on_time.py",),
    ),
    Mutant(
        name="far-links",
        why="an instance with links to other nodes is taken for lighter than it is",
        path="control_plane/scheduler/policies/cost_aware.py",
        text="tokens += costs.exchange_tokens_between_nodes + num_far * dearer",
        fault="pass",
        tests=("tests/control_plane/scheduler/policies/test_cost_aware.py", "-k", "charges"),
    ),
    Mutant(
        name="gateway-without-room",
        why="links count in what a gateway carries and not in what it may carry: it takes nothing",
        path="control_plane/scheduler/policies/relevel_nodes.py",
        text="room = sum(map(load_of, here)) // len(here) - load_of(gateway)",
        fault="room = most - load_of(gateway)",
        tests=("tests/control_plane/scheduler/policies/test_relevel_nodes.py", "-k", "its_room"),
    ),
    Mutant(
        name="never-home",
        why="pages that went to another node stay there, with their links, as long as the row runs",
        path="control_plane/scheduler/policies/relevel_nodes.py",
        text="_home(state, tokens, load_of) or _away(",
        fault="_away(",
        tests=("tests/control_plane/scheduler/policies/test_relevel_nodes.py", "-k", "go_home"),
    ),
    Mutant(
        name="early-end",
        why="a run ends, as if it could not pass, with misses that its SLO allows",
        path="nanocp/simulator/sweep.py",
        text="math.ceil(_MOST_JUDGED * (1 - ATTAINMENT) * num_expected)",
        fault="-1",
        tests=("tests/nanocp/simulator/test_sweep.py", "-k", "cannot_pass"),
    ),
    Mutant(
        name="idle-deferral",
        why="a deferred request waits for shorter steps while no window runs",
        path="control_plane/scheduler/deferral.py",
        text="if not goes_on:",
        fault="if False:",
        tests=("tests/control_plane/scheduler/test_deferral.py", "-k", "time_without_a_window"),
    ),
    Mutant(
        name="node-secret",
        why="a node's process may bring instances without their secret",
        path="control_plane/member_streams.py",
        text="if not self._secrets.admit({NAME: item.opened.name, SECRET: item.opened.secret}):",
        fault="if False:",
        tests=("tests/control_plane/test_node_streams.py", "-k", "without_the_secret"),
    ),
    Mutant(
        name="node-silent",
        why="a node's process that is stopped is never noticed",
        path="control_plane/member_streams.py",
        text="self._num_silent_ticks += 1",
        fault="pass",
        tests=("tests/control_plane/test_node_streams.py", "-k", "is_silent"),
    ),
]
