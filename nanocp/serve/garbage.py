"""Python's garbage collector for processes whose objects stay."""

import gc

_MAX_YOUNG_OBJECTS = 10_000
"""Young objects before a collection; a plan makes some thousands, freed by reference counts."""


def freeze_long_lived() -> None:
    """Leave all present objects out of later collections, which take as long as many windows."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MAX_YOUNG_OBJECTS)
