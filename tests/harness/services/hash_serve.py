"""The real `nanocp` command line, but `serve` starts HashInstances, which load nothing."""

import dataclasses
import sys

import nanocp.cli.serve.serve
from nanocp.cli.main import app


def main():
    """Run the command line. Its first word is the factory in harness.services.hash_members."""
    factory = sys.argv.pop(1)
    serve_checkpoint = nanocp.cli.serve.serve.run

    def run(*arguments):
        # Imported no earlier than the command itself would.
        import nanocp.serve.service
        from harness.hash_clusters.hash_model import NUM_EXPERTS
        from harness.services.hash_service import served

        def open_checkpoint(config, checkpoint):
            opened = served(f"harness.services.hash_members:{factory}")
            # Without more slots every instance must always serve.
            has_slots = config.cluster.redundant_experts > 0
            return dataclasses.replace(opened, num_experts=NUM_EXPERTS if has_slots else None)

        nanocp.serve.service.open_checkpoint = open_checkpoint
        return serve_checkpoint(*arguments)

    nanocp.cli.serve.serve.run = run
    app()


if __name__ == "__main__":
    main()
