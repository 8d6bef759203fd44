"""The kernel of GELU's gradient: in Triton's interpreter on a CPU, compiled on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mvngrad_lab.tasks.language.kernels.gelu import gelu, gelu_backward

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@each_device
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 100), (128, 512), (129, 513)])
def test_gradient_and_sums_equal_float64(triton, device, dtype, shape):
    x, grad = (scale * torch.randn(shape, dtype=torch.float64) for scale in (3.0, 1.0))
    x, grad = x.to(device, dtype), grad.to(device, dtype)
    exact = x.double().requires_grad_()
    F.gelu(exact, approximate="tanh").backward(grad.double())
    out, sums = gelu_backward(x, grad)
    torch.testing.assert_close(out.double(), exact.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    rows = exact.grad.flatten(0, -2)
    torch.testing.assert_close(sums.sum(0).double(), rows.sum(0), rtol=1e-5, atol=1e-6 * len(rows))


def test_tensors_that_are_not_contiguous(triton):
    x, grad = torch.randn(5, 7), torch.randn(5, 7)
    result, expected = gelu_backward(x.T, grad.T), gelu_backward(x.T.contiguous(), grad.T.contiguous())
    assert all(map(torch.equal, result, expected))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # float32 is meant
@pytest.mark.parametrize("bfloat16", [False, True])
def test_compiled_on_a_gpu_equals_the_plain_one(bfloat16):
    layer = nn.Linear(64, 256, device="cuda")
    x = torch.randn(4, 100, 64, device="cuda", requires_grad=True)
    wanted = [x, layer.weight, layer.bias]
    with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16):
        ours = torch.compile(gelu, dynamic=False, fullgraph=True)(layer, x)
    exact = F.gelu(F.linear(*(each.double() for each in wanted)), approximate="tanh")
    bound = 2e-2 if bfloat16 else 1e-5
    assert torch.dist(ours.double(), exact) <= bound * exact.norm()
    factor = torch.randn_like(exact)
    gradients = (torch.autograd.grad((y * factor).sum(), wanted) for y in (ours.double(), exact))
    for got, right in zip(*gradients, strict=True):
        assert got.dtype == torch.float32
        assert torch.dist(got, right) <= bound * right.norm()
