"""What a program imports, in a process of its own."""

import subprocess
import sys

from harness.paths import ROOT


def assert_not_imported(program, *modules, **options):
    """None of the modules has been imported when the program has run. options: of subprocess."""
    code = (
        f"{program}\nimport sys\nfound = {{*{modules}}} & {{*sys.modules}}\nassert not found, found"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT, **options)
