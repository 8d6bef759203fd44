"""Our Adam and AdamW equal torch's, bit for bit."""

import pytest
import torch
from family import step
from torch.optim.lr_scheduler import CosineAnnealingLR

import mvngrad
from mvngrad.rule import ADAM, Hyper

STEPS = 100
SHAPES = [(37,), (8, 5), ()]
GROUPS = [
    {"lr": 1e-2, "betas": (0.9, 0.999)},
    {"lr": 3e-3, "betas": (0.4, 0.95), "eps": 1e-3, "weight_decay": 0.1},  # lerp has another branch below 0.5
    {"lr": 0.3, "betas": (0.0, 0.5), "weight_decay": 0.02},
    {"lr": 1e-3, "betas": (0.99, 0.9999), "weight_decay": 0.0, "maximize": True},
]

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
each_pair = pytest.mark.parametrize("name", ["Adam", "AdamW"])


def make_groups(dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [[torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES] for _ in GROUPS]
    return [{**group, "params": list(map(torch.nn.Parameter, xs))} for group, xs in zip(GROUPS, tensors, strict=True)]


def get_parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(optimizer, t):
    """Gradients over six orders of magnitude; the last parameter is frozen for ten steps."""
    generator = torch.Generator().manual_seed(t)
    for p in get_parameters(optimizer):
        scale = 10 ** torch.empty(()).uniform_(-3, 3, generator=generator).item()
        p.grad = scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    if t < 10:
        p.grad = None


def assert_equal(x, m, v, step, param, state):
    assert torch.equal(x, param)
    assert torch.equal(m, state["exp_avg"])
    assert torch.equal(v, state["exp_avg_sq"])
    assert step == state["step"]


@pytest.mark.parametrize("foreach", [False, True])
@each_pair
@each_dtype
def test_optimizers_equal_torchs_bit_for_bit(name, foreach, dtype):
    # With coupled decay on complex parameters torch's own two paths differ by an ulp; ours equals its foreach path.
    their_foreach = foreach or (dtype.is_complex and name == "Adam")
    ours = getattr(mvngrad, name)(make_groups(dtype), foreach=foreach)
    theirs = getattr(torch.optim, name)(make_groups(dtype), foreach=their_foreach)
    schedules = [CosineAnnealingLR(optimizer, T_max=STEPS) for optimizer in (ours, theirs)]
    for t in range(STEPS):
        for optimizer, schedule in zip((ours, theirs), schedules, strict=True):
            set_gradients(optimizer, t)
            optimizer.step()
            schedule.step()
    for p, param in zip(get_parameters(ours), get_parameters(theirs), strict=True):
        state = ours.state[p]
        assert_equal(p, state["m"], state["v"], state["step"], param, theirs.state[param])


@each_pair
@each_dtype
def test_training_continues_from_a_converted_torch_state(name, dtype):
    theirs = getattr(torch.optim, name)(make_groups(dtype), foreach=True)
    ours = getattr(mvngrad, name)(make_groups(dtype))
    for t in range(STEPS):
        if t == STEPS // 2:
            with torch.no_grad():
                for p, param in zip(get_parameters(ours), get_parameters(theirs), strict=True):
                    p.copy_(param)
            ours.load_state_dict(mvngrad.convert_state_dict(theirs.state_dict(), None))
        for optimizer in (theirs, ours) if t >= STEPS // 2 else (theirs,):
            set_gradients(optimizer, t)
            optimizer.step()
    for p, param in zip(get_parameters(ours), get_parameters(theirs), strict=True):
        state = ours.state[p]
        assert_equal(p, state["m"], state["v"], state["step"], param, theirs.state[param])
    other = getattr(mvngrad, "Adam" if name == "AdamW" else "AdamW")(make_groups(dtype))
    with pytest.raises(ValueError, match="its weight decay is"):
        other.load_state_dict(mvngrad.convert_state_dict(theirs.state_dict(), None))


@each_pair
@each_dtype
def test_the_foreach_backend_equals_torchs_bit_for_bit(name, dtype):
    """Calls the backend directly, because on the CPU our optimizers step tensor by tensor."""
    theirs = getattr(torch.optim, name)(make_groups(dtype), foreach=True)
    schedule = CosineAnnealingLR(theirs, T_max=STEPS)
    ours = {
        p: (p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p), torch.zeros(()))
        for p in get_parameters(theirs)
    }
    for t in range(STEPS):
        set_gradients(theirs, t)
        for group in theirs.param_groups:
            beta1, beta2 = group["betas"]
            names = "lr", "eps", "weight_decay", "maximize"
            options = {option: group[option] for option in names}
            hyper = Hyper(beta1=beta1, beta2=beta2, decoupled=name == "AdamW", **options)
            live = [p for p in group["params"] if p.grad is not None]
            x, m, v, steps = map(list, zip(*(ours[p] for p in live), strict=True))
            step("foreach", ADAM, hyper, x, [p.grad for p in live], {"m": m, "v": v}, steps)
        theirs.step()
        schedule.step()
    for param, mine in ours.items():
        assert_equal(*mine, param, theirs.state[param])
