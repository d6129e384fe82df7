"""The docstring below each field of a dataclass: its help wherever it is shown."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from itertools import pairwise


def field_docs(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and its bases, as one line."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        for field, after in pairwise(_class_bodies(base.__module__).get(base.__name__, [])):
            match field, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    source = inspect.getsource(__import__(module, fromlist=["*"]))
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return {node.name: node.body for node in classes}
