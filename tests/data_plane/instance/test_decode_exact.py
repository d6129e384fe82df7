"""The test that proves the system: every token is the reference model's at any CP degree.

Degrees are mixed and change, under the chaos policy, in windows of one step and of four, in both
wire forms. Instances, scheduler and exchange are real; the oracle is one `transformers` forward
over prompt and output.
"""

from dataclasses import replace

import pytest
import torch

from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import PRESETS, make_checkpoint
from data_plane.reference.oracle import Oracle
from data_plane.transport.exchange import Channel, row_bytes
from data_plane.transport.regions import region_layout
from harness.exact.decode_cluster import DecodeCluster, Prompt
from harness.exact.exact_runs import CLUSTER, assert_exact, make_prompts, random_table
from harness.kernels.native_cases import native
from harness.settings import configured
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.values.sampling import SamplingParams

in_system = pytest.mark.system
# Lengths around page edges, degree buckets and one token; 6,000 once.
LENGTHS = (
    1, 2, 3, 17, 63, 64, 65, 66, 100, 127, 128, 129,
    191, 200, 256, 257, 320, 511, 700, 1023, 1500, 2048, 3001, 6000,
)  # fmt: skip


@pytest.mark.parametrize(("degree", "cpu_kernels", "more"), [
    (1, "torch", {}),
    pytest.param(2, "torch", {}, marks=in_system),
    (4, "torch", {}),
    pytest.param(2, "auto", {"dispatch_backend": "exchange"}, marks=in_system),
    (2, "auto", {"dispatch_backend": "fused", "threads_per_instance": 2}),
    (2, "avx2", {"moe_schedule": "arrival"}),
])  # fmt: skip
def test_forced_degree(tiny_checkpoint, tiny_oracle, degree, cpu_kernels, more):
    if cpu_kernels == "avx2":
        native((torch.float32, "avx2"))
    lengths = [length for length in (1, 300, 500, 700) if length >= 64 * degree + 1 or degree == 1]
    config = configured(
        cluster=CLUSTER, policy=f"fixed_degree:{degree}", cpu_kernels=cpu_kernels, **more
    )
    with DecodeCluster(config, tiny_checkpoint) as cluster:
        prompts = cluster.run(make_prompts(lengths))
    assert all(prompt.placements[0].cp_degree == degree for prompt in prompts)
    assert_exact(tiny_oracle, prompts)


@pytest.mark.parametrize(("num_instances", "cpu_kernels"), [
    (4, "torch"),
    (3, "auto"),
    pytest.param(3, "torch", marks=in_system),
    pytest.param(4, "auto", marks=in_system),
])  # fmt: skip
def test_experts_anywhere(tiny_checkpoint, tiny_oracle, num_instances, cpu_kernels):
    """Sixteen experts on four instances by a table that was drawn; on three they do not divide."""
    experts = random_table(16, num_instances, seed=1) if num_instances == 4 else None
    config = configured(
        cluster=replace(CLUSTER, num_instances=num_instances),
        policy="fixed_degree:2",
        cpu_kernels=cpu_kernels,
    )
    with DecodeCluster(config, tiny_checkpoint, experts=experts) as cluster:
        prompts = cluster.run(make_prompts([230, 300, 500]))
    assert_exact(tiny_oracle, prompts)


def test_reports_count_what_the_steps_did(tiny_checkpoint):
    """Two rows, three steps a window; the second row stops in the middle of a window.

    It goes on exchanging until the window ends (protocol.md, frozen window).
    """
    config = configured(cluster=CLUSTER, policy="fixed_degree:2", steps_per_window=3)
    with DecodeCluster(config, tiny_checkpoint) as cluster:
        prompts = cluster.run(make_prompts((200, 300)))
        reports = cluster.reports
    model = ModelConfig.from_folder(tiny_checkpoint)
    row = row_bytes(region_layout(CLUSTER, config.data_plane, model))
    assert sum(report.num_tokens for report in reports) == sum(
        len(prompt.output) for prompt in prompts
    )
    num_links = sum(report.num_received for report in reports)
    assert num_links > 0
    linked_bytes = 3 * num_links * model.num_layers * (row[Channel.Q] + row[Channel.RES])
    assert sum(report.route_bytes for report in reports) == linked_bytes
    hidden_bytes = row[Channel.COMBINE]
    assert all(report.expert_bytes >= hidden_bytes for report in reports if report.num_tokens > 0)
    for report in reports:
        assert (
            report.bucket_rows >= report.num_rows and report.bucket_received >= report.num_received
        )
        assert report.step_us > report.exchange_us >= 0
    assert {report.bucket_rows for report in reports} <= {0, 1, 2, 4}


