"""Where there is no GPU, Triton interprets its kernels. It decides that when it is imported first,
so the tests decide it before any of them is."""

import os

from book.tools.refresh import has_cuda

if not has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"
