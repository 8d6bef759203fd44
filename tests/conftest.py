"""Fixtures of the library's tests."""

import ctypes

import pytest
import torch

from mvngrad.optim import backends


class InterpretedKernel:
    """A kernel in Triton's interpreter that can be launched again by addresses, as a compiled one can."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            dtypes = [getattr(argument, "dtype", None) for argument in arguments]

            def launch_again(*arguments):
                self.function[grid](*map(make_pointer, arguments, dtypes), **options)

            self.function[grid](*arguments, **options)
            return {grid: launch_again}

        return launch


def make_pointer(argument, dtype):
    """A tensor at an address, of one element: the interpreter reads only where it begins."""
    if dtype is None or not isinstance(argument, int):
        return argument
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(argument), dtype=dtype)


@pytest.fixture
def by_kernel(triton, monkeypatch):
    """Optimizers step by the CUDA kernel on a CPU too, in Triton's interpreter."""
    if not torch.cuda.is_available():
        from mvngrad.optim.backends.cuda import kernel

        for name in ("advance", "update", "wide_advance", "wide_update"):
            monkeypatch.setattr(kernel, name, InterpretedKernel(getattr(kernel, name)))

        def accepts(param):
            return param.dtype in backends.CUDA_KERNEL_DTYPES and backends.owns_memory(backends.get_local(param))

        monkeypatch.setattr(backends, "cuda_kernel_accepts", accepts)


@pytest.fixture(params=["cpu", "cuda"])
def kernel(request, device):
    """The backend of each kernel; on a CPU the one for CUDA runs in Triton's interpreter."""
    if request.param == "cpu":
        if device != "cpu":
            pytest.skip("this backend runs on the CPU only")
        request.getfixturevalue("cpp_compiler")
    else:
        request.getfixturevalue("by_kernel")
    return request.param


@pytest.fixture
def kernel_options(kernel):
    """Options with which an optimizer steps by the kernel."""
    return {"fused": True} if kernel == "cpu" else {}
