"""What chaos counts as lost, wrong and doubled, and which pause belongs to which loss."""

import asyncio
import random
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from data_plane.instance.sampler import sample_rows
from harness.services.judges import CountingJudge
from nanocp.cli.demo.judge import ReferenceJudge
from nanocp.cli.demo.judge_beside import JudgeBeside
from nanocp.cli.demo.load import Asked
from nanocp.cli.demo.losses import KINDS, Loss, Losses
from nanocp.cli.demo.report import claims_of, judged, pauses_by_kind, serving_share
from nanocp.values.sampling import SamplingParams, penalized_prompt_ids

SOUND = {
    "lost": 0, "wrong": 0, "doubled": 0, "unjudged": 0, "near_ties": 1, "tokens": 5000,
    "frames_left": 0, "tickets_left": 0, "segments_left": 0, "processes_left": 0, "exit_status": 0,
    "ended_early": False, "losses": 3,
}  # fmt: skip


def asked(*outputs, error=""):
    options = {"max_tokens": 4, "temperature": 0.0, "seed": 0}
    arrivals = [[float(index) for index in range(len(output))] for output in outputs]
    return Asked("greedy", "grpc", [9], options, len(outputs), list(outputs), arrivals, error)


def test_a_choice_is_judged_by_the_defaults_that_the_service_takes():
    request = replace(asked([1]), default_sampling={"repetition_penalty": 1.15, "temperature": 0.6})
    params = [
        request.params(0),
        replace(request, options=request.options | {"repetition_penalty": 1.0}).params(1),
    ]
    assert [one.repetition_penalty for one in params] == [1.15, 1.0]
    assert [(one.temperature, one.seed) for one in params] == [(0.0, 0), (0.0, 1)]


@pytest.mark.parametrize(("change", "holds"), [
    ({}, True),
    *(({name: 1}, False) for name in SOUND if name not in ("near_ties", "tokens", "losses")),
    ({"near_ties": 6}, False),
    ({"losses": 0}, False),
    ({"tokens": 0, "near_ties": 0}, False),
])  # fmt: skip
def test_claims_hold_only_if_nothing_is_wrong(change, holds):
    assert all(holds for _, holds in claims_of(SOUND | change)) == holds


@pytest.mark.parametrize(("request_", "counts"), [
    (asked([10, 11, 12, 13]), (0, 0, 0)),
    (asked([10, 11, 12, 13], [10, 11, 99, 13]), (0, 1, 0)),
    (asked([10, 11, 11, 12]), (0, 1, 1)),
    (asked([10, 11, 12, 13, 14]), (0, 0, 1)),
    (asked([10, 11], error="it broke"), (1, 0, 0)),
    (asked([], error="nothing came"), (1, 0, 0)),
])  # fmt: skip
def test_lost_wrong_and_doubled_are_counted(request_, counts):
    found = judged([request_], CountingJudge())
    assert (found["lost"], found["wrong"], found["doubled"]) == counts
    assert bool(found["failures"]) == any(counts)


def test_a_judge_beside_a_run_says_what_one_says_after_it():
    requests = [asked([10, 11, 12, 13]), asked([10, 11, 11, 12]), asked([10], error="it broke")]
    told = []
    with closing(JudgeBeside(CountingJudge, Path("no-checkpoint"))) as judge:
        for request in requests:
            judge.take(request)
        found = judge.found(requests, 300, lambda *counts: told.append(counts))
    assert found == judged(requests, CountingJudge())
    assert told[0] == (0, 3)
    with closing(JudgeBeside(CountingJudge, Path("no-checkpoint"))) as late:
        late.take(requests[0])
        assert late.found(requests, 0, lambda *counts: None)["unjudged"] == 3
    assert not all(holds for _, holds in claims_of(SOUND | {"unjudged": 3}))


def test_a_pause_belongs_to_the_loss_in_whose_time_it_was():
    request = asked([1] * 4)
    request.arrivals_s = [[0.0, 1.0, 9.0, 10.0], [0.5, 10.5]]
    losses = [Loss("a", 2.0, ("instance 0",)), Loss("b", 9.5, ("instance 1",))]
    request.arrivals_s[1] = [9.1, 9.9, 12.0]
    pauses = pauses_by_kind([request], losses)
    assert [pauses[kind]["pause_s_max"] for kind in "ab"] == [8.0, 2.1]
    assert pauses_by_kind([request], []) == {}
    # Silent from 1 to 9, but for a second on its edge, and from 12 to 20.
    assert serving_share([request], 0.0, 20.0) == pytest.approx(1 - (7 + 1 + 7) / 20, abs=1e-3)


