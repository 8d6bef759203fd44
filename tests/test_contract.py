"""What torch.optim promises, for each of the eight optimizers."""

import inspect
import linecache
import subprocess
import sys
import textwrap
import warnings
import weakref
from functools import partial

import pytest
import torch
from family import (
    NAMES,
    OPTIMIZERS,
    each_cell,
    each_device,
    each_optimizer,
    equal,
    everything,
    parameters,
    tensors,
    train,
)
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import mvngrad


def test_all_eight_share_one_signature():
    assert len({str(inspect.signature(make)) for make in OPTIMIZERS}) == 1
    signature = inspect.signature(mvngrad.MVNGradW)
    positional = [p.name for p in signature.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert positional == ["params", "lr", "betas", "eps"]


def test_a_positional_decay_is_refused_and_a_large_eps_s_warns():
    """torch.optim.AdamW has its weight_decay in the fifth position."""
    with pytest.raises(TypeError, match="positional arguments"):
        mvngrad.MVNGradW(parameters((3,)), 1e-3, (0.9, 0.999), 1e-8, 0.1)
    with pytest.warns(UserWarning, match=r"eps_s=0\.1 keeps sqrt\(s\) above 10, .* did you mean weight_decay=0\.1"):
        mvngrad.MVNGradW(parameters((3,)), eps_s=0.1)


class Subclass(mvngrad.AdaBelief):
    pass


def test_the_warning_about_eps_s_names_the_line_of_the_caller():
    model = torch.nn.Linear(2, 1)
    optimizer = mvngrad.MVNGradW(model.parameters())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["eps_s"] = 0.1
    named = {**saved, "param_groups": [{**saved["param_groups"][0], "params": ["weight", "bias"]}]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mvngrad.MVNGradW(parameters((3,)), eps_s=0.1)  # route 0
        mvngrad.MVNGrad([{"params": parameters((3,)), "eps_s": 0.1}])  # route 1
        Subclass(parameters((3,)), eps_s=0.1)  # route 2
        optimizer.add_param_group({"params": parameters((3,)), "eps_s": 0.1})  # route 3
        del optimizer.param_groups[1]
        optimizer.load_state_dict(saved)  # route 4
        set_optimizer_state_dict(model, optimizer, named)  # route 5
    caught = [warning for warning in caught if "eps_s=0.1" in str(warning.message)]
    assert [warning.filename for warning in caught] == [__file__] * len(caught)
    lines = [linecache.getline(warning.filename, warning.lineno).strip() for warning in caught]
    assert [*dict.fromkeys(int(line[-1]) for line in lines)] == [*range(6)]


def test_public_names_are_attributes_of_mvngrad_and_optim():
    assert mvngrad.optim.MVNGradW is mvngrad.MVNGradW
    assert mvngrad.diagnostics.Monitor.__name__ == "Monitor"
    assert {"MVNGradW", "convert_state_dict", "diagnostics", "optim"} <= set(dir(mvngrad))
    assert all(hasattr(mvngrad.optim, name) for name in mvngrad.__all__)


@each_optimizer
def test_defaults_are_those_documented(make):
    optimizer = make(parameters((3,)))
    assert optimizer.defaults["weight_decay"] == (1e-2 if make.__name__.endswith("W") else 0)
    assert optimizer.defaults["lr"] == 1e-3
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert optimizer.defaults.get("eps_s") == (1e-16 if make.rule.centered else None)


WAYS = [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True, "foreach": False}]


@each_device
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
def test_decay_decoupled_from_lr_follows_the_schedule_and_not_the_rate(device, options, tensor_lr):
    """Gradients of zero: only decay moves x. Halving lr halves it; another peak rate leaves it alone."""
    if device == "cpu" and "capturable" in options:
        pytest.skip("capturable is for accelerators")
    for peak in (0.5, 1e-3):
        lr = torch.tensor(peak, device=device) if tensor_lr else peak
        params = parameters((5,), (300,), device=device)
        before = [p.detach().clone() for p in params]
        optimizer = mvngrad.MVNGradW(params, lr=lr, weight_decay=0.1, decouple_lr=True, **options)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.0][step])
        for _ in range(2):
            for p in params:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            schedule.step()
        for p, old in zip(params, before, strict=True):
            torch.testing.assert_close(p.detach(), old * 0.9 * 0.95, rtol=1e-6, atol=0)


