"""The command line of nanocp, in this process."""

from typer.testing import CliRunner

from nanocp.cli.main import app


def nanocp(*words, **environment):
    return CliRunner().invoke(app, [str(word) for word in words], env=environment)


def on_one_line(result):
    """What a command printed, without boxes and the ends of lines."""
    return " ".join(result.output.replace("│", " ").split())
