"""Policies are as short as the paper says, and know operators by their tags alone."""

import ast
import inspect

import pytest

from nanocp.overlap.policies import orders

TABLE_2 = {
    "NanoFlow": 22,
    "DualBatchOverlap": 67,
    "SingleBatchOverlap": 24,
    "TokenWeave": 28,
    "Flux": 25,
    "Comet": 47,
}
"""Lines of each scheduler in DynaFlow's Table 2."""


def lines_of(name):
    """Lines of a policy's class and of those it extends, without docstrings and empty lines."""
    total = 0
    for cls in getattr(orders, name).__mro__[:-1]:
        if cls is orders.Sequential:
            continue
        (tree,) = ast.parse(inspect.getsource(cls)).body
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                del node.body[0]
        total += len(ast.unparse(tree).splitlines())
    return total


@pytest.mark.parametrize("name", TABLE_2)
def test_a_policy_has_at_most_the_papers_lines(name):
    assert lines_of(name) <= TABLE_2[name]
