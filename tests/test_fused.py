"""The fused backends beyond their arithmetic: addresses and strides, AMP, sizes, compilations, errors."""

import math
import weakref
from itertools import chain

import numpy as np
import pytest
import torch
from family import each_cell, each_device, each_rule, equal, everything, new_state, parameters, step, tensors, train

import mvngrad
from mvngrad.optim.backends import choose_backend
from mvngrad.rule import MVNGRAD, Hyper

BLOCK = 1024
ignore_overflow = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
"""Triton's interpreter computes with NumPy, which warns where a GPU does not."""


def make_inputs(rule, *shapes, device="cpu", **options):
    params = tensors(*shapes, device=device, **options)
    return params, new_state(rule, torch.float32, params), [torch.zeros((), device=device) for _ in params]


def test_every_block_maps_to_its_tensor_and_position(triton):
    from mvngrad.optim.backends.table import map_blocks

    owners, positions = map_blocks(torch.tensor([1, BLOCK, BLOCK + 1, 5 * BLOCK - 1]), BLOCK)
    assert owners.tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 3]
    assert positions.tolist() == [0, 0, 0, 1, 0, 1, 2, 3, 4]


def test_blocks_cover_a_tensor_of_more_than_2_to_the_31_elements(triton):
    from mvngrad.optim.backends.table import map_blocks

    size = 2**31 + 5
    _, positions = map_blocks(torch.tensor([size]), BLOCK)
    last = positions[-1].to(torch.int64) * BLOCK  # as the kernel computes it
    assert last < size <= last + BLOCK
    assert last + BLOCK > torch.iinfo(torch.int32).max


@each_device
@each_rule
def test_overflow_changes_nothing_and_the_scale_is_divided_out(rule, device, kernel):
    hyper = Hyper(lr=1e-2, weight_decay=0.1, decoupled=True)
    params, state, steps = make_inputs(rule, (33, 7), (5,), (), device=device)
    twins, twin_state, twin_steps = make_inputs(rule, (33, 7), (5,), (), device=device)
    scale = torch.tensor(4.0, device=device)
    for t, overflow in enumerate([0.0, 1.0, 0.0, 1.0]):
        g = tensors((33, 7), (5,), (), device=device, seed=t + 1)
        ours = [*params, *chain.from_iterable(state.values()), *steps]
        before, found_inf = [x.clone() for x in ours], torch.tensor(overflow, device=device)
        step(kernel, rule, hyper, params, [4 * x for x in g], state, steps, scale, found_inf)
        if overflow:
            assert equal(ours, before)
        else:
            step(kernel, rule, hyper, twins, g, twin_state, twin_steps)
    assert equal(params, twins)
    assert equal(steps, twin_steps)


@each_device
def test_gradients_at_new_addresses_are_read(device, kernel_options):
    results = []
    for moves in (False, True):
        params = parameters((40,), (3, 5), device=device)
        optimizer = mvngrad.MVNGrad(params, lr=1e-2, **kernel_options)
        for p in params:
            p.grad = torch.zeros_like(p)
        old = []
        for t in range(1, 5):
            for p, new in zip(params, tensors((40,), (3, 5), device=device, seed=t), strict=True):
                if moves:
                    old.append(p.grad)  # kept alive, so that new gradients have new addresses
                    p.grad = new
                else:
                    p.grad.copy_(new)
            optimizer.step()
        results.append([p.detach() for p in params])
    assert equal(*results)


@each_device
def test_gradients_may_lose_their_alignment(device, by_kernel):
    """A kernel that loads 16 bytes at once must not read them."""
    results = []
    for fused in (None, False):
        (x,) = parameters((2000,), device=device)
        optimizer = mvngrad.MVNGrad([x], lr=0.1, fused=fused, foreach=None if fused is None else False)
        for t, offset in enumerate([0, 0, 1, 1, 4, 3, 0]):
            x.grad = tensors((2000 + offset,), device=device, seed=t)[0][offset:]
            optimizer.step()
            if fused is None:
                assert optimizer._inputs[0].plan[0][0].aligned == (offset % 4 == 0)
        results.append([x.detach()])
    torch.testing.assert_close(*results)


