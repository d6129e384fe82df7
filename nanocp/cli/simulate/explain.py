"""`--explain`: reads wanted requests, notes their decisions, and shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from control_plane.scheduler.explanation import Explainer

Explain = Annotated[
    list[str],
    typer.Option(
        metavar="REQUEST",
        help="Say why a request went where it went: its number in order of arrival, from 1, the "
        "client's id, or `long`, the first with a CP degree above 1 after the warm-up. May be "
        "given again.",
    ),
]


def explainer(explain: list[str], long_from_us: int) -> Explainer:
    """Takes notes of wanted requests."""
    from control_plane.scheduler.explanation import Explainer

    return Explainer(
        [word for word in explain if word != "long"],
        long_from_us if "long" in explain else None,
    )


def explained(explainer: Explainer) -> list[dict[str, Any]]:
    """Stories as JSON values, by arrival."""
    from nanocp.simulator.reports.explanation import story_values

    return [story_values(story) for story in explainer.stories.values()]


def show_stories(
    console: Console, title: str, explainer: Explainer, instances_per_node: int
) -> None:
    """Print the stories, under a title if any."""
    from nanocp.simulator.reports.explanation import show_story

    if explainer.stories and title:
        console.print(f"\n{title}", style="bold")
    for story in explainer.stories.values():
        show_story(console, story, instances_per_node)


def check_explained(explain: list[str], explainer: Explainer) -> None:
    """Raises ValueError for a wanted request that did not arrive. Call it last."""
    for word in explain:
        if word == "long" and explainer.first_long_from_us is not None:
            raise ValueError(
                "--explain long: no request with a CP degree above 1 arrived after the warm-up"
            )
        if word != "long" and not any(
            word in story.arrival.names for story in explainer.stories.values()
        ):
            last = explainer.last_request_id
            raise ValueError(
                f"--explain {word}: no such request arrived; the last to arrive was number {last}"
            )
