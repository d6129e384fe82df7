"""Panels of single numbers, and of pages outside the frames."""

from __future__ import annotations

from panels import Panel, panel, rate


def now_panels() -> list[Panel]:
    """What one wants to know first, as numbers."""
    return [
        panel(
            "Requests now",
            "short",
            ("sum(nanocp:num_requests_running)", "running"),
            ("sum(nanocp:num_requests_waiting)", "waiting"),
            kind="stat",
            about="Requests that decode, and those that do not yet.",
        ),
        panel(
            "Tokens a second now",
            "short",
            (rate("generation_tokens_total"), "generated"),
            kind="stat",
            about="Generated tokens of all instances together.",
        ),
        panel(
            "Version",
            "short",
            ("sum by (version) (nanocp:build_info)", "{{version}}"),
            kind="stat",
            about="The version of the program that answers. Two of them: an upgrade is under way.",
        ),
    ]


def offload_panels() -> list[Panel]:
    """Pages outside the frames: how many there are, come and go, and what that saves."""
    only = "Only with kv_offload."
    return [
        panel(
            "Pages outside the frames",
            "short",
            ("sum by (tier) (nanocp:kv_offload_pages)", "{{tier}}"),
            about=f"Pages in the host's memory and in files. {only}",
        ),
        panel(
            "Pages stowed and fetched a second",
            "short",
            (rate("kv_offload_stowed_pages_total", " by (tier)"), "to {{tier}}"),
            (rate("kv_offload_fetched_pages_total", " by (tier)"), "from {{tier}}"),
            about=f"Pages that leave the frames and come back. {only}",
        ),
        panel(
            "Prompt tokens from outside the frames",
            "percentunit",
            (
                f"{rate('kv_offload_hits_total')} / {rate('prefix_cache_queries_total')}",
                "of the looked-up tokens",
            ),
            about=f"Prompt tokens that need no prefill because their pages came back. {only}",
        ),
    ]
