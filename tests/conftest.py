"""Fixtures of the library's tests."""

import pytest
import torch

from mvngrad.optim import backends


@pytest.fixture
def by_kernel(triton, monkeypatch):
    """Optimizers step by the CUDA kernel on a CPU too, in Triton's interpreter."""
    if not torch.cuda.is_available():

        def accepts(param):
            return param.dtype in backends.KERNEL_DTYPES and backends.owns_memory(backends.get_local(param))

        monkeypatch.setattr(backends, "kernel_accepts", accepts)
