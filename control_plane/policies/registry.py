"""Policies by name.

Enters: the scheduler's configuration. Leaves: a policy, or an error that names the nearest one.
"""

from __future__ import annotations

import difflib

from control_plane.policies.chaos import Chaos
from control_plane.policies.dual_balanced import DualBalanced
from control_plane.policies.fixed_degree import FixedDegree
from control_plane.policies.policy import Policy
from nanocp.config import SchedulerConfig

POLICY_NAMES = ("dual_balanced", "chaos", "fixed_degree:N")


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that config.policy names. Raises ValueError naming the nearest one."""
    name, colon, argument = config.policy.partition(":")
    if name == "dual_balanced" and not colon:
        return DualBalanced(config)
    if name == "chaos" and not colon:
        return Chaos(config)
    if name == "fixed_degree":
        if not (argument.isascii() and argument.isdigit() and int(argument) >= 1):
            raise ValueError(f"policy is {config.policy!r}; fixed_degree needs a degree, like fixed_degree:2")
        return FixedDegree(config, int(argument))
    nearest = difflib.get_close_matches(config.policy, POLICY_NAMES, n=1, cutoff=0.0)[0]
    raise ValueError(f"policy is {config.policy!r}; it must be one of {', '.join(POLICY_NAMES)} (nearest: {nearest})")
