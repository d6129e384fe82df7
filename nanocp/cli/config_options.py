"""Options that set one key of the configuration each.

Enters: the configuration's fields. Leaves: options whose values nanocp.config_file takes as flags.
Does not know: commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

from nanocp.cli.options import FieldOption, field_option
from nanocp.config import Config


def config_option(
    key: str, name: str = "", metavar: str | None = None, choices: Sequence[str] = ()
) -> FieldOption:
    """The option of a key such as cluster.num_instances; name: by default the key's last part."""
    section, _, field_name = key.partition(".")
    kind = get_type_hints(Config)[section]
    return field_option(kind, field_name, key=key, name=name, metavar=metavar, choices=choices)
