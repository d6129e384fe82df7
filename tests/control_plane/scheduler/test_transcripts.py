"""Golden stories: tests/transcripts/*.txt, commands and their literal output.

A block is a command (or several: events gather until `plan`), a line `----`, the output, and an
empty line. REWRITE=1 pytest tests/control_plane/scheduler/test_transcripts.py writes the present
output; commit it only if you understand it.
"""

import os

import pytest

from control_plane.scheduler.explanation import Explainer
from control_plane.scheduler.explanation import Story as Explained
from control_plane.scheduler.invariants import check
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.windows.routing import build_routes
from harness.paths import TESTS
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.cost import CostConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    ClusterLost,
    Event,
    Finished,
    FinishReason,
    InstanceLost,
    InstancePlan,
    Plan,
    Regrouped,
    Resubmitted,
    Transfer,
    TransferDone,
    TransferFailed,
    TransferFenced,
    WindowDone,
)
from nanocp.values.table_changes import RouteChange

# Chosen so that long prompts of a story are split.
CHEAP_LINKS = CostConfig(512, 512, 64, 128, 64)
TRANSCRIPTS = sorted((TESTS / "transcripts").glob("*.txt"))


def runs(values: list[int]) -> str:
    """Ascending runs: 0-3,7."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


class Story:
    """A scheduler, and events that gather until the next `plan`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now_us = 0
        self.num_windows = 0
        self.transfers: dict[int, Transfer] = {}
        self.windows_done: list[int] = []
        self.num_served = 0

    def run(self, line: str) -> list[str]:
        """The output of one command."""
        name, *words = line.split()
        pairs = dict(word.split("=") for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        return getattr(self, f"cmd_{name}")(names, pairs) or []

    def cmd_cluster(self, _: list[str], pairs: dict[str, str]) -> list[str]:
        take = lambda key, default: int(pairs.pop(key, default))  # noqa: E731
        num = take("instances", 4)
        bounds = BoundsConfig(
            max_rows=take("max_rows", 8),
            max_links=take("max_links", 4),
            max_partials=take("max_partials", 8),
        )
        cluster = ClusterConfig(
            num_instances=num,
            instances_per_node=take("per_node", num),
            num_frames=take("frames", 64),
            max_model_len=take("max_model_len", 16384),
            bounds=bounds,
        )
        scheduler = SchedulerConfig(
            policy=pairs.pop("policy", "dual_balanced"),
            steps_per_window=take("k", 1),
            growth_promise=pairs.pop("promise", "max_tokens"),
            max_overtake_us=take("max_overtake_us", 2_000_000),
            max_queued_requests=take("max_queued_requests", 1024),
            max_queued_tokens=take("max_queued_tokens", 4_000_000),
            costs=CHEAP_LINKS,
        )
        asked = pairs.pop("explain", None)
        self.explainer = Explainer(asked.split(",")) if asked else None
        assert not pairs, f"unknown: {pairs}"
        self.num_instances = num
        self.scheduler = Scheduler(cluster, scheduler, self.explainer)
        self.plan_window = self.scheduler.plan_window
        if self.explainer:
            self.plan_window = self.explainer.around(self.plan_window)
        self.windows_done = [0] * num
        return []

    # --- events

    def cmd_arrive(self, names: list[str], pairs: dict[str, str]) -> None:
        """Submit a request.

        arrive REQUEST prompt=TOKENS max=TOKENS [prefilled] [resumes] [priority=CLASS] [deadline=US]
        [attempt=N] [tenant=NAME]
        """
        deadline = pairs.get("deadline")
        arrival = Arrival(
            int(names[0]),
            int(pairs["prompt"]),
            int(pairs["max"]),
            needs_prefill="prefilled" not in names,
            priority=int(pairs.get("priority", 0)),
            deadline_us=None if deadline is None else int(deadline),
            resumes="resumes" in names,
            attempt=int(pairs.get("attempt", 0)),
            tenant=pairs.get("tenant", ""),
        )
        self.events.append(arrival)

    def cmd_transferred(self, names: list[str], pairs: dict[str, str]) -> None:
        """Confirm requests' pages at all receivers or one: transferred REQUEST... [at=INSTANCE]."""
        self.events += [TransferDone(ticket, at) for ticket, at in self._receivers(names, pairs)]

    def cmd_fenced(self, names: list[str], pairs: dict[str, str]) -> None:
        """Answer a request's fence, at all receivers or one: fenced REQUEST [at=INSTANCE]."""
        self.events += [TransferFenced(ticket, at) for ticket, at in self._receivers(names, pairs)]

    def cmd_failed(self, names: list[str], _: dict[str, str]) -> None:
        self.events.append(
            TransferFailed(self.transfers[int(names[0])].ticket, "prefill ran out of memory")
        )

    def cmd_abort(self, names: list[str], _: dict[str, str]) -> None:
        self.events += [AbortRequested(int(name)) for name in names]

    def cmd_lost(self, names: list[str], _: dict[str, str]) -> None:
        self.events.append(InstanceLost(int(names[0])))

    def cmd_regrouped(self, names: list[str], _: dict[str, str]) -> None:
        """regrouped TERM: the windows in flight are over."""
        self.events.append(Regrouped(int(names[0])))
        self.windows_done = [self.scheduler._rows.next_window] * self.num_instances

    def cmd_resubmitted(self, _: list[str], __: dict[str, str]) -> None:
        self.events.append(Resubmitted())

    def cmd_gone(self, _: list[str], __: dict[str, str]) -> None:
        self.events.append(ClusterLost("no instance could be started"))

    def cmd_done(self, names: list[str], pairs: dict[str, str]) -> None:
        """Let instances, by default all, report the oldest window that they have not reported.

        done [INSTANCE...] [stopped=REQUEST,...]
        """
        stopped = [int(word) for word in pairs.get("stopped", "").split(",") if word]
        for instance in map(int, names or range(self.num_instances)):
            finished = tuple(
                Finished(request_id, 1, FinishReason.STOP)
                for request_id in stopped
                if self.scheduler.requests.placement(request_id).moe_binding == instance
            )
            self.events.append(WindowDone(instance, self.windows_done[instance], finished))
            self.windows_done[instance] += 1

    def cmd_served(self, names: list[str], pairs: dict[str, str]) -> None:
        """Let N requests, 1001 and so on, come and end one after the other, after T tokens each."""
        tokens = int(pairs["tokens"])
        for _ in range(int(names[0])):
            self.num_served += 1
            request_id = 1000 + self.num_served
            self.events.append(Arrival(request_id, 1, tokens, needs_prefill=False))
            self.cmd_plan([], {})
            stopped = (Finished(request_id, tokens, FinishReason.STOP),)
            self.events.append(WindowDone(0, self.windows_done[0], stopped))
            self.windows_done[0] += 1
            self.cmd_plan([], {})

    def _receivers(self, names: list[str], pairs: dict[str, str]) -> list[tuple[int, int]]:
        pairs_out = []
        for name in names:
            transfer = self.transfers[int(name)]
            instances = transfer.receivers
            at = [int(pairs["at"])] if "at" in pairs else instances
            pairs_out += [(transfer.ticket, instance) for instance in at]
        return pairs_out

    # --- answers

    def cmd_plan(self, _: list[str], pairs: dict[str, str]) -> list[str]:
        self.now_us = int(pairs.get("t", self.now_us))
        plan = self.plan_window(self.events, self.now_us)
        check(self.scheduler)
        self.events = []
        self.transfers.update({transfer.request_id: transfer for transfer in plan.transfers})
        return show_plan(plan)

    def cmd_steps(self, names: list[str], pairs: dict[str, str]) -> list[str]:
        """steps N: N times `done`, `plan`; shows the plans that say more than 'window w'."""
        lines: list[str] = []
        for _ in range(int(names[0])):
            self.cmd_done([], {})
            shown = self.cmd_plan([], {})
            lines += shown if len(shown) > 1 else []
        return lines or ["nothing but windows"]

    def cmd_loads(self, *_: object) -> list[str]:
        requests = self.scheduler.requests
        lines = [f"waiting {requests.num_waiting}, running {requests.num_running}"]
        for instance, load in enumerate(requests.loads()):
            frames = (
                f"{load.frames_committed} committed {load.frames_free} free "
                f"{load.frames_quarantined} quarantined"
            )
            lines.append(
                f"instance {instance}: {load.num_rows} rows, {load.kv_tokens} KV tokens, frames "
                f"{frames}"
            )
        return lines

    def cmd_explain(self, names: list[str], _: dict[str, str]) -> list[str]:
        """Show what the scheduler saw and compared: explain REQUEST...

        `cluster explain=` must have named the requests.
        """
        return [line for name in names for line in show_story(self.explainer.stories[int(name)])]

    def cmd_routes(self, names: list[str], _: dict[str, str]) -> list[str]:
        """Show bindings and both tables, each the transpose of the other (figure 9, b to d)."""
        bindings = []
        for request_id in map(int, names):
            placement = self.scheduler.requests.placement(request_id)
            bindings.append((
                request_id, placement.moe_binding,
                [instance for instance, _ in placement.kv_split()],
            ))  # fmt: skip
        q_route, res_route = build_routes(bindings, self.num_instances)
        lines = []
        for i in range(self.num_instances):
            mine = ",".join(str(r) for r, moe, _ in bindings if moe == i) or "-"
            shards = ",".join(str(r) for r, _, kv in bindings if i in kv) or "-"
            sends = (
                " ".join(
                    f"{j}:{','.join(map(str, ids))}" for j, ids in enumerate(q_route[i]) if ids
                )
                or "-"
            )
            returns = (
                " ".join(
                    f"{j}:{','.join(map(str, ids))}" for j, ids in enumerate(res_route[i]) if ids
                )
                or "-"
            )
            lines.append(
                f"instance {i}: rows {mine}; shards of {shards}; Q-route {sends}; Res-route "
                f"{returns}"
            )
        return lines


def show_plan(plan: Plan) -> list[str]:
    """A plan as lines: only what is not empty."""
    lines = ["no window" if plan.window is None else f"window {plan.window}"]
    for placement in plan.placements:
        split = " ".join(f"{instance}:{pages}" for instance, pages in placement.kv_split())
        lines.append(
            f"place {placement.request_id}: MoE binding {placement.moe_binding}, pages {split}"
        )
    for transfer in plan.transfers:
        by_instance: dict[int, list] = {}
        for target in transfer.targets:
            by_instance.setdefault(target.instance, []).append(target)
        targets = "; ".join(
            f"{instance}: pages "
            f"{runs([page for t in ts for page in span(t.first_page, t.num_pages)])} in frames "
            f"{runs([frame for t in ts for frame in span(t.frame, t.num_pages)])}"
            for instance, ts in sorted(by_instance.items())
        )
        lines.append(
            f"transfer {transfer.ticket}: {transfer.num_tokens} tokens of request "
            f"{transfer.request_id} to {targets}"
        )
    lines += [f"fence {fence.ticket} at {runs(list(fence.instances))}" for fence in plan.fences]
    lines += [
        f"ended {e.request_id} {e.reason.value}{': ' if e.message else ''}{e.message}"
        for e in plan.ended
    ]
    lines += [
        f"preempted {request_id} after {num_tokens} tokens"
        for request_id, num_tokens in plan.preempted
    ]
    for instance_plan in plan.instances:
        if shown := show_instance(instance_plan):
            lines.append(f"instance {instance_plan.instance}: {shown}")
    return lines


def show_instance(plan: InstancePlan) -> str:
    """One instance's share of a window."""
    changes = plan.changes
    parts = [f"ends {runs(list(plan.ends))}"] if plan.ends else []
    parts += [f"forget {runs(sorted(changes.forgotten))}"] if changes.forgotten else []
    parts += [f"row {change.row}={change.request_id or 'none'}" for change in changes.rows]
    parts += [f"Q to {show_route(change)}" for change in changes.q_route]
    parts += [f"Res to {show_route(change)}" for change in changes.res_route]
    pages: dict[int, list] = {}
    for change in changes.pages:
        pages.setdefault(change.request_id, []).append(change)
    parts += [
        f"{request_id} pages "
        f"{runs([page for c in cs for page in span(c.first_page, c.num_pages)])} in frames "
        f"{runs([frame for c in cs for frame in span(c.frame, c.num_pages)])}"
        for request_id, cs in pages.items()
    ]
    parts += [f"forget holders of {request_id}" for request_id in changes.holders_forgotten]
    parts += [
        f"{request_id} appends to {holder} from page {page}"
        for request_id, page, holder in changes.holders
    ]
    parts += [f"start {start.request_id} at position {start.position}" for start in plan.starts]
    parts += [f"hand {request_id} to {peer}" for request_id, peer in plan.hand_offs_out]
    parts += [f"take {request_id} from {peer}" for request_id, peer in plan.hand_offs_in]
    return "; ".join(parts)


def show_story(story: Explained) -> list[str]:
    """What happened to a request, and what was compared when it was placed."""
    lines = []
    for now_us, text, decision in story.notes:
        lines.append(f"{now_us} us: {text}")
        if decision is None:
            continue
        for node, (num_rows, kv_tokens, frames_free) in enumerate(decision.nodes):
            lines.append(
                f"  node {node}: {num_rows} rows, {kv_tokens} KV tokens, {frames_free} free frames"
            )
        lines += [f"  {sentence}" for sentence in decision.explanation.sentences]
        for proposal, rise in decision.explanation.candidates:
            split = " ".join(f"{instance}:{pages}" for instance, pages in proposal.shares.items())
            parts = ", ".join(f"{part} {value}" for part, value in rise.items())
            lines.append(f"  MoE binding {proposal.moe_binding}, pages {split}: rises by {parts}")
        split = " ".join(f"{instance}:{pages}" for instance, pages in decision.pages_on.items())
        lines.append(f"  with those for coming tokens: {split}")
    return lines


def span(first: int, count: int) -> range:
    """first, first + 1, ..."""
    return range(first, first + count)


def show_route(change: RouteChange) -> str:
    """peer slot s=request."""
    return f"{change.peer} slot {change.slot}={change.request_id or 'none'}"


def play(text: str) -> str:
    """The transcript with the output that the commands give now."""
    story, lines, outputs, in_output = Story(), [], [], False
    for line in text.splitlines():
        if in_output:
            in_output = line != ""
            if in_output:
                continue
        if line == "----":
            lines += ["----", *outputs]
            outputs, in_output = [], True
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            outputs += story.run(line)
    assert not outputs, "a command without ---- behind it has output"
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_story_goes_as_told(path):
    told = path.read_text()
    played = play(told)
    if os.environ.get("REWRITE"):
        path.write_text(played)
    assert played == told


def test_there_are_stories():
    assert len(TRANSCRIPTS) >= 8
