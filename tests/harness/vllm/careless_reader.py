"""A reader of engines' memory that believes whatever it reads: the control of its checks."""

from data_plane.prefill import build
from data_plane.prefill.pull.first_layer import FirstLayer


def build_reader(*arguments):
    """The reader, without the comparison of layer 0."""
    FirstLayer.error = lambda self, found, expected: None
    return build.build_reader(*arguments)
