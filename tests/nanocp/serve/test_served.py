"""What nanocp serve says of its configuration at start."""

from dataclasses import replace

import pytest

from harness.exact.settings import configured
from nanocp.config.cost import CPU_COSTS, CostConfig
from nanocp.config.file import load_config
from nanocp.config.passes import PassCosts
from nanocp.config.scheduler import SchedulerConfig
from nanocp.serve.served import policy_in_words

MEASURE = "(nanocp profile measures yours)"


@pytest.mark.parametrize(("num", "policy", "costs", "words"), [
    (4, "cost_aware", CPU_COSTS, f"cost_aware by costs of a CPU {MEASURE}"),
    (4, "cost_aware", CostConfig(), f"cost_aware by costs of 32 H200s {MEASURE}"),
    (4, "cost_aware", replace(CPU_COSTS, link_tokens=7), "cost_aware"),
    (1, "cost_aware", CPU_COSTS, "cost_aware"),
    (4, "dual_balanced", CPU_COSTS, f"dual_balanced by CP degrees that nobody measured {MEASURE}"),
    (1, "dual_balanced", CPU_COSTS, "dual_balanced"),
    (4, "least_batch", CPU_COSTS, "least_batch"),
])  # fmt: skip
def test_costs_of_other_machines_are_said_with_the_policy(num, policy, costs, words):
    scheduler = SchedulerConfig(policy=policy, costs=costs)
    config = configured(num_instances=num, scheduler=scheduler)
    assert policy_in_words(config) == words


@pytest.mark.parametrize(
    ("policy", "by"), [("cost_aware", "costs"), ("dual_balanced", "CP degrees")]
)
def test_a_service_on_gpus_goes_by_what_h200s_cost_and_says_so(policy, by):
    given = {"data_plane.device": "cuda", "cluster.num_instances": 4, "scheduler.policy": policy}
    words = f"{policy} by {by} of 32 H200s {MEASURE}"
    assert policy_in_words(load_config(None, given, {})) == words
    own = load_config(None, given, {}).scheduler
    assert (
        policy_in_words(
            configured(
                load_config(None, given, {}),
                scheduler=replace(own, cp_degree_max=2, costs=CostConfig(link_tokens=7)),
            )
        )
        == policy
    )


@pytest.mark.parametrize(("given", "words"), [
    ({"num_drafts": 2}, "; always drafts, and nobody measured whether they pay"),
    ({"lanes": "always"}, "; always two lanes, and nobody measured whether they pay"),
    ({"num_drafts": 1, "lanes": "always"},
     "; always drafts and two lanes, and nobody measured whether they pay"),
    ({"num_drafts": 2, "draft_table": ((1, 0, 1, 120),)}, ""),
    ({"lanes": "always", "lane_table": ((4, 0, 80, "nanoflow"),)}, ""),
    ({"lanes": "measured", "lane_table": ((4, 0, 80, "nanoflow"),)}, ""),
])  # fmt: skip
def test_drafts_and_lanes_that_nobody_measured_are_said(given, words):
    config = configured(num_instances=2, scheduler=SchedulerConfig(policy="least_batch", **given))
    assert policy_in_words(config) == f"least_batch{words}"


@pytest.mark.parametrize("policy", ["even", "static:2,2", "delta", "level"])
def test_costs_that_nobody_measured_are_said_with_a_layer_policy_that_goes_by_them(policy):
    config = configured(num_instances=2, layout="pipeline", layer_policy=policy)
    goes_by_them = policy in ("delta", "level")
    by = f" by costs that nobody measured {MEASURE}" if goes_by_them else ""
    assert policy_in_words(config) == policy + by
    measured = replace(config.pipeline, costs=PassCosts(token_us=2.5))
    assert policy_in_words(configured(config, pipeline=measured)) == policy