def test_decay_decoupled_from_lr_of_groups_checkpoints_and_refusals():
    x, y = parameters((3,), (4,))
    with pytest.raises(ValueError, match=r"MVNGrad: decouple_lr=True .* use MVNGradW"):
        mvngrad.MVNGrad([x], decouple_lr=True)
    with pytest.raises(ValueError, match=r"max_lr=0\.0 is invalid; .* name it in the group"):
        mvngrad.MVNGradW([x], lr=0.0, decouple_lr=True)
    with pytest.raises(ValueError, match=r"a group whose decouple_lr=True is .* must name its weight_decay"):
        mvngrad.MVNGradW([{"params": [x], "decouple_lr": True}])
    optimizer = mvngrad.MVNGradW(
        [{"params": [x], "lr": 0.1}, {"params": [y], "lr": 0.0, "max_lr": 0.2, "weight_decay": 0.3}], decouple_lr=True
    )
    assert [(group["max_lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 1e-5), (0.2, 0.3)]
    train(optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.05  # as a schedule does
    resumed = mvngrad.MVNGradW([{"params": [x]}, {"params": [y]}])
    resumed.load_state_dict(optimizer.state_dict())
    assert [group["max_lr"] for group in resumed.param_groups] == [0.1, 0.2]
    assert all(group["decouple_lr"] for group in resumed.param_groups)
    old = optimizer.state_dict()
    for group in old["param_groups"]:  # of a version that did not have the option
        del group["decouple_lr"], group["max_lr"]
    optimizer.load_state_dict(old)
    assert not any(group["decouple_lr"] for group in optimizer.param_groups)


@each_optimizer
def test_cleared_state_restarts_at_step_one(make):
    optimizer = make(parameters((3,)))
    (weight,) = optimizer.param_groups[0]["params"]
    train(optimizer, 3)
    optimizer.state[weight].clear()
    train(optimizer, 2)
    assert optimizer.state[weight]["step"] == 2
    assert len(optimizer.state[weight]) == 1 + len(make.rule.state_names)


@each_optimizer
def test_other_entries_of_state_are_left_unchanged(make):
    """Such as those of a hook; also when the inputs of a step must be collected again."""
    optimizer = make(parameters((3,), (2,)))
    first, second = optimizer.param_groups[0]["params"]
    train(optimizer, 1)
    optimizer.state[first]["mine"] = 7
    train(optimizer, 1)
    second.requires_grad_(False).grad = None
    train(optimizer, 1)
    assert (optimizer.state[first]["mine"], optimizer.state[first]["step"]) == (7, 3)


@each_cell
def test_8_bit_parameters_are_refused_with_their_dtype(make):
    weight = torch.nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=r"16 bits and more; here is one of torch\.float8_e4m3fn"):
        make([weight]).step()


@each_cell
def test_state_of_meta_parameters_is_loaded(make):
    weight = torch.nn.Parameter(torch.empty(3, 2, device="meta"))
    optimizer = make([weight])
    weight.grad = torch.empty_like(weight)
    optimizer.step()
    make([weight]).load_state_dict(optimizer.state_dict())


@each_optimizer
def test_state_is_only_what_the_cell_needs(make):
    optimizer = make(parameters((3,)))
    train(optimizer, 1)
    expected = {"Adam": "mv", "AdaBelief": "ms", "LaProp": "vu", "MVNGrad": "msu"}[make.__name__.removesuffix("W")]
    (state,) = optimizer.state.values()
    assert set(state) == {"step", *expected}


@each_cell
def test_groups_step_as_separate_optimizers_would(make):
    settings = [{"lr": 1e-2, "betas": (0.8, 0.9)}, {"lr": 1e-1, "weight_decay": 0.3, "eps": 1e-3, "maximize": True}]
    a, b = parameters((4, 3), (5,))
    together = make([{"params": [a], **settings[0]}, {"params": [b], **settings[1]}])
    train(together, 5)
    apart = [make([p], **setting) for p, setting in zip(parameters((4, 3), (5,)), settings, strict=True)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for optimizer in apart:
            (p,) = optimizer.param_groups[0]["params"]
            p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
    first, second = map(everything, apart)
    assert equal(everything(together), [first[0], second[0], *first[1:], *second[1:]])


@each_cell
@pytest.mark.parametrize("foreach", [False, True])
def test_a_parameter_added_or_unfrozen_late_starts_at_step_one(make, foreach):
    old, added, frozen = parameters((4,), (4,), (4,))
    frozen.requires_grad_(False)
    optimizer = make([old, frozen], foreach=foreach)
    train(optimizer, 7)
    assert frozen not in optimizer.state
    frozen.requires_grad_(True)
    optimizer.add_param_group({"params": [added], "lr": 1e-2})
    train(optimizer, 3, seed=2)
    assert [optimizer.state[p]["step"].item() for p in (old, added, frozen)] == [10, 3, 3]

    # A fresh optimizer that sees only the last three gradients agrees.
    fresh_old, fresh_added, fresh_frozen = parameters((4,), (4,), (4,))
    fresh = make([{"params": [fresh_old, fresh_frozen]}, {"params": [fresh_added], "lr": 1e-2}])
    train(fresh, 3, seed=2)
    assert torch.equal(frozen, fresh_frozen)
    assert torch.equal(added, fresh_added)


@each_cell
@pytest.mark.parametrize("cast", [0, 1])
def test_foreach_steps_parameters_of_one_dtype_with_state_of_two(make, cast, monkeypatch):
    """A parameter that is cast to float64 between steps keeps its float32 state; another has float64 state."""
    backends = {False: "eager", True: "foreach"}  # also on a CPU
    monkeypatch.setattr("mvngrad.optim.optimizer.choose_backend", lambda group: backends[group["foreach"]])
    results = []
    for foreach in (False, True):
        params = parameters((4,), (4,))
        params[1 - cast].data = params[1 - cast].data.double()
        optimizer = make(params, foreach=foreach)
        train(optimizer, 2)
        params[cast].grad, params[cast].data = None, params[cast].data.double()
        train(optimizer, 3, seed=2)
        averages = [value for p in params for name, value in optimizer.state[p].items() if name != "step"]
        assert {value.dtype for value in averages} == {torch.float32, torch.float64}
        results.append(everything(optimizer))
    assert equal(*results)


@each_optimizer
def test_gradients_are_never_modified(make):
    params = parameters((4, 3), (), (0,))
    optimizer = make(params, weight_decay=0.1, maximize=True)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        before = [p.grad.clone() for p in params]
        held = [p.grad for p in params]
        optimizer.step()
        assert all(p.grad is g for p, g in zip(params, held, strict=True))
        assert equal([p.grad for p in params], before)


@each_optimizer
def test_closure_runs_with_grad_enabled_and_step_returns_its_loss(make):
    (x,) = parameters((3,))
    optimizer = make([x], lr=0.1)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss

    before = x.square().sum().item()
    with torch.no_grad():
        first = optimizer.step(closure)
        assert not torch.is_grad_enabled()
    assert first.item() == before
    for _ in range(50):
        last = optimizer.step(closure)
    assert last < 0.1 * first


@each_cell
def test_zero_grad_clears_gradients_and_a_step_without_gradients_changes_nothing(make):
    (x,) = parameters((3,))
    optimizer = make([x])
    x.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(x.grad, torch.zeros(3))
    optimizer.zero_grad()
    assert x.grad is None
    before = everything(optimizer)
    optimizer.step()
    assert equal(everything(optimizer), before)


@each_cell
def test_the_optimizer_keeps_no_gradient_alive(make):
    (x,) = parameters((3,))
    optimizer = make([x])
    for _ in range(2):
        x.grad = torch.ones(3)
        gradient = weakref.ref(x.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert gradient() is None


@each_cell
def test_hooks_fire_around_a_step(make):
    (x,) = parameters((3,))
    optimizer = make([x])
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("global"))
    try:
        train(optimizer, 1)
    finally:
        everywhere.remove()
    assert seen == ["before", "after", "global"]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11
def test_a_hook_sees_the_arguments_of_a_step_and_a_profiler_its_name():
    (x,) = parameters((3,))
    optimizer, seen = mvngrad.MVNGrad([x]), []
    optimizer.register_step_post_hook(lambda *arguments: seen.append(arguments))
    train(optimizer, 1)

    def closure():
        return x.sum()

    optimizer.step(closure=closure)
    assert seen == [(optimizer, (optimizer,), {}), (optimizer, (optimizer,), {"closure": closure})]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        train(optimizer, 1)
    assert "Optimizer.step#MVNGrad.step" in {event.key for event in trace.key_averages()}
    assert len(seen) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("capturable", [False, True])
def test_the_dtype_of_lr_does_not_lose_weight_decay(capturable, dtype):
    """1 - 0.001 is 1 in bfloat16."""
    (weight,) = parameters((3,))
    before = weight.detach().clone()
    lr = torch.tensor(0.1, dtype=dtype)
    optimizer = mvngrad.MVNGradW([weight], lr=lr, weight_decay=0.01, capturable=capturable, fused=False)
    for _ in range(100):
        weight.grad = torch.zeros(3)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), before * (1 - lr.item() * 0.01) ** 100)


@each_optimizer
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
def test_tensor_lr_equals_float_lr(make, foreach, capturable):
    results = []
    for lr in (2**-7, torch.tensor(2**-7), torch.tensor([2**-7], dtype=torch.float64)):
        params = parameters((4, 3), (5,), (), dtype=torch.float64)
        optimizer = make(params, lr=lr, weight_decay=0.1, foreach=foreach, capturable=capturable)
        train(optimizer, 5)
        results.append(params)
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-12, atol=1e-12)


@each_cell
def test_maximize_is_the_gradient_negated(make):
    (a,), (b,) = parameters((4,)), parameters((4,))
    up, down = make([a], maximize=True, weight_decay=0.1), make([b], weight_decay=0.1)
    for t in range(5):
        a.grad = torch.randn(4, generator=torch.Generator().manual_seed(t))
        b.grad = -a.grad
        up.step()
        down.step()
    assert torch.equal(a, b)


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_have_float32_state(make, dtype):
    optimizer = make(parameters((4, 3), dtype=dtype))
    train(optimizer, 3)
    (state,) = optimizer.state.values()
    assert {state[name].dtype for name in make.rule.state_names} == {torch.float32}
    assert optimizer.param_groups[0]["params"][0].dtype == dtype


@each_cell
def test_state_has_the_strides_of_its_parameter(make):
    (x,) = parameters((2, 3, 4, 5))
    x.data = x.data.to(memory_format=torch.channels_last)
    optimizer = make([x])
    train(optimizer, 1)
    assert {optimizer.state[x][name].stride() for name in make.rule.state_names} == {x.stride()}


@each_device
@pytest.mark.parametrize("path", ["foreach", "capturable", "fused", "kernel"])
def test_step_counts_are_float64_if_that_is_the_default_dtype(path, device, request):
    """Also on the kernel's path, where torch.optim has float32, and after loading a state_dict."""
    request.getfixturevalue("by_kernel" if path == "kernel" else "cpp_compiler")
    options = {} if path == "kernel" else {path: True}
    torch.set_default_dtype(torch.float64)
    try:
        for dtype in (torch.float32, torch.float64):
            params = parameters((3,), (0,), dtype=dtype, device=device)
            optimizer, loaded = mvngrad.MVNGrad(params, **options), mvngrad.MVNGrad(params, **options)
            train(optimizer, 2)
            loaded.load_state_dict(optimizer.state_dict())
            train(loaded, 1)
            for each, count in ((optimizer, 2), (loaded, 3)):
                assert [state["step"].dtype for state in each.state.values()] == [torch.float64] * 2
                assert [state["step"].item() for state in each.state.values()] == [count] * 2
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{"state_dtype": torch.bfloat16}, {"state_dtype": "int8"}], ids=str)
def test_rounding_does_not_depend_on_the_default_dtype(options, dtype):
    """In 16 bits step counts are rounded: hundreds of steps in a row would draw the same random bits."""
    runs = []
    for default in (torch.float32, dtype):
        params = parameters((300,))
        optimizer = mvngrad.MVNGrad(params, rounding_seed=1, **options)
        train(optimizer, 1)
        optimizer.state[params[0]]["step"].fill_(70_001)
        torch.set_default_dtype(default)
        try:
            train(optimizer, 3)
        finally:
            torch.set_default_dtype(torch.float32)
        runs.append([params[0].detach(), *(optimizer.state[params[0]][name].float() for name in "msu")])
    assert equal(*runs)


