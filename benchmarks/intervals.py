"""How sure a median of noisy measurements is.

Enters: values. Leaves: an interval. Does not know: what was measured.
"""

from __future__ import annotations

import numpy as np

_NUM_RESAMPLES = 4000


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """The 95% interval of the median of [measurements] values, by resampling."""
    drawn = np.random.default_rng(0).choice(values, (_NUM_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)
