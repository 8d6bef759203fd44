"""On a CUDA device: equality with torch's Adam, graph capture, several devices, and state in fewer bits."""

from functools import partial

import pytest
import torch
from family import PLAIN, each_cell, each_narrow_dtype, each_optimizer, equal, everything, parameters, tensors, train

import mvngrad
from mvngrad.optim.backends import choose_backend
from mvngrad.optim.formats import load_state

pytestmark = pytest.mark.gpu
SHAPES = [(33, 7), (5,), (), (0,), (257, 3)]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decoupled", ["Adam", "AdamW"])
def test_adam_is_torchs_adam_bit_for_bit(decoupled, dtype, foreach):
    runs = []
    for module in (mvngrad, torch.optim):
        params = parameters(*SHAPES, dtype=dtype, device="cuda")
        train(getattr(module, decoupled)(params, lr=1e-2, weight_decay=0.1, foreach=foreach), 100)
        runs.append([p.detach() for p in params])
    assert equal(*runs)


PATHS = {"eager": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
each_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
PATHS_AND_DTYPES = PATHS | {
    "bfloat16": {"fused": True, "state_dtype": torch.bfloat16},
    "int8": {"fused": True, "state_dtype": "int8"},
}
each_path_and_dtype = pytest.mark.parametrize("path", PATHS_AND_DTYPES.values(), ids=PATHS_AND_DTYPES)


@each_cell
def test_the_default_backend_on_cuda_is_the_kernel_where_possible(make):
    def default(*params, **options):
        optimizer = make(list(params), **options)
        return choose_backend(optimizer.param_groups[0])

    (x,), (double,), (host,) = parameters((3,), device="cuda"), parameters((3,), dtype=torch.float64), parameters((3,))
    assert default(x) == "cuda"
    assert default(x, foreach=True) == "foreach"
    assert default(x, fused=False) == "foreach"
    assert default(double.detach().cuda().requires_grad_()) == "cuda"
    assert default(x, host) == "eager"
    with pytest.raises(ValueError, match=r"torch.float32 on cpu: leave fused=None"):
        default(x, host, fused=True)


@each_path_and_dtype
@each_optimizer
def test_a_captured_step_equals_an_eager_one(make, path):
    runs = []
    for captured in (False, True):
        params = parameters(*SHAPES, device="cuda")
        optimizer = make(params, lr=torch.tensor(1e-2, device="cuda"), capturable=True, **path)
        for p in params:
            p.grad = torch.zeros_like(p)
        draws = [torch.randn_like(p.grad) for p in params for _ in range(6)]
        if captured:
            optimizer.step()  # a warm-up step with zero gradients, undone below
            with torch.no_grad():
                for p, start in zip(params, parameters(*SHAPES, device="cuda"), strict=True):
                    p.copy_(start)
                    for value in optimizer.state[p].values():
                        value.zero_()
            for p in params:
                p.grad = torch.zeros_like(p)  # at other addresses than in the warm-up step
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                optimizer.step()
        for t in range(6):
            for i, p in enumerate(params):
                p.grad.copy_(draws[6 * i + t])
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (t + 1))
            graph.replay() if captured else optimizer.step()
        torch.cuda.synchronize()
        runs.append(everything(optimizer))
        torch.manual_seed(0)
    assert equal(*runs)


@each_cell
def test_eager_steps_between_replays_do_not_disturb_the_graph(make):
    """They use gradients at other addresses, and the graph must still read its own."""
    runs = []
    for captured in (False, True):
        (x,) = parameters((300, 7), device="cuda")
        optimizer = make([x], lr=1e-2, capturable=True, fused=True)
        static = torch.zeros_like(x)
        x.grad = static
        optimizer.step()
        if captured:
            state = [value.clone() for value in optimizer.state[x].values()]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            for value, old in zip(optimizer.state[x].values(), state, strict=True):
                value.copy_(old)
        for t in range(6):
            g = torch.randn(x.shape, generator=torch.Generator().manual_seed(t)).cuda()
            if t % 2 or not captured:
                x.grad = g
                optimizer.step()
            else:
                static.copy_(g)
                graph.replay()
        torch.cuda.synchronize()
        runs.append(everything(optimizer))
    assert equal(*runs)


@pytest.mark.parametrize("foreach", [None, False, True])
@each_cell
def test_parameters_on_several_devices_step_together(make, foreach):
    ours = [*parameters((4, 3), (5,)), *parameters((4, 3), (5,), device="cuda", seed=1)]
    optimizer = make(ours, lr=1e-2, foreach=foreach)
    train(optimizer, 5)
    alone = [*parameters((4, 3), (5,)), *parameters((4, 3), (5,), seed=1)]
    train(make(alone, lr=1e-2), 5)
    torch.testing.assert_close([p.cpu() for p in ours], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "int8"], ids=str)
