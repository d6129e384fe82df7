"""Python's garbage collector, set up for a process whose objects stay.

Enters: nothing. Leaves: a process in which a collection visits young objects only. Does not know:
what is served.
"""

import gc

_MAX_YOUNG_OBJECTS = 10_000
"""Young objects before a collection. A window's plan makes some thousands, which their reference
counts free."""


def freeze_long_lived() -> None:
    """Leave every object that exists now out of later collections.

    Call it once, when everything that stays has been made. A full collection would take as long as
    many windows.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MAX_YOUNG_OBJECTS)
