"""One mutant: a fault, and the tests that must see it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault: in `path`, `text` becomes `fault`, and one of `tests` must then fail."""

    name: str
    why: str
    """What goes wrong; if it breaks a law of protocol.md, its name in brackets."""
    path: str
    text: str
    """Stands in the file once. White space may differ, and a comma before a closing bracket."""
    fault: str
    """Lines after the first are indented as the file's line with the text is."""
    tests: tuple[str, ...]
    """Arguments of pytest."""
    needs: str = ""
    """What /proc/cpuinfo must name: other processors do not compile the line. Empty: nothing."""


def seen_by(seed: int) -> tuple[str, ...]:
    """The play of one seed, which this fault turns red."""
    return ("tests/hash_clusters/test_hash_recovery.py", "-k", f"planted and {seed}")
