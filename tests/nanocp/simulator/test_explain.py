"""`--explain`: stories say why, decide nothing, and are the same of a run and of its event log."""

import json
import tempfile
from dataclasses import replace
from functools import cache, partial
from itertools import groupby, islice, pairwise
from pathlib import Path

import pytest

from control_plane.scheduler.explanation import Explainer
from control_plane.scheduler.scheduler import Scheduler
from harness.programs.command_line import nanocp, on_one_line
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Recorder, Run
from nanocp.simulator.simulation import Simulation
from nanocp.values.plan import Arrival

NUM_REQUESTS = 250
H200 = load_cluster_file("h200x32-deepseek-v3")
CROWDED = replace(
    H200,
    cluster=ClusterConfig(
        num_instances=8,
        instances_per_node=4,
        num_frames=300,
        max_model_len=50_000,
        bounds=BoundsConfig(
            max_rows=12, max_links=3, max_attention_rows=24, max_partials=12, max_hand_offs=4
        ),
    ),
)


def play(policy, event_log=None, explainer=None):
    def requests():
        for index, request in enumerate(
            islice(Workload("issue-0", 600, 1).requests(20_000), NUM_REQUESTS)
        ):
            prompt_len = 10_000 if index % 8 == 7 else request.prompt_len
            yield WorkloadRequest(
                request.arrival_us,
                prompt_len,
                1 + request.output_len // 4,
                200 + request.output_len,
            )

    config = SchedulerConfig(
        policy=policy, growth_promise="tokens:8", cp_degree_buckets=((2000, 1),)
    )
    recorder = Recorder(Run(0, 60_000_000))
    Simulation(
        CROWDED, config, CostModel(CROWDED, "fitted", 1), recorder, event_log, explainer
    ).run(requests())


@cache
def explained(policy):
    """(stories of all requests, the event log of the run that explains them)."""
    explainer = Explainer(list(map(str, range(1, NUM_REQUESTS + 1))), first_long_from_us=0)
    with tempfile.TemporaryDirectory() as folder:
        play(policy, log := Path(folder) / "log", explainer)
        return explainer.stories.values(), log.read_bytes()


@pytest.mark.parametrize(
    "policy",
    ["dual_balanced", "cost_aware", pytest.param("least_batch", marks=pytest.mark.system), "chaos"],
)
def test_every_plan_is_the_same_with_an_explanation_and_without(policy, tmp_path):
    stories, log = explained(policy)
    play(policy, tmp_path / "plain")
    assert (tmp_path / "plain").read_bytes() == log
    assert len(stories) == NUM_REQUESTS
    num_ended = 0
    for story in stories:
        texts = [note.text for note in story.notes]
        assert texts[0].startswith("arrives")
        # The run ends before some of the requests do.
        num_ended += texts[-1].startswith("has ended")
        decision = next(note.decision for note in story.notes if note.decision)
        assert decision.explanation.sentences
        assert all(
            decision.pages_on[instance] >= pages
            for instance, pages in decision.proposal.shares.items()
        )
    assert num_ended > NUM_REQUESTS // 2


def test_a_policy_that_says_no_more_shows_the_paragraphs_of_its_docstring():
    explainer = Explainer(["1"])
    scheduler = Scheduler(CROWDED.cluster, SchedulerConfig(policy="least_batch"), explainer)
    explainer.around(scheduler.plan_window)([Arrival(1, 100, 8)], 0)
    (decision,) = (note.decision for note in explainer.stories[1].notes if note.decision)
    assert decision.explanation.sentences == (
        "Propose the least loaded instance, whether the request fits there now or not.",
        "It proposes several only if no instance could ever hold the request.",
    )


def test_what_cost_aware_chose_is_the_best_that_it_compared():
    decisions = [
        note.decision
        for story in explained("cost_aware")[0]
        for note in story.notes
        if note.decision
    ]
    assert max(len(decision.explanation.candidates) for decision in decisions) > 10
    # Where its cheapest split may not fit, dual_balanced's is taken, which compares none.
    compared = [decision for decision in decisions if decision.explanation.candidates]
    assert len(compared) > 0.9 * len(decisions)
    for decision in compared:
        candidates = decision.explanation.candidates
        rises = [sum(candidate.rise.values()) for candidate in candidates]
        assert candidates[0].proposal == decision.proposal and rises == sorted(rises)
        assert all(min(candidate.rise.values()) >= 0 for candidate in candidates)


def test_a_crowded_cluster_gives_every_kind_of_reason():
    texts = [
        note.text
        for policy in ("chaos", "dual_balanced")
        for story in explained(policy)[0]
        for note in story.notes
    ]
    for words in (
        "is re-bound from instance",
        "of its pages move from instance",
        "its KV binding grows by instance",
        "it parks (free frames:",
        "its row goes on",
        "its row runs from window",
        "parked rows go before it",
        "which cannot be placed; nobody behind it is tried",
        "of its pages and has",
        "reasons before this one are left out)",
        "is at max_rows (12)",
        "is at max_links (3)",
        "has ended after",
    ):
        assert any(words in text for text in texts), words


def test_reasons_to_wait_are_bounded_and_the_last_is_told():
    longest = 0
    for story in explained("chaos")[0]:
        waits = [note.text.startswith("waits") for note in story.notes]
        longest = max(
            [longest, *(len(list(group)) for is_waiting, group in groupby(waits) if is_waiting)]
        )
        for note, after in pairwise(story.notes):
            assert "are left out" not in note.text or not after.text.startswith("waits")
    assert longest == 16


SHORT = (
    "--seconds", "3", "--set", "warm_up=0.2", "--workload", "issue-5", "--rate", "12", "--policy",
    "cost_aware",
)  # fmt: skip


simulate = partial(nanocp, "simulate")


def test_a_run_and_its_event_log_tell_the_same_story(tmp_path):
    log = tmp_path / "log"
    result = simulate(
        *SHORT, "--explain", "7", "--explain", "long", "--json", "--event-log", str(log)
    )
    assert result.exit_code == 1 and "nothing was judged" in result.stderr, result.output
    explained = json.loads(result.stdout)["cost_aware"]["explained"]
    assert explained[0]["request_id"] == 7 and len(explained) == 2
    placed = next(note for note in explained[1]["notes"] if "candidates" in note)
    assert len(placed["shares"]) > 1 and len(placed["nodes"]) == 4
    assert set(placed["candidates"][0]["rise"]) == {"attention", "exchange", "dispatch"}

    numbers = [word for story in explained for word in ("--explain", str(story["request_id"]))]
    replayed = simulate("replay", str(log), *numbers, "--json")
    assert replayed.exit_code == 0 and json.loads(replayed.stdout)["explained"] == explained

    shown = simulate("replay", str(log), *numbers)
    assert shown.exit_code == 0
    for words in (
        "request 7",
        "is placed: MoE binding",
        "free frames",
        "chosen",
        "less than with the next",
        "dispatch",
    ):
        assert words in shown.stdout, words


@pytest.mark.parametrize(("asked", "answer"), [
    ("9999", "--explain 9999: no such request arrived; the last to arrive was number"),
    ("seven", "--explain seven: no such request arrived; the last to arrive was number"),
])  # fmt: skip
def test_what_cannot_be_explained_is_answered_in_a_sentence(asked, answer):
    result = simulate(*SHORT, "--explain", asked)
    assert result.exit_code == 2 and answer in on_one_line(result)
