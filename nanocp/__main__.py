"""`python -m nanocp`: the command `nanocp`, also where it is not in PATH.

Enters: a command line. Leaves: an exit status. Does not know: what commands do.
"""

from nanocp.cli.main import app

app(prog_name="nanocp")
