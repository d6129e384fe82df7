"""`nanocp config`: every key of the configuration, with its default, unit and sentence.

Enters: nothing. Leaves: YAML on standard output, which `nanocp serve --config` reads. Does not
know: services.
"""

from __future__ import annotations


def config() -> None:
    """Print every key that a configuration file may have, as YAML with its defaults.

    Copy the lines that you change into a file for `nanocp serve --config`. An environment variable
    sets a key too: NANOCP_CLUSTER__NUM_FRAMES=512. Flags go before it, and it before the file.
    """
    from nanocp.config.whole import Config
    from nanocp.config.yaml import config_yaml

    print(config_yaml(Config()), end="")
