"""Policies by name."""

from __future__ import annotations

from importlib import import_module

from control_plane.scheduler.policies.any_node import DualBalancedAnyNode
from control_plane.scheduler.policies.chaos import Chaos
from control_plane.scheduler.policies.cost_aware import CostAware
from control_plane.scheduler.policies.dual_balanced import DualBalanced
from control_plane.scheduler.policies.fixed_degree import FixedDegree
from control_plane.scheduler.policies.one_instance import least_batch, least_cache, round_robin
from control_plane.scheduler.policies.policy import Policy
from control_plane.scheduler.policies.uniform_cp import UniformCp
from nanocp.config.choices import none_of
from nanocp.config.scheduler import SchedulerConfig

POLICY_NAMES = (
    "dual_balanced",
    "dual_balanced_any_node",
    "cost_aware",
    "least_batch",
    "least_cache",
    "round_robin",
    "uniform_cp:N",
    "fixed_degree:N",
    "chaos",
)


def make_policy(config: SchedulerConfig) -> Policy:
    """Return the policy that config.policy names. Raises ValueError naming the nearest one."""
    match config.policy.split(":"):
        case ["dual_balanced"]:
            return DualBalanced(config)
        case ["dual_balanced_any_node"]:
            return DualBalancedAnyNode(config)
        case ["cost_aware"]:
            return CostAware(config)
        case ["least_batch"]:
            return least_batch()
        case ["least_cache"]:
            return least_cache()
        case ["round_robin"]:
            return round_robin()
        case ["chaos"]:
            return Chaos(config)
        case ["uniform_cp", *argument]:
            return UniformCp(_degree(config.policy, argument))
        case ["fixed_degree", *argument]:
            return FixedDegree(config, _degree(config.policy, argument))
        case ["fluid"]:
            raise ValueError(
                "policy is 'fluid', a bound that only `nanocp simulate` knows; use cost_aware"
            )
        case [module, name] if name.isidentifier():
            return _imported(config, module, name)
    names = [name for name in POLICY_NAMES if name != "chaos"]  # for tests
    raise ValueError(f"policy is {config.policy!r}; {none_of(config.policy, names)}")


def _imported(config: SchedulerConfig, module: str, name: str) -> Policy:
    try:
        made: Policy = getattr(import_module(module), name)(config)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"policy is {config.policy!r}; module:Class must name a class that PYTHONPATH leads to "
            f"and that is made of a SchedulerConfig: {error}"
        ) from error
    if not callable(getattr(made, "place", None)):
        raise ValueError(f"policy is {config.policy!r}; {name} has no method place (policy.py)")
    return made


def _degree(policy: str, argument: list[str]) -> int:
    if (
        len(argument) == 1
        and argument[0].isascii()
        and argument[0].isdigit()
        and int(argument[0]) >= 1
    ):
        return int(argument[0])
    name = policy.partition(":")[0]
    raise ValueError(f"policy is {policy!r}; {name} needs a degree, like {name}:2")
