"""On a CUDA device: equal to torch's Adam, capturable in a graph, parameters on several devices."""

import pytest
import torch
from family import NAMES, OPTIMIZERS, PLAIN, equal, everything, parameters, train

import mvngrad

pytestmark = pytest.mark.gpu
each_cell = pytest.mark.parametrize("make", PLAIN, ids=[cls.__name__ for cls in PLAIN])
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


@each_cell
def test_the_default_path_on_cuda_is_foreach(make, monkeypatch):
    from mvngrad.optim import foreach

    calls = []
    monkeypatch.setattr(foreach, "step", lambda *args, **options: calls.append(options))
    train(make(parameters((3,), device="cuda")), 1)
    assert calls == [{"capturable": False}]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_a_captured_step_replays_as_the_step_itself(make, foreach):
    runs = []
    for captured in (False, True):
        params = parameters(*SHAPES, device="cuda")
        optimizer = make(params, lr=torch.tensor(1e-2, device="cuda"), foreach=foreach, capturable=True)
        for p in params:
            p.grad = torch.zeros_like(p)
        draws = [torch.randn_like(p.grad) for p in params for _ in range(6)]
        if captured:
            optimizer.init_state()
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):  # warm up on copies, so that the capture itself changes nothing
                warm = make([p.detach().clone().requires_grad_() for p in params], foreach=foreach, capturable=True)
                train(warm, 2)
            stream.synchronize()
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


@pytest.mark.parametrize("foreach", [None, False, True])
@each_cell
def test_parameters_on_several_devices(make, foreach):
    ours = [*parameters((4, 3), (5,)), *parameters((4, 3), (5,), device="cuda", seed=1)]
    optimizer = make(ours, lr=1e-2, foreach=foreach)
    train(optimizer, 5)
    alone = [*parameters((4, 3), (5,)), *parameters((4, 3), (5,), seed=1)]
    train(make(alone, lr=1e-2), 5)
    torch.testing.assert_close([p.cpu() for p in ours], alone, rtol=1e-5, atol=1e-6)


@each_cell
def test_a_checkpoint_moves_between_devices(make):
    source = make(parameters(*SHAPES, device="cuda"), lr=1e-2)
    train(source, 3)
    target = make([p.detach().cpu().requires_grad_() for p in source.param_groups[0]["params"]])
    target.load_state_dict(source.state_dict())
    assert all(value.is_cpu for state in target.state.values() for value in state.values())
    train(source, 3, seed=2)
    train(target, 3, seed=2)
    torch.testing.assert_close(
        [p.cpu() for p in source.param_groups[0]["params"]], target.param_groups[0]["params"], rtol=1e-5, atol=1e-6
    )


@each_cell
def test_a_step_that_grad_scaler_skips_touches_nothing(make):
    (x,) = parameters((3,), device="cuda")
    optimizer = make([x], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for factor in (1.0, float("inf")):
        before = everything(optimizer)
        optimizer.zero_grad()
        scaler.scale((x * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert equal(everything(optimizer), before)