@pytest.mark.parametrize(
    "lengths", [LENGTHS[::2], pytest.param(LENGTHS, marks=in_system)], ids=["half", "all"]
)
def test_degrees_mixed_in_a_batch_arriving_and_ending_mid_run(
    tiny_checkpoint, tiny_oracle, lengths
):
    config = Config(cluster=CLUSTER, scheduler=SchedulerConfig(policy="dual_balanced"))
    with DecodeCluster(config, tiny_checkpoint) as cluster:
        prompts = cluster.run(make_prompts(lengths, arrival_gap=3))
    assert {prompt.placements[0].cp_degree for prompt in prompts} == {1, 2, 4}
    assert_exact(tiny_oracle, prompts)


@pytest.mark.parametrize("policy", [pytest.param("fixed_degree:2", marks=in_system), "chaos"])
def test_pages_that_requests_share(tiny_checkpoint, tiny_oracle, policy):
    """Whole prompts and beginnings, while their writer runs and after all requests have ended."""
    config = configured(cluster=CLUSTER, policy=policy, growth_promise="tokens:0")
    (first,) = make_prompts([420])
    others = [[*first.ids[:200], 7, 8, 9], first.ids, first.ids[:257], [*first.ids, *range(2, 90)]]
    with DecodeCluster(config, tiny_checkpoint) as cluster:
        prompts = cluster.run([first, *(Prompt(ids, first.params, 20) for ids in others[:2])])
        prompts += cluster.run([Prompt(ids, first.params) for ids in others[2:]])
        assert cluster.scheduler.prefix_sharing.num_hit_tokens >= 64 * (3 + 6)
    assert_exact(tiny_oracle, prompts)


@pytest.mark.parametrize(
    ("num_steps", "wire_form"), [(1, "latent"), (4, "latent"), (1, "absorbed")]
)
def test_chaos(tiny_checkpoint, tiny_oracle, num_steps, wire_form):
    """Re-bindings, extensions and page moves every few windows, on the real data plane."""
    config = Config(
        cluster=CLUSTER,
        scheduler=SchedulerConfig(
            policy="chaos",
            steps_per_window=num_steps,
            chaos_seed=num_steps,
            chaos_period_windows=2 if num_steps == 1 else 1,
            growth_promise="tokens:0",
        ),
        data_plane=DataPlaneConfig(
            wire_form=wire_form,
            dispatch_backend="fused" if num_steps == 1 else "exchange",
        ),
    )
    with DecodeCluster(config, tiny_checkpoint) as cluster:
        prompts = cluster.run(
            make_prompts((1, 40, 64, 130, 300, 500), arrival_gap=3, num_tokens=40)
        )
        rebound = sum(
            len({placement.moe_binding for placement in prompt.placements}) > 1
            for prompt in prompts
        )
        extended = sum(
            prompt.placements[-1].cp_degree > prompt.placements[0].cp_degree
            for prompt in prompts
            if prompt.placements
        )
    assert rebound >= 2 and extended >= 1 and cluster.num_moves >= 3, (
        "the story must contain what it is about"
    )
    assert_exact(tiny_oracle, prompts)


def test_full_tables_mend_lost_changes(tiny_checkpoint, tiny_oracle):
    """Every fifth plan comes corrupted, while rows change their bindings and pages move."""
    config = Config(
        cluster=CLUSTER, scheduler=SchedulerConfig(policy="chaos", chaos_period_windows=1)
    )
    with DecodeCluster(config, tiny_checkpoint, lost_share=1 / 5) as cluster:
        prompts = cluster.run(make_prompts((1, 64, 200, 390)))
    assert cluster.num_resyncs >= 10, "the story must contain what it is about"
    assert_exact(tiny_oracle, prompts)


