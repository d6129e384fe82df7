"""The real `nanocp` command line, but `serve` starts HashInstances, which load nothing."""

import sys

import nanocp.cli.serve
from nanocp.cli.main import app

factory = sys.argv.pop(1)
serve_checkpoint = nanocp.cli.serve.run


def run(*arguments):
    # Imported no earlier than the command itself would.
    import nanocp.serve.service
    from harness.hash_service import served

    nanocp.serve.service.open_checkpoint = lambda config, checkpoint: served(
        f"harness.hash_members:{factory}"
    )
    return serve_checkpoint(*arguments)


nanocp.cli.serve.run = run
app()