@each_cell
def test_a_checkpoint_moves_between_devices(make, state_dtype):
    source = make(parameters(*SHAPES, device="cuda"), lr=1e-2, state_dtype=state_dtype)
    train(source, 3)
    target = make(
        [p.detach().cpu().requires_grad_() for p in source.param_groups[0]["params"]], state_dtype=state_dtype
    )
    target.load_state_dict(source.state_dict())
    assert all(value.is_cpu for state in target.state.values() for value in state.values())
    assert all(value.is_cuda for state in source.state.values() for value in state.values())
    train(source, 3, seed=2)
    train(target, 3, seed=2)
    near = 1e-5 if state_dtype is None else 1e-3  # a rounding may go the other way
    torch.testing.assert_close(
        [p.cpu() for p in source.param_groups[0]["params"]], target.param_groups[0]["params"], rtol=near, atol=near / 10
    )


def test_the_kernel_accumulates_small_steps_of_bfloat16_parameters():
    x = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device="cuda"))
    optimizer = mvngrad.MVNGradW([x], lr=1e-5, weight_decay=0, stochastic_rounding=True, lean=True)
    for t in range(100):
        x.grad = 1 + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(t)).cuda().bfloat16()
        optimizer.step()
    assert 1e-3 < 1 - x.double().mean().item() < 4e-3


@each_path_and_dtype
@each_cell
def test_a_step_that_grad_scaler_skips_changes_nothing(make, path):
    (x,) = parameters((3,), device="cuda")
    optimizer = make([x], lr=0.1, **path)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    factors = torch.tensor([1.0, -2.0, 3.0], device="cuda")
    for overflow in (1.0, float("inf"), 1.0):
        before = everything(optimizer)
        optimizer.zero_grad()
        scaler.scale((x * factors * overflow).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if overflow != 1:
            assert equal(everything(optimizer), before)
    (twin,) = parameters((3,), device="cuda")
    unscaled = make([twin], lr=0.1, **path)
    for _ in range(2):
        twin.grad = factors.clone()
        unscaled.step()
    assert equal(everything(optimizer), everything(unscaled))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "int8"], ids=str)
@each_cell
def test_a_fused_step_never_waits_for_the_device(make, state_dtype):
    params = parameters(*SHAPES, device="cuda")
    optimizer = make(params, lr=torch.tensor(1e-2, device="cuda"), weight_decay=0.1, state_dtype=state_dtype)
    train(optimizer, 2)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_cell
def test_the_kernel_steps_parameters_that_were_frozen_added_or_loaded(make):
    runs = []
    for path in ({"fused": True}, {"foreach": True}):
        a, b, c = parameters((33, 7), (1025,), (5,), device="cuda")
        optimizer = make([a, b], lr=1e-2, **path)
        train(optimizer, 2)
        b.requires_grad_(False)
        train(optimizer, 2, seed=2)
        b.requires_grad_(True)
        optimizer.add_param_group({"params": [c]})
        train(optimizer, 2, seed=3)
        optimizer.load_state_dict(optimizer.state_dict())
        a.data = a.data.clone()
        train(optimizer, 2, seed=4)
        runs.append([value.float().cpu() for value in everything(optimizer)])
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


def test_the_kernel_writes_through_strides_and_channels_last():
    runs = []
    for path in PATHS.values():
        (x,) = parameters((4, 6, 5, 3), device="cuda")
        channels_last = torch.nn.Parameter(x.detach().to(memory_format=torch.channels_last))
        strided = torch.nn.Parameter(x.detach()[::2, 1:])
        optimizer = mvngrad.MVNGradW([channels_last, strided], lr=1e-2, **path)
        train(optimizer, 4)
        runs.append([p.detach().clone() for p in (channels_last, strided)])
    for other in runs[1:]:
        torch.testing.assert_close(runs[0], other, rtol=1e-5, atol=1e-6)


@each_cell
def test_a_group_may_change_its_backend(make):
    """Step counts move to the device where the new backend reads them."""
    runs = []
    for paths in ([{}] * 3, [{"foreach": True, "fused": None}, {"foreach": None, "fused": True}, {"fused": False}]):
        params = parameters(*SHAPES, device="cuda")
        optimizer = make(params, lr=1e-2, foreach=True)
        for seed, path in enumerate(paths):
            optimizer.param_groups[0].update(path)
            train(optimizer, 2, seed=seed)
        runs.append([value.float().cpu() for value in everything(optimizer)])
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