@each_cell
def test_complex_parameters_are_pairs_of_real_ones(make):
    (real,) = parameters((4, 2))
    complex_ = torch.nn.Parameter(torch.view_as_complex(real.detach().clone()))
    options = {"lr": 1e-2, "weight_decay": 0.1}
    pair, single = make([real], **options), make([complex_], **options)
    for _ in range(5):
        real.grad = torch.randn_like(real)
        complex_.grad = torch.view_as_complex(real.grad.clone())
        pair.step()
        single.step()
    assert torch.equal(torch.view_as_real(complex_.detach()), real)


@pytest.mark.parametrize("make", [*OPTIMIZERS, partial(mvngrad.MVNGrad, lean=True)], ids=[*NAMES, "lean"])
def test_differentiable_step_gives_the_meta_gradient(make):
    """The derivative of a loss after four steps with respect to the learning rate, against finite differences."""

    def loss_after(lr):
        x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True).clone()
        optimizer = make([x], lr=lr, differentiable=True, weight_decay=0.1)
        for t in range(4):
            (x.grad,) = torch.autograd.grad((x.clone() ** 4).sum() * (t + 1), x, create_graph=True)
            optimizer.step()
        return x.square().sum()

    lr = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    (meta,) = torch.autograd.grad(loss_after(lr), lr)
    h = 1e-6
    numeric = (loss_after(0.05 + h) - loss_after(0.05 - h)) / (2 * h)
    assert meta != 0
    torch.testing.assert_close(meta, numeric.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"fused": True}, {"foreach": True}, {"state_dtype": "int8"}, {"state_dtype": torch.bfloat16}],
    ids=str,
)
def test_a_step_does_not_depend_on_the_default_device(options):
    """Tensors that belong on the host are created there."""
    runs = []
    for device in ("cpu", "meta"):
        params = parameters((5,), (300, 300))
        optimizer = mvngrad.MVNGrad(params, **options)
        for t in range(3):
            for param, grad in zip(params, tensors((5,), (300, 300), seed=t), strict=True):
                param.grad = grad
            with torch.device(device):
                optimizer.step()
        runs.append(everything(optimizer))
    assert equal(*runs)


