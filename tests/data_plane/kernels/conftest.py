"""Kernels in this folder run under Triton's interpreter: it is chosen when a kernel is decorated, so before any import.

Compiling them needs a process of its own (test_kernel_compilation.py).
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
