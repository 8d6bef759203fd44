"""The inputs of a step are current after everything that users do between steps, and freed when dropped."""

import copy
import sys
import warnings
import weakref

import pytest
import torch
from family import each_device, equal, everything, parameters, tensors, train
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

import mvngrad
from mvngrad.optim.backends import choose_backend


@pytest.fixture(params=["eager", "cpu", "cuda"])
def options(request, device):
    """Options that select each backend; on a CPU the kernel runs in Triton's interpreter."""
    if request.param == "cpu":
        if device != "cpu":
            pytest.skip("this backend runs on the CPU only")
        request.getfixturevalue("cpp_compiler")
        return {"fused": True}
    if request.param == "cuda":
        request.getfixturevalue("by_kernel")
        return {}
    return {"fused": False, "foreach": False}


def clone_storage(optimizer, param):
    """Move the state to other memory, as the common recipe `optimizer_to` does."""
    for value in optimizer.state[param].values():
        value.data = value.data.clone()


def replace_tensors(optimizer, param):
    optimizer.state[param] = {name: value.clone() for name, value in optimizer.state[param].items()}


def reorder(optimizer, param):
    state = optimizer.state.pop(param)
    optimizer.state[param] = dict(reversed(state.items()))


def swap_parameter(optimizer, param):
    param.data = param.data.clone()


def transpose_state(optimizer, param):
    for name, value in optimizer.state[param].items():
        if value.dim() == 2:
            optimizer.state[param][name] = value.t().contiguous().t()


def pad_state(optimizer, param):
    """State with gaps in memory."""
    for name, value in optimizer.state[param].items():
        if name != "step" and value.dim():
            optimizer.state[param][name] = torch.cat([value, value], -1)[..., : value.shape[-1]]


def set_step_to_a_number(optimizer, param):
    optimizer.state[param]["step"] = int(optimizer.state[param]["step"])


CHANGES = [
    clone_storage, replace_tensors, reorder, swap_parameter, transpose_state, pad_state, set_step_to_a_number,
]  # fmt: skip


@each_device
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_step_uses_current_state_and_parameters_after(change, device, options):
    optimizers = []
    for changes in (False, True):
        params = parameters((5, 3), (4,), (), device=device)
        optimizer = mvngrad.MVNGradW(params, lr=1e-2, **options)
        for t in range(4):
            train(optimizer, 1, seed=t)
            if changes and t < 3:
                for param in params:
                    change(optimizer, param)
        optimizers.append(optimizer)
    plain, changed = (
        [(p.detach(), *(optimizer.state[p][name] for name in ("step", "m", "s", "u"))) for p in params]
        for optimizer in optimizers
        for params in [optimizer.param_groups[0]["params"]]
    )
    torch.testing.assert_close(changed, plain, rtol=1e-6, atol=1e-7)
    assert all(step == 4 for _, step, *_ in changed)


@each_device
def test_parameters_may_exchange_their_state(device, options):
    """The state has the same tensors in the same order as before, under other keys."""
    results = []
    for by_key in (True, False):
        params = parameters((5,), (5,), device=device)
        optimizer = mvngrad.MVNGrad(params, lr=1e-2, **options)
        for t in range(4):
            train(optimizer, 1, seed=t)
            states = list(optimizer.state.values())
            if by_key:
                optimizer.state.clear()
                optimizer.state.update(zip(params if t % 2 else reversed(params), states, strict=True))
            else:
                for name, left in states[0].items():
                    right, copy_of_left = states[1][name], left.clone()
                    left.copy_(right)
                    right.copy_(copy_of_left)
        results.append(everything(optimizer))
    torch.testing.assert_close(*results)