def test_sampling_is_the_same_at_any_degree_batch_and_binding(tiny_checkpoint):
    """With every control on: alone, in 8 rows, and re-bound.

    A token is a function of (logits, parameters, seed, ids).
    """
    sampled = SamplingParams(
        max_tokens=12, temperature=1.1, top_k=400, top_p=0.98, min_p=0.01, seed=7
    )
    params = replace(
        sampled, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3,
        logit_bias=((7, 2.0), (11, -3.0)), bad_words=((5,), (6, 8)),
    )  # fmt: skip
    outputs = []
    for policy in ("fixed_degree:1", "fixed_degree:2", "fixed_degree:4", "chaos"):
        config = Config(
            cluster=CLUSTER, scheduler=SchedulerConfig(policy=policy, chaos_period_windows=1)
        )
        with DecodeCluster(config, tiny_checkpoint) as cluster:
            for companions in (0, 7):
                # chaos draws by window, and which windows a row lives in is a matter of time.
                for _ in range(1 if policy != "chaos" else 20):
                    asked = Prompt(ids=list(range(2, 302)), params=params)
                    others = [
                        Prompt(asked.ids[number:], replace(params, seed=number))
                        for number in range(companions)
                    ]
                    cluster.run([*others, asked])
                    outputs.append(asked.output)
                    if is_rebound := len({each.moe_binding for each in asked.placements}) > 1:
                        break
                degrees = {f"fixed_degree:{each.cp_degree}" for each in asked.placements}
                assert is_rebound if policy == "chaos" else degrees == {policy}
            if policy == "fixed_degree:1":
                (uncontrolled,) = cluster.run([Prompt(asked.ids, sampled)])
    assert all(output == outputs[0] for output in outputs)
    assert outputs[0] != uncontrolled.output and len(set(outputs[0])) > 5


@pytest.mark.parametrize("num_steps", [pytest.param(1, marks=in_system), 4])
def test_preempted_requests_sample_the_tokens_of_an_undisturbed_run(tiny_checkpoint, num_steps):
    """Rows that are promised no frame outgrow the cluster together.

    The same requests then run with frames enough for all.
    """
    runs = []
    for num_frames, growth_promise in ((3, "tokens:0"), (64, "max_tokens")):
        config = configured(
            cluster=replace(CLUSTER, num_frames=num_frames),
            growth_promise=growth_promise,
            steps_per_window=num_steps,
        )
        prompts = [
            Prompt(
                list(range(number, number + 45 + number)),
                SamplingParams(
                    max_tokens=90 + number, temperature=0.9, top_k=40, top_p=0.95, seed=number
                ),
            )
            for number in range(2, 10)
        ]
        with DecodeCluster(config, tiny_checkpoint) as cluster:
            runs.append(cluster.run(prompts))
    assert sum(prompt.num_preemptions for prompt in runs[0]) >= 1, (
        "the story must contain what it is about"
    )
    assert [prompt.output for prompt in runs[0]] == [prompt.output for prompt in runs[1]]


def test_logprobs_are_those_of_the_reference(tiny_checkpoint, tiny_oracle):
    """For any controls that chose the token, and any instance that had the row."""
    config = Config(
        cluster=CLUSTER, scheduler=SchedulerConfig(policy="chaos", chaos_period_windows=1)
    )
    params = SamplingParams(
        max_tokens=24, temperature=1.5, repetition_penalty=1.5, seed=3, logprobs=4
    )
    prompts = [
        Prompt(list(range(2 + number, 150 + number)), replace(params, seed=number))
        for number in range(3)
    ]
    prompts.append(Prompt([5, 6], replace(params, logprobs=None)))
    with DecodeCluster(config, tiny_checkpoint) as cluster:
        *asked, silent = cluster.run(prompts)
    assert silent.logprobs == [None] * 24
    for prompt in asked:
        expected = tiny_oracle.logits(prompt.ids, prompt.output).double().log_softmax(dim=-1)
        for logprob_V, token_id, found in zip(
            expected, prompt.output, prompt.logprobs, strict=True
        ):
            assert found.logprob == pytest.approx(float(logprob_V[token_id]), abs=1e-3)
            assert [logprob for _, logprob in found.top] == pytest.approx(
                logprob_V.topk(4).values.tolist(), abs=1e-3
            )
            assert [float(logprob_V[i]) for i, _ in found.top] == pytest.approx(
                [p for _, p in found.top], abs=1e-3
            )


def test_without_a_prefill_tokens_are_the_same_at_any_degree(tiny_checkpoint, tiny_oracle):
    """Synthetic KV belongs to a request's page, wherever it is; no model has computed it."""
    outputs = []
    for degree in (1, 4):
        config = configured(cluster=CLUSTER, policy=f"fixed_degree:{degree}", synthetic_kv=True)
        with DecodeCluster(config, tiny_checkpoint) as cluster:
            prompts = cluster.run(make_prompts([300]))
        assert all(prompt.placements[0].cp_degree == degree for prompt in prompts)
        outputs.append([prompt.output for prompt in prompts])
    assert outputs[0] == outputs[1]
    assert not any(tiny_oracle.judge(prompt.ids, prompt.output).exact for prompt in prompts)


