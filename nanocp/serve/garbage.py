"""Python's garbage collector, told that what lives by now lives long.

Enters: nothing. Leaves: a process in which a collection walks only what is younger. Does not know:
who serves what.
"""

import gc

_MAX_YOUNG_OBJECTS = 10_000
"""A window's plan makes some thousands; almost all are freed by their reference counts before they
are walked."""


def freeze_long_lived() -> None:
    """To be called once, when everything that stays is there. A full walk would cost many windows'
    time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MAX_YOUNG_OBJECTS)
