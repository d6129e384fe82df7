"""Options that set one key of the configuration each.

Enters: the configuration's fields. Leaves: options whose values nanocp.config.file takes as flags.
Does not know: commands.
"""

from __future__ import annotations

from typing import get_type_hints

from nanocp.cli.options import FieldOption, field_option
from nanocp.config.whole import Config


def config_option(key: str, name: str = "", metavar: str | None = None) -> FieldOption:
    """The option of a key such as cluster.num_instances; name: by default the key's last part."""
    *sections, field_name = key.split(".")
    kind: type = Config
    for section in sections:
        kind = get_type_hints(kind)[section]
    return field_option(kind, field_name, key=key, name=name, metavar=metavar)