def test_stop_tokens_and_min_tokens(tiny_checkpoint):
    config = Config(cluster=CLUSTER, scheduler=SchedulerConfig(steps_per_window=4))
    with DecodeCluster(config, tiny_checkpoint) as cluster:
        (free,) = cluster.run(
            [Prompt(list(range(2, 80)), SamplingParams(max_tokens=20, temperature=0.0))]
        )
        stop = free.output[6]
        first = free.output.index(stop)
        stopping = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(stop,))
        late = SamplingParams(
            max_tokens=20, temperature=0.0, stop_token_ids=(stop,), min_tokens=first + 1
        )
        early, later = cluster.run(
            [Prompt(list(range(2, 80)), stopping), Prompt(list(range(2, 80)), late)]
        )
    assert early.output == free.output[: first + 1]
    assert later.output[:first] == free.output[:first] and later.output[first] != stop


SPREAD_VARIANTS = {
    "no q LoRA": ({"q_lora_rank": None}, False),
    "plain rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}, False),
    "published spelling of config.json": ({}, True),
}
"""What `make test` has in VARIANTS too, with something else."""
VARIANTS = {
    "plain rope, published spelling": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}, True,
    ),
    "no groups, two dense layers": ({"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
                                    False),
    "as DeepSeek-V2-Lite": (PRESETS["tiny-v2"], True),
    "no dense layer, two shared experts": ({"first_k_dense_replace": 0, "n_shared_experts": 2},
                                           False),
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[*VARIANTS, *(pytest.param(name, marks=in_system) for name in SPREAD_VARIANTS)],
)
def variant(request, tmp_path_factory):
    overrides, published_spelling = (VARIANTS | SPREAD_VARIANTS)[request.param]
    path = tmp_path_factory.mktemp("variant")
    make_checkpoint(path, "tiny", overrides=overrides, published_spelling=published_spelling)
    return path, Oracle(path)


@pytest.mark.parametrize("wire_form", ["latent", pytest.param("absorbed", marks=in_system)])
def test_checkpoint_variants(variant, wire_form):
    checkpoint, oracle = variant
    config = Config(
        cluster=CLUSTER,
        scheduler=SchedulerConfig(policy="chaos", chaos_seed=5),
        data_plane=DataPlaneConfig(wire_form=wire_form),
    )
    with DecodeCluster(config, checkpoint) as cluster:
        prompts = cluster.run(make_prompts((5, 70, 200, 390), num_tokens=40))
    assert max(prompt.placements[-1].cp_degree for prompt in prompts) > 1
    assert_exact(oracle, prompts)


@pytest.mark.parametrize(
    ("wire_form", "cpu_kernels"),
    [("latent", "auto"), pytest.param("absorbed", "torch", marks=in_system)],
)
class TestBf16:
    """bf16 tokens are near the reference's best.

    Logits of these checkpoints have a standard deviation of 1 and span 8: a wrong token is 3 below
    the best. Which windows rows share depends on when prompts arrive, so no two runs round alike.
    The bounds are several times what ten runs gave.
    """

    def test_every_token_is_within_the_tolerance_where_every_expert_is_visited(
        self, every_expert_checkpoint, every_expert_oracle, wire_form, cpu_kernels
    ):
        below = below_best(every_expert_checkpoint, every_expert_oracle, wire_form, cpu_kernels)
        assert below.max() < 0.15, below.max()  # seen: 0.008 to 0.042
        assert (below == 0).float().mean() > 0.85, below  # seen: 0.95 to 0.99

    def test_tokens_are_near_the_best_where_the_gate_chooses(
        self, tiny_checkpoint, tiny_oracle, wire_form, cpu_kernels
    ):
        # Near a tie of the gate bf16 visits another expert, and that token may be 2 below: so the
        # mean, not the most.
        below = below_best(tiny_checkpoint, tiny_oracle, wire_form, cpu_kernels)
        assert below.mean() < 0.15, below  # seen: 0.010 to 0.026
        assert (below == 0).float().mean() > 0.8, (
            below
        )  # seen: 0.91 to 0.93; transformers' own bf16: 0.91 to 0.94


def below_best(checkpoint, oracle, wire_form, cpu_kernels):
    """How far each bf16 token's logit is below the highest of the fp32 reference."""
    config = Config(
        cluster=CLUSTER,
        scheduler=SchedulerConfig(policy="chaos", chaos_seed=6),
        data_plane=DataPlaneConfig(dtype="bfloat16", wire_form=wire_form, cpu_kernels=cpu_kernels),
    )
    with DecodeCluster(config, checkpoint) as cluster:
        prompts = cluster.run(make_prompts((5, 70, 200, 390), num_tokens=64))
    below = []
    for prompt in prompts:
        logits = oracle.logits(prompt.ids, prompt.output)
        chosen = logits.gather(1, torch.tensor(prompt.output)[:, None]).squeeze(1)
        below.append(logits.max(dim=-1).values - chosen)
    return torch.cat(below)
