"""Where there is no GPU, Triton interprets its kernels. It decides that when it is imported first,
so the tests decide it before any of them is."""

import os
import signal

import pytest

from book.tools.refresh import has_cuda

if not has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts jobs in the background with Ctrl-C ignored, and the tests of Ctrl-C would wait for it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread():
    """Models this small only lose by handing work to other threads."""
    import numba  # not above: the control plane's tests run where neither is installed
    import torch

    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(torch_threads)
    numba.set_num_threads(numba_threads)
