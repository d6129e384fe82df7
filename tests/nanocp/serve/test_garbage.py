"""Objects that stay are not visited again."""

import subprocess
import sys

PROGRAM = """
import gc
from nanocp.serve.garbage import freeze_long_lived
rows = [[number] for number in range(50_000)]
freeze_long_lived()
assert gc.get_freeze_count() > 50_000 and not any(own is rows[0] for own in gc.get_objects())
walks = []
gc.callbacks.append(lambda phase, info: walks.append(info["generation"]))
for _ in range(100):
    window = [[number] for number in range(3_000)]
assert not walks, walks
"""


def test_a_window_makes_no_collection():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
