"""`nanocp` with HashInstances behind `serve`: the command line as it is, members that start in no time."""

import sys

from hash_service import served

import nanocp.service
from nanocp.cli.main import app

factory = sys.argv.pop(1)
nanocp.service.open_checkpoint = lambda config, checkpoint: served(f"hash_members:{factory}")
app()
