"""`python -m nanocp`: the command `nanocp`, also where it is not in PATH."""

from nanocp.cli.main import app

app(prog_name="nanocp")
