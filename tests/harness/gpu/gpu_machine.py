"""A program as a GPU machine runs it, which has torch and Triton, and need not have the rest."""

import sys

_ABSENT = (
    "pytest", "ray", "grpc", "google.protobuf", "msgspec", "pydantic", "rich", "typer", "yaml",
)  # fmt: skip


def command_of(script, *arguments, absent=()):
    """What runs the script where these packages are absent too."""
    absent = dict.fromkeys((*_ABSENT, *absent))
    program = f"import runpy, sys; del sys.argv[0]; sys.modules.update({absent})"
    program += "; runpy.run_path(sys.argv[0], None, '__main__')"
    return [sys.executable, "-c", program, script, *arguments]