@each_device
def test_gradients_with_a_negative_or_conjugate_bit_are_resolved(device, options):
    results = []
    for resolves in (False, True):
        b = torch.nn.Parameter(torch.full((3,), 0.5, device=device))
        c = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], device=device))
        optimizer = mvngrad.MVNGrad([b, c], lr=0.1, **options)
        for _ in range(3):
            b.grad = torch._neg_view(-b.detach())  # as backward through conj() leaves it
            c.grad = (c.detach() * (1 + 1j)).conj()
            assert b.grad.is_neg()
            assert c.grad.is_conj()
            if resolves:
                b.grad, c.grad = b.grad.resolve_neg(), c.grad.resolve_conj()
            optimizer.step()
        results.append([b.detach(), c.detach()])
        assert (b < 0.5).all(), "the step went uphill"
    assert equal(*results)


@pytest.mark.parametrize("path", ["compiled", "differentiable"])
def test_a_conjugate_gradient_is_resolved_where_inputs_are_not_kept(path):
    results = []
    for resolves in (False, True):
        c = torch.tensor([1 + 2j, 3 - 1j])
        optimizer = mvngrad.MVNGrad([c], lr=0.1, differentiable=path == "differentiable")
        c.grad = torch.tensor([1 + 1j, 2 - 3j]).conj()
        if resolves:
            c.grad = c.grad.resolve_conj()
        (torch.compile(optimizer.step, backend="eager") if path == "compiled" else optimizer.step)()
        results.append([c.detach()])
    assert equal(*results)


@each_device
def test_a_parameter_that_is_a_negated_view_is_not_stepped_by_a_kernel(device, options):
    param = torch._neg_view(torch.ones(4, device=device)).requires_grad_()
    optimizer = mvngrad.MVNGrad([param], lr=0.1, **options)
    param.grad = torch.ones(4, device=device)
    if options.get("fused"):
        with pytest.raises(ValueError, match="memory of their own"):
            optimizer.step()
        return
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), -1 - 0.1 / 0.9, device=device))


@each_device
def test_parameters_with_the_same_memory_are_stepped_one_after_the_other(device, options):
    """As by torch's eager path; a launch for all of them would read and write this memory at the same time."""
    runs = []
    for backend in (options, {"fused": False, "foreach": False}):
        (x,) = parameters((40,), device=device)
        y = torch.nn.Parameter(x.data)
        optimizer = mvngrad.Adam([x, y], lr=0.1, weight_decay=0.5, **backend)
        train(optimizer, 3)
        runs.append([x.detach(), y.detach()])
        assert choose_backend(optimizer.param_groups[0]) == ("cpu" if backend.get("fused") else "eager")
    torch.testing.assert_close(*runs)
    if not options:
        with pytest.raises(ValueError, match="two of these have the same memory: give the optimizer one of them"):
            mvngrad.Adam([x, y], fused=True).step()


def load_own_state(optimizer, params):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def clear_state(optimizer, params):
    optimizer.state.clear()


def clear_everything(optimizer, params):
    optimizer.state.clear()
    optimizer.param_groups.clear()
    params.clear()


@each_device
@pytest.mark.parametrize("drop", [load_own_state, clear_state, clear_everything], ids=lambda drop: drop.__name__)
def test_old_state_is_freed_at_once(drop, device, options):
    params = parameters((5, 3), (4,), device=device)
    optimizer = mvngrad.MVNGrad(params, **options)
    train(optimizer, 3)
    old = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
    memory = [StorageWeakRef(value().untyped_storage()) for value in old]
    if drop is clear_everything:
        old += [weakref.ref(p) for p in params]
    drop(optimizer, params)
    assert all(value() is None for value in old)
    assert all(storage.expired() for storage in memory)


@each_device
def test_offloaded_state_and_parameters_are_freed_at_once(device, options):
    (x,) = parameters((64, 64), device=device)
    optimizer = mvngrad.MVNGrad([x], **options)
    train(optimizer, 3)
    tensors = [x, *optimizer.state[x].values()]
    memory = [StorageWeakRef(value.untyped_storage()) for value in tensors]
    for value in tensors:
        value.data = value.data.clone()
    assert all(storage.expired() for storage in memory)