@each_cell
def test_nan_gradients_behave_as_in_torch(make):
    """A NaN stays in the state of its coordinate; other coordinates are not affected."""
    for optimizer_class in (make, torch.optim.Adam):
        (x,) = parameters((3,))
        optimizer = optimizer_class([x])
        for g in ([1.0, float("nan"), 1.0], [1.0, 1.0, 1.0]):
            x.grad = torch.tensor(g)
            optimizer.step()
        assert torch.isnan(x).tolist() == [False, True, False]


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("fused", [None, True])
@each_cell
def test_a_step_that_grad_scaler_skips_changes_nothing(make, fused):
    (x,) = parameters((3,))
    optimizer = make([x], lr=0.1, fused=fused)
    assert optimizer._step_supports_amp_scaling == bool(fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    factors = torch.tensor([1.0, -2.0, 3.0])
    for overflow in (1.0, float("inf"), 1.0):
        before = everything(optimizer)
        optimizer.zero_grad()
        scaler.scale((x * factors * overflow).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if overflow != 1:
            assert equal(everything(optimizer), before)
    (twin,) = parameters((3,))
    unscaled = make([twin], lr=0.1, fused=fused)
    for _ in range(2):
        twin.grad = factors.clone()
        unscaled.step()
    assert equal(everything(optimizer), everything(unscaled))


@each_cell
def test_state_replaced_by_the_user_is_used(make):
    """The inputs cached between steps are dropped when state changes."""
    (x,) = parameters((3,))
    optimizer = make([x], lr=0.1)
    train(optimizer, 2)
    name = make.rule.state_names[0]
    optimizer.state[x][name] = torch.full((3,), 5.0)
    x.grad = torch.zeros(3)
    optimizer.step()
    assert (optimizer.state[x][name] > 4).all()
    optimizer.state.clear()
    x.grad = torch.zeros(3)
    optimizer.step()
    assert optimizer.state[x]["step"] == 1


@each_cell
def test_named_parameters_are_accepted(make):
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    train(optimizer, 1)


SCHEDULERS = {
    lr_scheduler.LambdaLR: lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    lr_scheduler.MultiplicativeLR: lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    lr_scheduler.StepLR: lambda o: lr_scheduler.StepLR(o, 2),
    lr_scheduler.MultiStepLR: lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    lr_scheduler.ConstantLR: lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    lr_scheduler.LinearLR: lambda o: lr_scheduler.LinearLR(o, total_iters=5),
    lr_scheduler.ExponentialLR: lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lr_scheduler.PolynomialLR: lambda o: lr_scheduler.PolynomialLR(o, 8),
    lr_scheduler.CosineAnnealingLR: lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    lr_scheduler.CosineAnnealingWarmRestarts: lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lr_scheduler.CyclicLR: lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=3),
    lr_scheduler.OneCycleLR: lambda o: lr_scheduler.OneCycleLR(o, 1e-1, total_steps=10),
    lr_scheduler.ReduceLROnPlateau: lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    lr_scheduler.ChainedScheduler: lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    lr_scheduler.SequentialLR: lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    torch.optim.swa_utils.SWALR: lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


def test_every_scheduler_of_torch_is_tested():
    shipped = {
        value
        for value in vars(lr_scheduler).values()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert shipped - {lr_scheduler.LRScheduler, lr_scheduler._LRScheduler} <= SCHEDULERS.keys()


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=[cls.__name__ for cls in SCHEDULERS])
@each_cell
def test_schedulers_drive_lr_and_betas_as_they_drive_torch(make, scheduler, tensor_lr):
    traces, ends = [], []
    for cls in (make, torch.optim.Adam):
        params = parameters((4, 3))
        optimizer = cls(params, lr=torch.tensor(1e-2) if tensor_lr else 1e-2)
        schedule = scheduler(optimizer)
        trace = []
        for _ in range(8):
            train(optimizer, 1)
            schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
            group = optimizer.param_groups[0]
            trace.append((float(group["lr"]), group["betas"]))
        traces.append(trace)
        ends.append(params[0].detach())
    assert traces[0] == traces[1]
    if make is mvngrad.Adam and tensor_lr:  # torch divides a tensor lr in float32, we in float64
        torch.testing.assert_close(*ends)
    elif make is mvngrad.Adam:
        assert torch.equal(*ends)


@pytest.mark.parametrize("make", [m for m in OPTIMIZERS if m.rule.centered], ids=lambda m: m.__name__)
def test_repr_shows_the_floor(make):
    optimizer = make([{"params": parameters((3,))}, {"params": parameters((3,)), "eps_s": 1e-8}])
    assert "smallest divisor, sqrt(eps_s/(1-beta2)) + eps: 3.3e-07, 0.0032" in repr(optimizer)
    assert "+ eps: 0.001\n" in repr(mvngrad.MVNGrad(parameters((3,)), eps=1e-3))
    assert "+ eps: 0.001\n" in repr(make(parameters((3,)), eps=torch.tensor([1e-3]), differentiable=True))
    assert "divisor" not in repr(mvngrad.Adam(parameters((3,))))


def test_an_empty_group_needs_no_triton():
    script = """
        import sys
        sys.modules["triton"] = None
        import torch, mvngrad
        param = torch.nn.Parameter(torch.ones(3))
        param.grad = torch.ones(3)
        mvngrad.MVNGradW([{"params": [param]}, {"params": []}]).step()
        assert param[0] < 1
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


@pytest.mark.parametrize("name", ["weight_decay", "eps"])
def test_options_that_require_gradients_are_differentiated_without_a_warning(name):
    option = torch.tensor(0.1, requires_grad=True)
    param = torch.ones(3, requires_grad=True)
    x = param.clone()
    optimizer = mvngrad.MVNGradW([x], differentiable=True, **{name: option})
    x.grad = torch.full((3,), 0.5)
    optimizer.step()
    (gradient,) = torch.autograd.grad(x.sum(), option)
    assert gradient.isfinite()
    assert gradient != 0
