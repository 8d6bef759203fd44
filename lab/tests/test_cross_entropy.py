"""The kernel of the language models' loss: in Triton's interpreter on a CPU, compiled on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from mvngrad_lab.tasks.language.kernels.cross_entropy import cross_entropy, softmax_losses_

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def drawn(rows, classes, dtype, device, scale=3.0):
    logits = scale * torch.randn(rows, classes, dtype=torch.float64)
    return logits.to(device, dtype), torch.randint(classes, (rows,), device=device)


def expected(logits, targets, scale):
    """Losses and gradient in float64."""
    logits = logits.double().requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses.detach(), torch.autograd.grad(scale * losses.sum(), logits)[0]


@each_device
@each_dtype
@pytest.mark.parametrize("classes", [1, 100, 16384, 16385, 20000])
def test_losses_and_gradient_equal_float64(triton, device, dtype, classes):
    logits, targets = drawn(3, classes, dtype, device)
    losses, gradient = expected(logits, targets, 8.0)
    before = logits.clone()
    torch.testing.assert_close(softmax_losses_(logits, targets, 8.0, False), losses.float(), rtol=1e-5, atol=1e-5)
    assert logits.equal(before)
    torch.testing.assert_close(softmax_losses_(logits, targets, 8.0, True), losses.float(), rtol=1e-5, atol=1e-5)
    # A last bit of the dtype, and float32's rounding of a difference near 1.
    torch.testing.assert_close(logits.double(), gradient, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@each_device
def test_large_logits_do_not_overflow(triton, device):
    logits, targets = drawn(4, 300, torch.float32, device, scale=1e4)
    losses, gradient = expected(logits, targets, 1.0)
    torch.testing.assert_close(softmax_losses_(logits, targets, 1.0, True), losses.float(), rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(logits.double(), gradient, rtol=0, atol=1e-3)


@each_device
@pytest.mark.parametrize("target", [-1, 300, 2**40])
def test_invalid_target_gives_a_loss_of_nan(triton, device, target):
    logits, targets = drawn(3, 300, torch.float32, device)
    targets[1] = target
    assert softmax_losses_(logits, targets, 1.0, True).isnan().tolist() == [False, True, False]


@each_device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
def test_logits_that_are_not_finite_give_nan(triton, device):
    logits, targets = drawn(3, 300, torch.float32, device)
    logits[0, 7], logits[1, 7] = float("nan"), float("inf")
    losses = softmax_losses_(logits, targets, 1.0, True)
    assert losses.isnan().tolist() == [True, True, False]
    assert logits[0].isnan().all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # float32 is meant
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_loss_in_parts_on_a_gpu_equals_the_plain_one(compiled, bfloat16):
    hidden = torch.randn(100, 64, device="cuda", requires_grad=True)
    weight = torch.randn(9000, 64, device="cuda", requires_grad=True)
    targets = torch.randint(9000, (100,), device="cuda")
    ours = torch.compile(cross_entropy, dynamic=False, fullgraph=True) if compiled else cross_entropy
    exact = F.cross_entropy(hidden.double() @ weight.double().T, targets)
    with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16):
        loss = ours(hidden, weight, targets, 32)
        with torch.no_grad():
            evaluated = cross_entropy(hidden, weight, targets, 32)
    bound = 2e-2 if bfloat16 else 1e-5
    torch.testing.assert_close(torch.stack([loss, evaluated]).double(), exact.expand(2), rtol=bound, atol=0)
    for got, wanted in zip(
        torch.autograd.grad(loss / 2, [hidden, weight]), torch.autograd.grad(exact / 2, [hidden, weight]), strict=True
    ):
        assert got.dtype == torch.float32
        assert torch.dist(got, wanted) <= bound * wanted.norm()
