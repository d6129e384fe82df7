"""WaterFill: spread an amount so that the highest level becomes as low as possible (4.2.3)."""

from __future__ import annotations

from collections.abc import Sequence


def waterfill(levels: Sequence[int], amount: int) -> list[int]:
    """Return shares that sum to the amount and minimise max(level + share) over those with a share.

    The first of the filled levels take the remainder. Raises ValueError for no levels or a negative
    amount.
    """
    if not levels or amount < 0:
        raise ValueError(
            f"cannot spread {amount} over {len(levels)} levels; give one level or more, and no "
            "negative amount"
        )
    order = sorted(range(len(levels)), key=levels.__getitem__)
    below = 0  # sum of the levels under water
    for num_filled, index in enumerate(order, start=1):
        below += levels[index]
        next_level = levels[order[num_filled]] if num_filled < len(order) else None
        if next_level is None or next_level * num_filled - below >= amount:
            break
    height, remainder = divmod(amount + below, num_filled)
    shares = [0] * len(levels)
    for rank, index in enumerate(order[:num_filled]):
        shares[index] = height - levels[index] + (rank < remainder)
    return shares