def test_moving_a_model_after_its_first_step_is_refused_and_casting_it_is_not():
    (x,) = parameters((8,))
    optimizer = mvngrad.MVNGrad([x])
    train(optimizer, 1)
    x.data = x.data.cuda()
    with pytest.raises(ValueError, match=r"state is on cpu and its parameter on cuda:0: move the model before"):
        train(optimizer, 1)
    (y,) = parameters((8,), device="cuda")
    optimizer = mvngrad.MVNGrad([y], lr=1.0)
    train(optimizer, 1)
    y.data, y.grad = y.data.bfloat16(), None
    before = y.detach().clone()
    train(optimizer, 1)
    assert (y - before).abs().min() > 0.01
    assert y.isfinite().all()


# State in fewer bits

LEAN = partial(mvngrad.MVNGrad, lean=True)
each_cell_and_lean = pytest.mark.parametrize("make", [*PLAIN, LEAN], ids=[*(cls.__name__ for cls in PLAIN), "lean"])
VARIED = [*SHAPES, (5000,), (1,)]


def get_stored(optimizer, param):
    """The state of a parameter without its step count and scales: codes, or bfloat16 numbers."""
    return {name: value for name, value in optimizer.state[param].items() if name != "step" and "scale" not in name}


def mostly_equal(one, other):
    """Whether two optimizers have nearly the same state; a GPU's approximate root changes a rounding now and then."""
    same = total = 0
    for p, q in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        for name, value in get_stored(one, p).items():
            assert value.dtype == get_stored(other, q)[name].dtype
            same += (value.cpu() == get_stored(other, q)[name].cpu()).sum().item()
            total += value.numel()
    return same >= 0.99 * total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@each_narrow_dtype
@each_cell_and_lean
def test_the_kernel_rounds_as_eager_and_foreach_do(make, state_dtype, dtype):
    optimizers = []
    for name, path in PATHS.items():
        params = parameters(*VARIED, dtype=dtype, device="cuda")
        optimizers.append(
            make(params, lr=1e-2, state_dtype=state_dtype, stochastic_rounding=True, rounding_seed=3, **path)
        )
        assert choose_backend(optimizers[-1].param_groups[0]) == name.replace("fused", "cuda")
        train(optimizers[-1], 5)
    coarse = 2**-7 if dtype == torch.bfloat16 else 0
    for other in optimizers[1:]:
        assert mostly_equal(optimizers[0], other)
        params, others = (each.param_groups[0]["params"] for each in (optimizers[0], other))
        torch.testing.assert_close(params, others, rtol=coarse, atol=1e-2 * 5 * 1e-2)


@each_path
@each_narrow_dtype
@pytest.mark.parametrize("make", [mvngrad.MVNGrad, LEAN, mvngrad.Adam], ids=["MVNGrad", "lean", "Adam"])
def test_a_captured_step_with_rounded_state_equals_an_eager_one(make, state_dtype, path):
    test_a_captured_step_equals_an_eager_one(partial(make, state_dtype=state_dtype), path)


@each_narrow_dtype
def test_eager_steps_between_replays_do_not_disturb_a_graph_with_rounded_state(state_dtype):
    test_eager_steps_between_replays_do_not_disturb_the_graph(partial(mvngrad.MVNGrad, state_dtype=state_dtype))


@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8"}, {"state_dtype": "int8", "lean": True}], ids=str)
@pytest.mark.parametrize("bits", [24, 32])
def test_a_captured_step_with_masters_equals_an_eager_one(bits, options):
    runs = []
    for captured in (False, True):
        (x,) = parameters((5000,), dtype=torch.bfloat16, device="cuda")
        lr = torch.tensor(1e-2, device="cuda")
        optimizer = mvngrad.MVNGradW([x], lr=lr, capturable=True, fused=True, master_bits=bits, **options)
        x.grad = torch.ones_like(x)
        optimizer.step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                optimizer.step()
        for seed in range(6):
            x.grad.copy_(tensors((5000,), seed=seed)[0])
            graph.replay() if captured else optimizer.step()
        torch.cuda.synchronize()
        runs.append(everything(optimizer))
    assert equal(*runs)


