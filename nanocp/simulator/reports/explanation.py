"""The story of a request for `--explain`, as text or as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from control_plane.scheduler.explanation import Decision, Story
from control_plane.scheduler.policies.policy import Candidate

_MAX_CANDIDATES = 12
_MAX_NODES = 16


def show_story(console: Console, story: Story, instances_per_node: int) -> None:
    """Print a request's events, its placement and the scores that the policy compared."""
    client_id = f", the client's id {story.arrival.client_id}" if story.arrival.client_id else ""
    title = f"\nrequest {story.arrival.request_id}{client_id}"
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    for now_us, text, decision in story.notes:
        console.print(f"{now_us / 1e6:12.6f} s  {text}", highlight=False, soft_wrap=True)
        if decision is not None:
            for sentence in decision.explanation.sentences:
                console.print(f"{'':16}{sentence}", highlight=False, soft_wrap=True)
            _show_nodes(console, decision, instances_per_node)
            _show_candidates(console, decision, instances_per_node)


def story_values(story: Story) -> dict[str, Any]:
    """Turn a request's story into JSON values: all of it, rises in the policy's own units."""
    notes: list[dict[str, Any]] = []
    for now_us, text, decision in story.notes:
        notes.append({"now_us": now_us, "text": text})
        if decision is not None:
            candidates = decision.explanation.candidates
            notes[-1] |= {
                "sentences": decision.explanation.sentences,
                "nodes": [node._asdict() for node in decision.nodes],
                "moe_binding": decision.proposal.moe_binding,
                "shares": decision.proposal.shares,
                "pages_on": decision.pages_on,
                "candidates": [
                    {**proposal._asdict(), "rise": rise} for proposal, rise in candidates
                ],
            }
    arrival = story.arrival
    return {"request_id": arrival.request_id, "client_id": arrival.client_id, "notes": notes}


def _show_nodes(console: Console, decision: Decision, instances_per_node: int) -> None:
    own = {
        instance // instances_per_node
        for instance in (decision.proposal.moe_binding, *decision.pages_on)
    }
    order = sorted(
        range(len(decision.nodes)),
        key=lambda node: (node not in own, decision.nodes[node].num_rows, node),
    )
    table = _table(
        "node", "rows", "KV tokens", "free frames", "its pages, those for coming tokens too"
    )
    for node in order[:_MAX_NODES]:
        pages = {
            i: count for i, count in decision.pages_on.items() if i // instances_per_node == node
        }
        table.add_row(str(node), *(f"{value:,}" for value in decision.nodes[node]), _split(pages))
    console.print(table)
    if len(order) > _MAX_NODES:
        console.print(f"{'':16}and {len(order) - _MAX_NODES} nodes with more rows")


def _show_candidates(console: Console, decision: Decision, instances_per_node: int) -> None:
    candidates = decision.explanation.candidates
    if not candidates:
        return
    best = max(_sum(candidates[0]), 1)
    parts = tuple(candidates[0].rise)
    table = _table("", "MoE binding", "degree", "nodes", "rise", *parts, "pages (instance: pages)")
    for rank, candidate in enumerate(candidates[:_MAX_CANDIDATES], start=1):
        proposal, rise = candidate
        nodes = {i // instances_per_node for i in (proposal.moe_binding, *proposal.shares)}
        shown = [f"{100 * value / best:,.1f}" for value in (_sum(candidate), *rise.values())]
        cells = [
            str(proposal.moe_binding),
            str(len(proposal.shares)),
            str(len(nodes)),
            *shown,
            _split(proposal.shares),
        ]
        table.add_row("chosen" if rank == 1 else str(rank), *cells)
    console.print(table)
    margin = (
        f", {100 * _sum(candidates[1]) / best - 100:.2f}% less than with the next"
        if len(candidates) > 1
        else ""
    )
    text = (
        f"{len(candidates)} compared; the cost rises least with the first{margin} (its rise is 100)"
    )
    console.print(f"{'':16}{text}", highlight=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 1))
    for column in columns:
        table.add_column(column, justify="left" if "pages" in column else "right", overflow="fold")
    return table


def _split(pages: Mapping[int, int]) -> str:
    return "  ".join(f"{instance}: {count:,}" for instance, count in pages.items())


def _sum(candidate: Candidate) -> int:
    return sum(candidate.rise.values())
