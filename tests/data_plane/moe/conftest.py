"""Kernels in this folder run under Triton's interpreter."""

from harness.interpreter import interpret

interpret()