def test_a_captured_step_draws_new_random_bits_at_every_replay():
    """As an eager step does: the step count, which the random bits depend on, is on the device."""
    runs = []
    for captured in (False, True):
        (x,) = parameters((5000,), dtype=torch.bfloat16, device="cuda")
        optimizer = mvngrad.Adam([x], lr=1e-4, capturable=True, fused=True, stochastic_rounding=True)
        x.grad = torch.ones_like(x)
        optimizer.step()
        if captured:
            before = everything(optimizer)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                optimizer.step()
            assert equal(everything(optimizer), before), "capturing took a step"
        for _ in range(20):
            graph.replay() if captured else optimizer.step()
        torch.cuda.synchronize()
        runs.append(everything(optimizer))
    assert equal(*runs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@each_narrow_dtype
@each_cell_and_lean
def test_a_fused_step_with_rounded_state_never_waits_for_the_device(make, state_dtype):
    test_a_fused_step_never_waits_for_the_device(partial(make, stochastic_rounding=True), state_dtype)


@each_path
@each_narrow_dtype
def test_a_step_that_grad_scaler_skips_changes_no_rounded_state(state_dtype, path):
    test_a_step_that_grad_scaler_skips_changes_nothing(partial(mvngrad.MVNGrad, state_dtype=state_dtype), path)


@each_path
def test_stochastic_rounding_on_cuda_accumulates_steps_far_below_half_a_unit(path):
    """50 steps of 1e-5, where half a unit below 1 is 2e-3; the mean of 2^16 coordinates has an error of 1%."""
    for at_random in (False, True):
        x = torch.nn.Parameter(torch.ones(2**16, dtype=torch.bfloat16, device="cuda"))
        optimizer = mvngrad.Adam([x], lr=1e-5, stochastic_rounding=at_random, **path)
        for _ in range(50):
            x.grad = torch.ones_like(x)
            optimizer.step()
        moved = 1 - x.double().mean().item()
        assert moved == (pytest.approx(5e-4, rel=0.06) if at_random else 0)


@each_narrow_dtype
def test_slow_averages_keep_decaying_on_cuda(state_dtype):
    """As in test_state_dtype, with the kernel. The mean of 2^16 coordinates has an error of 0.4% in 8 bits."""
    x = torch.nn.Parameter(torch.ones(2**16, device="cuda"))
    optimizer = mvngrad.Adam([x], lr=1e-3, state_dtype=state_dtype)
    train(optimizer, 5)
    before = load_state(["m", "v"], optimizer.state[x], torch.float64)["v"].mean()
    x.grad = torch.zeros_like(x)
    for _ in range(5000):
        optimizer.step()
    after = load_state(["m", "v"], optimizer.state[x], torch.float64)["v"].mean()
    assert (after / before).item() == pytest.approx(0.999**5000, rel=0.05)
    assert x.isfinite().all()


@each_narrow_dtype
@each_cell_and_lean
def test_a_checkpoint_of_rounded_state_moves_to_the_cpu_and_back_bit_for_bit(make, state_dtype):
    def copy_to(source, device):
        params = [p.detach().to(device).clone().requires_grad_() for p in source.param_groups[0]["params"]]
        target = make(params, state_dtype=state_dtype)
        target.load_state_dict(source.state_dict())
        return target

    original = make(parameters(*VARIED, device="cuda"), lr=1e-2, state_dtype=state_dtype, rounding_seed=3)
    train(original, 3)
    host = copy_to(original, "cpu")
    assert all(value.is_cpu for state in host.state.values() for value in state.values())
    assert equal(everything(host), [value.cpu() for value in everything(original)])
    back = copy_to(host, "cuda")
    assert equal(everything(back), everything(original))
    for each in (original, back, host):
        train(each, 3, seed=2)
    assert equal(everything(back), everything(original))
    assert mostly_equal(host, original)


def test_lean_on_cuda_is_the_same_on_every_backend_and_starts_as_mvn_grad():
    runs, firsts = [], []
    for make, path in [*((LEAN, path) for path in PATHS.values()), (mvngrad.MVNGrad, {"fused": True})]:
        params = parameters(*VARIED, device="cuda")
        optimizer = make(params, lr=1e-2, **path)
        train(optimizer, 1)
        firsts.append([p.detach().clone() for p in params])
        train(optimizer, 20, seed=2)
        runs.append([p.detach().clone() for p in params])
    for other in firsts[1:]:
        torch.testing.assert_close(firsts[0], other, rtol=1e-6, atol=1e-6)
    for other in runs[1:3]:
        torch.testing.assert_close(runs[0], other, rtol=1e-4, atol=1e-5)
    assert max((a - b).abs().max() for a, b in zip(runs[0], runs[3], strict=True) if a.numel()) > 1e-3
