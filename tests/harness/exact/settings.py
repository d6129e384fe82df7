"""A configuration by the names of its settings, as a file or an option names them."""

from dataclasses import is_dataclass, replace

from nanocp.config.whole import Config


def _paths(section, path=()):
    """The path of each setting, of those that only tests set too."""
    for name in section.__dataclass_fields__:
        value = getattr(section, name)
        yield from _paths(value, (*path, name)) if is_dataclass(value) else [(*path, name)]


# Several sections have costs and a seed of chaos: the first one is meant.
PATHS = {path[-1]: path for path in reversed([*_paths(Config())])}


def configured(base=None, **values):
    """`base`, by default what ships, with these settings; whole sections may be among them."""
    changes = {}
    for name, value in values.items():
        *sections, last = PATHS.get(name, (name,))
        inner = changes
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return _changed(base or Config(), changes)


def _changed(value, changes):
    return replace(value, **{
        name: _changed(getattr(value, name), change) if is_dataclass(getattr(value, name))
        and isinstance(change, dict) else change
        for name, change in changes.items()
    })  # fmt: skip