@each_device
def test_changed_options_reach_a_launch_whose_addresses_are_unchanged(device, kernel_options):
    changes = [
        {}, {}, {"lr": 0.2}, {"betas": (0.8, 0.9)}, {"eps": 0.1}, {"eps_s": 0.1}, {"weight_decay": 0.3},
        {"z_clip": 0.5}, {"beta_mean": 0.3}, {"maximize": True}, {"lr": torch.tensor(0.1, device=device)}, {"lr": 0.05},
    ]  # fmt: skip
    results = []
    for options in (kernel_options, {"fused": False, "foreach": False}):
        params = parameters((40,), (3, 5), device=device)
        optimizer = mvngrad.MVNGrad(params, lr=0.1, **options)
        for p in params:
            p.grad = torch.zeros_like(p)
        trajectory = []
        for t, change in enumerate(changes):
            optimizer.param_groups[0].update(change)
            for p, new in zip(params, tensors((40,), (3, 5), device=device, seed=t), strict=True):
                p.grad.copy_(new)
            optimizer.step()
            trajectory += [p.detach().clone() for p in params]
        results.append(trajectory)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@each_device
@pytest.mark.parametrize("change", ["strides", "dtype"])
def test_a_gradient_may_change_strides_or_dtype_at_the_same_address(device, change, kernel, kernel_options):
    """As for gradients set by the user when the allocator reuses an address."""
    memory = torch.randn(128, device=device, dtype=torch.bfloat16).view(torch.float32)  # valid numbers in both dtypes
    results = []
    for options, backend in ((kernel_options, kernel), ({"fused": False, "foreach": False}, "eager")):
        weight = torch.nn.Parameter(torch.zeros(8, 8, device=device))
        weight.grad_dtype = None
        optimizer = mvngrad.MVNGrad([weight], lr=0.1, **options)
        assert choose_backend(optimizer.param_groups[0]) == backend
        for t in range(4):
            square = memory.view(8, 8)
            other = square.T if change == "strides" else memory.view(torch.bfloat16)[:64].view(8, 8)
            weight.grad = other if t % 2 else square
            assert weight.grad.data_ptr() == memory.data_ptr()
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@each_device
def test_copied_gradients_are_not_kept_alive(device, kernel_options):
    weight = torch.nn.Parameter(torch.zeros(8, 8, device=device))
    optimizer = mvngrad.MVNGrad([weight], **kernel_options)
    for _ in range(2):
        weight.grad = torch.ones(8, 8, device=device).T
        gone = weakref.ref(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert gone() is None


@each_device
@ignore_overflow
@pytest.mark.parametrize(("make", "beta1", "mean"), [(mvngrad.Adam, 0.0, 1e-4), (mvngrad.AdaBelief, 1e-6, 0.0301)])
def test_with_a_small_beta1_m_is_exact_after_a_large_gradient(make, beta1, mean, device, kernel_options):
    weight = torch.nn.Parameter(torch.zeros(3, device=device))
    optimizer = make([weight], betas=(beta1, 0.5), **kernel_options)
    for size in (3e4, 1e-4):
        weight.grad = torch.full((3,), size, device=device)
        optimizer.step()
    m = optimizer.state[weight]["m"]
    torch.testing.assert_close(m, torch.full_like(m, mean), rtol=1e-3, atol=0)


@each_device
@ignore_overflow
def test_z_clip_propagates_nan_as_the_rule_does(device, kernel_options):
    results = []
    for options in (kernel_options, {"fused": False}):
        weight = torch.nn.Parameter(torch.zeros(1, device=device))
        optimizer = mvngrad.MVNGrad([weight], lr=0.1, lean=True, z_clip=1.0, **options)
        for gradient in (1.0, 1e22, 1.0, 2.0):
            weight.grad = torch.full((1,), gradient, device=device)
            optimizer.step()
        results.append(weight.item())
    assert all(map(math.isnan, results)), results


@each_device
def test_integers_and_numpy_numbers_step_as_floats_do(device, kernel):
    results = []
    for number, zero in ((1.0, 0.0), (1, 0), (np.float32(1), np.float32(0))):
        params, state, steps = make_inputs(MVNGRAD, (40,), device=device)
        grads = tensors((40,), device=device, seed=1)
        hyper = Hyper(lr=number, eps=number, eps_s=zero, weight_decay=number, z_clip=number)
        step(kernel, MVNGRAD, hyper, params, grads, state, steps)
        results.append(params)
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


@pytest.mark.usefixtures("cpp_compiler")
def test_fused_on_the_cpu_takes_a_tensor_lr_and_capturable():
    runs = []
    for lr in (0.01, torch.tensor([0.01], dtype=torch.float64)):
        (x,) = parameters((8,))
        train(mvngrad.MVNGrad([x], lr=lr, capturable=True, fused=True), 3)
        runs.append([x.detach()])
    assert equal(*runs)


@each_device
def test_thousands_of_tiny_tensors_are_all_stepped(device, kernel):
    shapes = [(1 + i % 3,) for i in range(2000 if device == "cuda" else 200)]
    params, state, steps = make_inputs(MVNGRAD, *shapes, device=device)
    expected = [p.clone() for p in params]
    grads = tensors(*shapes, device=device, seed=1)
    step(kernel, MVNGRAD, Hyper(lr=0.09, eps=1e-12), params, grads, state, steps)
    for p, x, g in zip(params, expected, grads, strict=True):
        torch.testing.assert_close(p, x - 0.1 * g.sign())  # the first step is lr/beta1


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@each_cell
def test_fused_on_the_cpu_equals_eager(make, dtype):
    runs = []
    for fused in (False, True):
        params = parameters((33, 7), (5,), (), (0,), (1,), dtype=dtype)
        params.append(torch.nn.Parameter(params[0].detach().clone().t()))
        params.append(torch.nn.Parameter(torch.ones(8, 8, dtype=dtype)[::2, 1:]))
        optimizer = make(params, lr=1e-2, weight_decay=0.1, fused=fused)
        train(optimizer, 10)
        runs.append(everything(optimizer))
    coarse = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(*runs, rtol=coarse, atol=coarse)


@pytest.mark.usefixtures("cpp_compiler")
def test_on_the_cpu_a_parameter_may_change_strides_at_the_same_address():
    results = []
    for fused in (True, False):
        weight = torch.nn.Parameter(torch.arange(9.0).view(3, 3))
        optimizer = mvngrad.MVNGrad([weight], lr=0.1, fused=fused)
        for t in range(2):
            weight.grad = torch.arange(9.0).view(3, 3) - t
            optimizer.step()
            weight.data = weight.data.T
        results.append(weight.detach())
    torch.testing.assert_close(*results)


@pytest.mark.usefixtures("cpp_compiler")
def test_autograd_sees_that_fused_changed_a_parameter_in_place():
    (x,) = parameters((8,))
    loss = x.square().sum()
    optimizer = mvngrad.MVNGrad([x], fused=True)
    train(optimizer, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_device
@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_overflow_counted_several_times_does_not_change_the_step_of_an_empty_parameter(shape, device, kernel):
    """ShardedGradScaler adds up the flags of all processes, in a tensor of one dimension."""
    params, state, steps = make_inputs(MVNGRAD, (5,), (0,), device=device)
    for overflow in (0.0, 2.0, 0.0):
        grads, found_inf = tensors((5,), (0,), device=device), torch.full(shape, overflow, device=device)
        step(kernel, MVNGRAD, Hyper(), params, grads, state, steps, None, found_inf)
    assert [count.item() for count in steps] == [2.0, 2.0]