@each_device
def test_wrapper_subclasses_are_stepped_eagerly_or_refused(device, by_kernel):
    """They have no memory of their own, and a kernel would read at address 0."""
    x, y, g, h = tensors((5,), (5,), (5,), (5,), device=device)
    param = torch.nn.Parameter(TwoTensor(x.clone(), y.clone()))
    optimizer, twins = mvngrad.MVNGrad([param], lr=0.1), [torch.nn.Parameter(t.clone()) for t in (x, y)]
    twin = mvngrad.MVNGrad(twins, lr=0.1, fused=False, foreach=False)
    for _ in range(3):
        param.grad, twins[0].grad, twins[1].grad = TwoTensor(g.clone(), h.clone()), g.clone(), h.clone()
        optimizer.step()
        twin.step()
    assert choose_backend(optimizer.param_groups[0]) == "eager"
    assert not optimizer._step_supports_amp_scaling
    assert equal([param.detach().a, param.detach().b], [t.detach() for t in twins])
    demanded = mvngrad.MVNGrad([param], fused=True)
    with pytest.raises(ValueError, match=r"memory of their own; here are TwoTensor of torch.float32 on \w+: leave"):
        demanded.step()
    assert not demanded.state


def test_a_refused_step_leaves_no_state_behind():
    (x,) = parameters((3,))
    optimizer = mvngrad.MVNGrad([x.to("meta").detach().requires_grad_()], fused=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, device="meta")
    with pytest.raises(
        ValueError, match=r"fused=True takes parameters on CUDA.*torch.float32 on meta: leave fused=None"
    ):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("device", ["cpu"])
def test_a_steady_state_step_runs_code_of_at_most_four_files(device, options):
    """Those of the optimizer, the inputs, the backend, and the rule or the kernel."""
    params = parameters((5, 3), (4,))
    optimizer = mvngrad.MVNGradW(params, **options)
    train(optimizer, 2)
    files = set()

    def record_file(frame, event, argument):
        name = frame.f_code.co_filename
        if "/mvngrad/" in name:
            files.add(name)

    sys.setprofile(record_file)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert len(files) <= 4, sorted(files)


# What a kernel would read or write beyond the end of a tensor


def resize_parameter(optimizer, param):
    param.data = torch.ones(12, 7, device=param.device)
    param.grad = torch.ones_like(param)


def resize_gradient(optimizer, param):
    param.data = torch.ones(12, 7, device=param.device)
    optimizer.state.clear()


def resize_state(optimizer, param):
    optimizer.state[param]["u"] = optimizer.state[param]["u"][:2].clone()


def widen_one_state(optimizer, param):
    optimizer.state[param]["u"] = optimizer.state[param]["u"].double()


@each_device
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (resize_parameter, r"m has the shape \(6, 7\) and its parameter \(12, 7\).*del optimizer.state"),
        (resize_gradient, r"gradient has the shape \(6, 7\) and its parameter \(12, 7\)"),
        (resize_state, r"u has the shape \(2, 7\) and its parameter \(6, 7\)"),
        (widen_one_state, "float32, torch.float64; all of it must have one dtype"),
    ],
)
def test_kernels_refuse_tensors_that_do_not_fit_their_parameter(change, message, device, kernel_options):
    param = torch.nn.Parameter(torch.ones(6, 7, device=device))
    optimizer = mvngrad.MVNGrad([param], **kernel_options)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    change(optimizer, param)
    before = param.detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(param, before)


@each_device
@pytest.mark.parametrize("name", ["weight_decay", "eps", "eps_s", "z_clip"])
def test_an_option_that_is_a_tensor_has_its_current_value(name, device, options):
    """Also if it is changed in place between two steps."""
    results = []
    for as_tensor in (False, True):
        value = torch.tensor(0.5, dtype=torch.float64) if as_tensor else 0.5
        param = torch.nn.Parameter(torch.ones(5, device=device))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # eps_s is large
            optimizer = mvngrad.MVNGradW([param], lr=0.1, **{name: value}, **options)
        for step in range(3):
            if step == 2:
                if as_tensor:
                    value.fill_(2.0)
                else:
                    optimizer.param_groups[0][name] = 2.0
            param.grad = torch.linspace(-1, 3, 5, device=device) * (1 + step)
            optimizer.step()
        results.append(param.detach().clone())
    assert torch.equal(*results)