def test_the_judge_knows_greedy_sampled_and_penalised_tokens(tiny_checkpoint, tiny_oracle):
    judge = ReferenceJudge(tiny_checkpoint)
    draw = random.Random(1)
    for options in (
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.7, "seed": 8, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    ):
        prompt, params = [draw.randrange(2, 512) for _ in range(20)], SamplingParams(**options)
        output = []
        for _ in range(12):
            logits = tiny_oracle.logits([*prompt, *output], [0])
            output += sample_rows(logits, [params], [output], [sorted(set(prompt))])
        assert judge.first_wrong(prompt, params, output) == (None, 0)
        output[5] = (output[5] + 1) % 512
        assert judge.first_wrong(prompt, params, output)[0] == 5
        other = SamplingParams(**options | {"seed": 99})
        output[5] = (output[5] - 1) % 512
        assert (judge.first_wrong(prompt, other, output)[0] is None) == (params.temperature == 0)


def test_one_wrong_one_lost_and_one_doubled_are_found_in_the_judges_process(
    tiny_checkpoint, tiny_oracle
):
    draw, requests = random.Random(2), []
    for number in range(8):
        options = {"max_tokens": 12, "temperature": 0.9, "seed": number}
        request = Asked("sampled", "http", [draw.randrange(2, 512) for _ in range(30)], options)
        request.default_sampling = {"repetition_penalty": 1.15}
        params, output = request.params(0), []
        for _ in range(12):
            logits = tiny_oracle.logits([*request.prompt_ids, *output], [0])
            prompt = penalized_prompt_ids(request.prompt_ids, params)
            output += sample_rows(logits, [params], [output], [prompt])
        request.outputs = [output]
        requests.append(request)
    wrong, lost, doubled = requests[1], requests[3], requests[6]
    wrong.outputs[0][11] = (wrong.outputs[0][11] + 1) % 512
    del lost.outputs[0][7:]
    lost.error = "[7] tokens came of 12"
    doubled.outputs[0].insert(5, doubled.outputs[0][4])
    del doubled.outputs[0][12:]
    with closing(JudgeBeside(ReferenceJudge, tiny_checkpoint)) as judge:
        for request in requests:
            judge.take(request)
        found = judge.found(requests, 300, lambda done, total: None)
    assert (found["lost"], found["wrong"], found["doubled"], found["unjudged"]) == (1, 2, 1, 0)
    assert [each.split(":")[1].strip()[:24] for each in found["failures"]] == [
        "choice 0 of 12 tokens",
        "[7] tokens came of 12",
        "choice 0 of 12 tokens",
    ]


def test_front_ends_and_the_controller_are_ended_by_name():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    names = ("controller", "front end 0", "front end 1", "instance 0")
    processes = {name: subprocess.Popen(command) for name in names}
    try:
        losses = Losses(lambda: {name: each.pid for name, each in processes.items()}, 3, (0, 1))
        for kind in ("front end killed", "controller and instance killed"):
            asyncio.run(losses._cause(kind))
        (front_end,), both = (loss.members for loss in losses.happened)
        assert front_end in names[1:3] and both == ("controller", "instance 0")
        assert [processes[name].wait(60) for name in (front_end, *both)] == [-9, -9, -9]
    finally:
        for each in processes.values():
            each.kill()
            each.wait()


def test_losses_are_drawn_by_a_seed_and_end_the_processes_they_name():
    kinds = []
    for _ in range(2):
        losses = Losses(dict, 3, (0, 1))
        kinds.append([losses._next_kind() for _ in range(3 * len(KINDS))])
    assert kinds[0] == kinds[1] and set(kinds[0][: len(KINDS)]) == set(KINDS)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    names = ("instance 0", "instance 1", "prefill")
    processes = {name: subprocess.Popen(command) for name in names}
    try:
        losses = Losses(lambda: {name: each.pid for name, each in processes.items()}, 3, (0, 1))
        asyncio.run(losses._cause("all instances killed"))
        asyncio.run(losses._cause("prefill stopped"))
        assert [processes[name].wait(60) for name in names[:2]] == [-9, -9]
        assert [loss.members for loss in losses.happened] == [names[:2], names[2:]]
        deadline = time.monotonic() + 60
        while "T (stopped)" not in Path(f"/proc/{processes['prefill'].pid}/status").read_text():
            assert time.monotonic() < deadline
    finally:
        for each in processes.values():
            each.kill()
            each.wait()
