"""What nanocp serve says of its configuration at start."""

from dataclasses import replace

import pytest

from harness.settings import configured
from nanocp.config.cost import CPU_COSTS, CostConfig
from nanocp.config.passes import PassCosts
from nanocp.config.scheduler import SchedulerConfig
from nanocp.serve.served import policy_in_words

MEASURE = "(nanocp profile measures yours)"


@pytest.mark.parametrize(("num", "policy", "costs", "words"), [
    (4, "cost_aware", CPU_COSTS, f"cost_aware by costs of a CPU {MEASURE}"),
    (4, "cost_aware", CostConfig(), f"cost_aware by costs of 32 H200s {MEASURE}"),
    (4, "cost_aware", replace(CPU_COSTS, link_tokens=7), "cost_aware"),
    (1, "cost_aware", CPU_COSTS, "cost_aware"),
    (4, "dual_balanced", CPU_COSTS, "dual_balanced"),
])  # fmt: skip
def test_costs_of_other_machines_are_said_with_the_policy(num, policy, costs, words):
    scheduler = SchedulerConfig(policy=policy, costs=costs)
    config = configured(num_instances=num, scheduler=scheduler)
    assert policy_in_words(config) == words


@pytest.mark.parametrize("policy", ["even", "static:2,2", "delta", "level"])
def test_costs_that_nobody_measured_are_said_with_a_layer_policy_that_goes_by_them(policy):
    config = configured(num_instances=2, layout="pipeline", layer_policy=policy)
    goes_by_them = policy in ("delta", "level")
    by = f" by costs that nobody measured {MEASURE}" if goes_by_them else ""
    assert policy_in_words(config) == policy + by
    measured = replace(config.pipeline, costs=PassCosts(token_us=2.5))
    assert policy_in_words(configured(config, pipeline=measured)) == policy
