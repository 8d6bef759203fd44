"""Several processes: FSDP2 and other DTensors, distributed checkpoints, DDP and ZeRO, on two real ranks (gloo)."""

import multiprocessing
import time
import warnings
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from family import equal, everything, parameters, tensors
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import mvngrad
from benchmarks import checkpoint_routes
from mvngrad.optim.backends import share_memory
from mvngrad.optim.formats import load_state
from mvngrad.optim.tensors import get_local

LIMIT = 100
"""Seconds, after which the ranks are killed, so that a deadlock fails the test instead of blocking it."""

# The ranks are forked from a server that imported torch once; each would take seconds to import it. Its compiler too:
# the first optimizer of a process imports torch._dynamo.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._inductor", "pytest"]
)


def on_two_ranks(scenario, folder, *arguments):
    """Run `scenario(folder, *arguments)` in two processes; an exception of either is raised in this one."""
    ranks = torch.multiprocessing.start_processes(
        run_rank, (scenario, folder, *arguments), nprocs=2, join=False, start_method="forkserver"
    )
    end = time.monotonic() + LIMIT
    while not ranks.join(timeout=1):
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            pytest.fail(f"{scenario.__name__} did not end within {LIMIT} s")


def run_rank(rank, scenario, folder, *arguments):
    torch.set_num_threads(1)
    group = {"init_method": f"file://{folder}/rendezvous", "timeout": timedelta(seconds=LIMIT // 2)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **group)
    try:
        scenario(folder, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model():
    """A model that shards unevenly: seven rows become four and three, one row becomes one and none."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


def shard_model(model, **options):
    for layer in (model[0], model[2], model):
        fully_shard(layer, **options)
    return model


def setup(make, shard=shard_model, **options):
    model = shard(make_model())
    return model, make(model.parameters(), lr=1e-2, **options)


def single(make, **options):
    return setup(make, lambda model: model, **options)


def train(model, optimizer, steps, seed=1, clip=None):
    """Both ranks have the same data, so that their mean gradient, (g + g) / 2, is that of one process exactly."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(16, 10, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def gather(optimizer):
    """All parameters and state, as full tensors."""
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in everything(optimizer)]


def get_local_parts(optimizer):
    """The local parts of parameters and state, with 8-bit state decoded."""
    parts = []
    for param, state in optimizer.state.items():
        stored = {name: get_local(value) for name, value in state.items()}
        names = [name for name in stored if name != "step" and not name.endswith("_scale")]
        parts += [get_local(param).detach().clone(), stored["step"].clone()]
        parts += [value.clone() for value in load_state(names, stored, torch.float32).values()]
    return parts


def close(left, right, rtol=1e-5, atol=1e-7):
    return len(left) == len(right) and all(torch.allclose(a, b, rtol, atol) for a, b in zip(left, right, strict=True))


# The step

STATE_OPTIONS = {
    "float32": {"state_dtype": torch.float32},
    "bfloat16": {"state_dtype": torch.bfloat16},
    "int8": {"state_dtype": "int8"},
    "lean": {"lean": True},
    "lean int8": {"lean": True, "state_dtype": "int8"},
}


SHARDED_CASES = [(mvngrad.MVNGradW, {"weight_decay": 0.1}), (mvngrad.LaProp, {"weight_decay": 0.1})]
MORE = [
    (mvngrad.MVNGrad, {"weight_decay": 0.1, "z_clip": 1.0}),
    (mvngrad.MVNGradW, {"lean": True, "maximize": True, "lr": torch.tensor(1e-3)}),
    (mvngrad.AdaBeliefW, {}),
    (mvngrad.Adam, {"capturable": True}),
]


class DTensorOperations(TorchDispatchMode):
    """Counts operations on DTensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(issubclass(cls, DTensor) for cls in types)
        return function(*args, **(kwargs or {}))


def count_dtensor_operations(model, optimizer):
    train(model, optimizer, 2)
    with DTensorOperations() as operations:
        optimizer.step()
    return operations.count


def compare_with_one_process(_, cells, fused, same):
    for make, options in cells:
        options = {"lr": 1e-2, "fused": fused, **options}
        one, many = make_model(), shard_model(make_model())
        alone, optimizer = make(one.parameters(), **options), make(many.parameters(), **options)
        train(one, alone, 10)
        train(many, optimizer, 10)
        assert same(gather(optimizer), gather(alone)), make
        parts = [param.to_local().numel() for param in many.parameters()]
        assert parts == ([40, 4, 7, 1], [30, 3, 0, 0])[dist.get_rank()]
        for param, state in optimizer.state.items():
            assert all(state[name].placements == param.placements for name in set(state) - {"step"})
        assert count_dtensor_operations(many, optimizer) == 0


def test_fsdp_equals_one_process_bit_for_bit(tmp_path):
    on_two_ranks(compare_with_one_process, tmp_path, SHARDED_CASES + MORE, False, equal)


def count_operations_in_every_format(_):
    for options in ({}, {"state_dtype": "int8"}, {"state_dtype": torch.bfloat16}, {"lean": True}):
        assert count_dtensor_operations(*setup(mvngrad.MVNGradW, **options)) == 0
    assert count_dtensor_operations(*setup(torch.optim.AdamW)) > 0


def test_a_step_dispatches_no_dtensor_operation(tmp_path):
    on_two_ranks(count_operations_in_every_format, tmp_path)


def train_in_other_setups(_):
    one, alone = single(mvngrad.MVNGradW)
    train(one, alone, 5)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    many, optimizer = setup(mvngrad.MVNGradW, lambda model: shard_model(model, mesh=mesh))
    train(many, optimizer, 5)
    assert equal(gather(optimizer), gather(alone))

    def half(model):
        fully_shard(model[0])
        return model

    mixture, optimizer = setup(mvngrad.MVNGradW, half)
    assert {type(param.data) for param in mixture.parameters()} == {DTensor, torch.Tensor}
    train(mixture, optimizer, 5)
    assert equal(gather(optimizer), gather(alone))

    one, alone = single(mvngrad.MVNGradW)
    train(one, alone, 5, clip=0.1)
    many, optimizer = setup(mvngrad.MVNGradW)
    train(many, optimizer, 5, clip=0.1)
    assert close(gather(optimizer), gather(alone))  # the norm is summed in another order

    model, optimizer = setup(mvngrad.MVNGradW, lambda model: shard_model(model.bfloat16()), stochastic_rounding=True)
    model(torch.ones(2, 10, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert {state["s"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_two_dimensional_meshes_mixtures_clipping_and_bfloat16_train(tmp_path):
    on_two_ranks(train_in_other_setups, tmp_path)


def step_with_every_placement(_, make, fused, same):
    mesh = init_device_mesh("cpu", (2,))
    weight, *grads = tensors((7, 10), (7, 10), (7, 10), (7, 10))
    alone = torch.nn.Parameter(weight.clone())
    reference = make([alone], weight_decay=0.1)
    for alone.grad in grads:
        reference.step()

    def halves(g):
        return DTensor.from_local(g / 2, mesh, [Partial()])

    placed = {
        "Shard": lambda g: distribute_tensor(g.clone(), mesh, [Shard(0)]),
        "Replicate": lambda g: distribute_tensor(g.clone(), mesh, [Replicate()]),
        "Partial": halves,
        "still communicating": lambda g: halves(g).redistribute(mesh, [Replicate()], async_op=True),
    }
    for placement in (Shard(0), Replicate()):
        for name, place in placed.items():
            param = torch.nn.Parameter(distribute_tensor(weight.clone(), mesh, [placement]))
            optimizer = make([param], weight_decay=0.1, fused=fused)
            for g in grads:
                param.grad = place(g)
                placements = param.grad.placements
                optimizer.step()
                assert param.grad.placements == placements
            assert optimizer.state[param]["u"].placements == param.placements == (placement,)
            assert same(gather(optimizer), everything(reference)), (placement, name)


def test_gradients_with_other_placements_are_redistributed(tmp_path):
    on_two_ranks(step_with_every_placement, tmp_path, mvngrad.MVNGradW, False, equal)


@pytest.mark.usefixtures("alone")
def test_torch_compile_of_a_sharded_step_uses_the_current_gradients():
    """Also if their placements change; traced only, because code generation adds nothing to this."""
    mesh, (value, *grads) = init_device_mesh("cpu", (1,)), tensors((7, 10), (7, 10), (7, 10), (7, 10))
    made = []
    for traced in (False, True):
        params = [torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])), torch.nn.Parameter(value.clone())]
        optimizer = mvngrad.MVNGradW(params, lr=1e-2, state_dtype=torch.bfloat16)
        step = torch.compile(optimizer.step, backend="aot_eager") if traced else optimizer.step
        for grad, placement in zip(grads, (Shard(0), Shard(0), Replicate()), strict=True):
            params[0].grad, params[1].grad = distribute_tensor(grad, mesh, [placement]), grad
            step()
        made.append(get_local_parts(optimizer))
    assert close(*made)


def compare_fused(folder):
    compare_with_one_process(folder, SHARDED_CASES, True, equal)
    step_with_every_placement(folder, mvngrad.MVNGradW, True, close)  # close, because the reference steps eagerly


@pytest.mark.usefixtures("cpp_compiler")
def test_the_fused_sharded_step_equals_one_process_bit_for_bit(tmp_path):
    on_two_ranks(compare_fused, tmp_path)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", STATE_OPTIONS.values(), ids=STATE_OPTIONS)
def test_a_local_shard_is_stepped_as_a_plain_tensor(options, device):
    """On CUDA by the kernel. There is no communication, so that the shards can have any shape."""
    mesh, shapes = init_device_mesh(device, (1,)), [(4, 10), (0, 10), (7,), (5, 3)]

    def shard(values):
        return [DTensor.from_local(value, mesh, [Shard(0)]) for value in values[:3]] + values[3:]

    plain = parameters(*shapes, device=device)
    mixture = [torch.nn.Parameter(value) for value in shard(tensors(*shapes, device=device))]
    reference, optimizer = mvngrad.MVNGradW(plain, **options), mvngrad.MVNGradW(mixture, **options)
    for seed in range(4):
        for params, place in ((plain, list), (mixture, shard)):
            for param, grad in zip(params, place(tensors(*shapes, device=device, seed=seed)), strict=True):
                param.grad = grad
        reference.step()
        with DTensorOperations() as operations:
            optimizer.step()
        assert seed == 0 or operations.count == 0  # the first step creates the state
    assert equal(get_local_parts(optimizer), get_local_parts(reference))
    again = mvngrad.MVNGradW(mixture, **options)
    again.load_state_dict(optimizer.state_dict())
    assert equal(get_local_parts(again), get_local_parts(optimizer))


@pytest.mark.usefixtures("alone")
def test_empty_shards_do_not_share_memory():
    """Two parameters of one row each, as the second of two processes has them: without memory, at the address 0."""
    mesh, params = init_device_mesh("cpu", (1,)), []
    for shape in (torch.Size((1, 7)), torch.Size((1,))):
        part, strides = torch.zeros(0, *shape[1:]), torch.empty(shape).stride()
        params.append(torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], shape=shape, stride=strides)))
    assert not share_memory(params)
    assert share_memory([*params, *[torch.nn.Parameter(torch.ones(2))] * 2])


@pytest.mark.usefixtures("alone")
def test_a_plain_gradient_of_a_dtensor_is_refused():
    mesh = init_device_mesh("cpu", (1,))
    plain = torch.nn.Parameter(torch.ones(2))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    optimizer = mvngrad.MVNGrad([plain, sharded])
    plain.grad, sharded.grad = torch.ones(2), torch.ones(2)
    with pytest.raises(ValueError, match=r"a DTensor of \(2,\) has a plain tensor as its gradient"):
        optimizer.step()
    assert torch.equal(plain, torch.ones(2))


@pytest.mark.usefixtures("alone")
def test_autograd_sees_that_a_step_changed_a_dtensor():
    mesh = init_device_mesh("cpu", (1,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    optimizer = mvngrad.MVNGrad([param])
    loss = param.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Checkpoints


def save(model, optimizer, folder):
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)


def load(model, optimizer, folder, template=None):
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, template or optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def save_and_resume(folder):
    for name, options in STATE_OPTIONS.items():
        model, optimizer = setup(mvngrad.MVNGradW, **options)
        train(model, optimizer, 4)
        save(model, optimizer, folder / name)
        saved = optimizer.state_dict()["state"].values()
        assert all(isinstance(state[name], DTensor) for state in saved for name in set(state) - {"step"})
        assert all(state["s"].is_floating_point() and "s_scale" not in state for state in saved)
        values = [value.full_tensor() if isinstance(value, DTensor) else value for s in saved for value in s.values()]
        values += [param.full_tensor() for param in model.parameters()]
        if dist.get_rank() == 0:
            torch.save(values, folder / f"{name}.pt")

        resumed_model, resumed = setup(mvngrad.MVNGradW, **options)
        load(resumed_model, resumed, folder / name)
        assert equal(get_local_parts(resumed), get_local_parts(optimizer)), name
        train(model, optimizer, 4, seed=2)
        train(resumed_model, resumed, 4, seed=2)
        assert equal(get_local_parts(resumed), get_local_parts(optimizer)), name


def save_and_resume_at_step_zero(folder):
    for name, options in STATE_OPTIONS.items():
        untouched_model, untouched = setup(mvngrad.MVNGradW, **options)
        model, optimizer = setup(mvngrad.MVNGradW, **options)
        optimizer.init_state()
        save(model, optimizer, folder / name)
        resumed_model, resumed = setup(mvngrad.MVNGradW, **options)
        resumed.init_state()
        load(resumed_model, resumed, folder / name)
        for each in ((untouched_model, untouched), (model, optimizer), (resumed_model, resumed)):
            train(*each, 4)
        assert equal(get_local_parts(optimizer), get_local_parts(untouched)), name
        assert equal(get_local_parts(resumed), get_local_parts(untouched)), name
        assert {state["step"].item() for state in resumed.state.values()} == {4.0}


def get_saved_values(model, optimizer):
    """What `save_and_resume` writes to its file, with 8-bit state as floats."""
    if optimizer.param_groups[0]["state_dtype"] == "int8":
        states = mvngrad.convert_state_dict(optimizer.state_dict(), torch.float32)["state"].values()
    else:
        states = optimizer.state.values()
    return [value for state in states for value in state.values()] + [param.detach() for param in model.parameters()]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_ranks_resumes_on_two_and_on_one(tmp_path):
    on_two_ranks(save_and_resume, tmp_path)
    for name, options in STATE_OPTIONS.items():
        small = options.get("state_dtype") == "int8"
        model, optimizer = single(mvngrad.MVNGradW, **options)
        template = mvngrad.MVNGradW(model.parameters(), lean=options.get("lean")) if small else optimizer
        load(model, optimizer, tmp_path / name, template)
        near = partial(close, rtol=1 / 8, atol=1e-4)  # the blocks of a whole tensor are not those of its shards
        assert (near if small else equal)(get_saved_values(model, optimizer), torch.load(tmp_path / f"{name}.pt")), name
        train(model, optimizer, 4, seed=2)
        if name in ("float32", "lean"):  # the others draw random bits by the position in a shard
            uninterrupted_model, uninterrupted = single(mvngrad.MVNGradW, **options)
            train(uninterrupted_model, uninterrupted, 4)
            train(uninterrupted_model, uninterrupted, 4, seed=2)
            assert equal(everything(optimizer), everything(uninterrupted)), name


def test_a_checkpoint_at_step_zero_takes_no_hidden_step(tmp_path):
    on_two_ranks(save_and_resume_at_step_zero, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of what it deprecates
def test_every_checkpoint_route_is_exact_rounded_or_refused_by_all_ranks(tmp_path):
    """A part of the table in docs/how-to/checkpoint-routes.md, on two ranks and on one."""
    formats, savers = ("float32", "bf16", "int8", "lean"), ("one", "DDP", "FSDP2")

    def choose(loaders, world):
        cells = checkpoint_routes.list_cells(savers, loaders, world, formats)
        same = [cell for cell in cells if cell.saved_format == cell.format and cell.format in ("bf16", "int8")]
        return (*same, *[cell for cell in cells if cell.saved_format != cell.format][::23])

    Phase = checkpoint_routes.Phase
    checkpoint_routes.run_phase(0, Phase(1, savers[:1]), tmp_path, formats, grouped=False)
    phase = Phase(2, savers[1:], choose(checkpoint_routes.LOADERS[2], 2))
    checkpoint_routes.launch(phase, tmp_path, formats)
    checkpoint_routes.run_phase(0, Phase(1, (), choose(["one"], 1)), tmp_path, formats, grouped=False)
    cells = checkpoint_routes.read_outcomes(tmp_path)
    assert not checkpoint_routes.find_wrong(cells)
    outcomes = Counter((cell["format"], cell["outcome"]) for cell in cells if not cell["converted"])
    assert outcomes["int8", "exact"] > 10
    assert outcomes["bf16", "exact"] > 20
    assert outcomes["int8", "rounded"] == 3  # from shards to whole tensors


def test_the_page_of_checkpoint_routes_shows_the_stored_result():
    result = checkpoint_routes.read_record()
    assert not checkpoint_routes.find_wrong(result["cells"])
    assert checkpoint_routes.render(result) == checkpoint_routes.PAGE.read_text(encoding="utf-8")


def make_sharded_and_plain(state_dtype):
    mesh = init_device_mesh("cpu", (1,))
    (value,) = tensors((3, 4))
    sharded = torch.nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)]))
    plain = torch.nn.Parameter(value.clone())
    sharded.grad, plain.grad = distribute_tensor(value.clone(), mesh, [Shard(0)]), value.clone()
    made = [mvngrad.MVNGradW([param], state_dtype=state_dtype) for param in (sharded, plain)]
    for optimizer in made:
        optimizer.step()
    return made


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16], ids=str)
def test_state_that_is_not_sharded_as_its_parameter_is_refused(state_dtype):
    sharded, plain = make_sharded_and_plain(state_dtype)
    with pytest.raises(ValueError, match="m is whole, its parameter sharded: load it by set_optimizer_state_dict"):
        sharded.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="m is sharded, its parameter whole: save it by get_optimizer_state_dict"):
        plain.load_state_dict(sharded.state_dict())


@pytest.mark.usefixtures("alone")
def test_8_bit_blocks_of_whole_tensors_are_refused_by_shards():
    sharded, plain = make_sharded_and_plain("int8")
    with pytest.raises(ValueError, match=r"m is in 8-bit blocks .*convert_state_dict\(state_dict, 'int8 as float32'\)"):
        sharded.load_state_dict(plain.state_dict())


@pytest.mark.usefixtures("alone", "cpp_compiler")
def test_a_fused_step_waits_for_gradients_that_are_being_reduced():
    """A functional collective returns an AsyncCollectiveTensor, which has no memory of its own."""
    fused, plain = (mvngrad.MVNGradW([torch.nn.Parameter(torch.ones(6))], fused=fused) for fused in (True, False))
    for i in range(3):
        for optimizer in (fused, plain):
            (param,) = optimizer.param_groups[0]["params"]
            param.grad = all_reduce(torch.arange(6.0) + i, "sum", dist.group.WORLD)
            optimizer.step()
    torch.testing.assert_close(*(optimizer.param_groups[0]["params"][0] for optimizer in (fused, plain)))


@pytest.mark.usefixtures("alone", "cpp_compiler")
@pytest.mark.parametrize("steps", [0, 1], ids=["first", "later"])
def test_a_fused_step_refuses_gradients_without_memory(steps):
    other, param = (torch.nn.Parameter(torch.ones(6)) for _ in range(2))
    optimizer = mvngrad.MVNGradW([{"params": [other]}, {"params": [param]}], fused=True)
    for _ in range(steps):
        other.grad, param.grad = torch.ones(6), torch.ones(6)
        optimizer.step()
    other.grad, before = torch.ones(6), other.detach().clone()
    param.grad = TwoTensor(torch.ones(6), torch.ones(6))
    with pytest.raises(ValueError, match=r"a gradient is a TwoTensor, .* set fused=False for its group"):
        optimizer.step()
    param.grad = DTensor.from_local(torch.ones(6), init_device_mesh("cpu", (1,)), run_check=False)
    with pytest.raises(ValueError, match="both must be DTensors, or neither"):
        optimizer.step()
    assert torch.equal(other, before), "no group may step if one cannot"


def test_8_bit_state_keeps_its_memory_order_in_a_distributed_checkpoint(tmp_path):
    """torch.distributed.checkpoint stores no strides, and blocks follow the order in memory."""
    (value,) = tensors((8, 40, 3, 3))
    params = [
        torch.nn.Parameter(value.to(memory_format=order)) for order in (torch.channels_last, torch.contiguous_format)
    ]
    models = [torch.nn.ParameterDict({"x": param}) for param in params]
    optimizers = [mvngrad.MVNGradW([param], state_dtype="int8") for param in params]
    params[0].grad = (value * torch.arange(40.0)[:, None, None]).to(memory_format=torch.channels_last)
    optimizers[0].step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        dcp.save(get_optimizer_state_dict(models[0], optimizers[0]), checkpoint_id=tmp_path)
        states = get_optimizer_state_dict(models[1], optimizers[1])
        dcp.load(states, checkpoint_id=tmp_path)
    set_optimizer_state_dict(models[1], optimizers[1], states)
    saved, loaded = (
        load_state("msu", optimizer.state[p], torch.float32) for optimizer, p in zip(optimizers, params, strict=True)
    )
    for name, values in saved.items():
        torch.testing.assert_close(loaded[name], values, rtol=1 / 8, atol=2**-16 * values.abs().max().item())


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "message"),
    [({"state_dtype": "int8"}, "state_dtype='int8'.* use fully_shard"), ({"master_bits": 24}, "master_bits=24")],
    ids=["int8", "masters"],
)
def test_fsdp1_refuses_state_that_is_integers(options, message):
    model = FullyShardedDataParallel(make_model().bfloat16(), device_id=torch.device("cpu"))
    optimizer = mvngrad.MVNGradW(model.parameters(), **options)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=rf"\(FSDP1\) cannot save {message}"):
        optimizer.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("state_dtype", [torch.float32, "int8"], ids=str)
def test_complex_state_of_a_dtensor_round_trips(state_dtype):
    mesh = init_device_mesh("cpu", (1,))
    (value,) = tensors((3, 4), dtype=torch.complex64)
    param = torch.nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)]))
    param.grad = distribute_tensor(value, mesh, [Shard(0)])
    optimizer, again = (mvngrad.MVNGrad([param], state_dtype=state_dtype) for _ in range(2))
    optimizer.step()
    again.load_state_dict(optimizer.state_dict())
    assert equal(get_local_parts(again), get_local_parts(optimizer))


# Replicas


def train_replicas(_):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns of its own deprecated parts when imported

    one, alone = single(mvngrad.MVNGradW)
    train(one, alone, 6)
    many, optimizer = setup(mvngrad.MVNGradW, DistributedDataParallel)
    train(many, optimizer, 6)
    assert equal(everything(optimizer), everything(alone))

    for name, options in STATE_OPTIONS.items():
        one, alone = single(mvngrad.MVNGradW, **options)
        train(one, alone, 4)
        train(one, alone, 4, seed=2)
        many, made = DistributedDataParallel(make_model()), {"optimizer_class": mvngrad.MVNGradW, "lr": 1e-2, **options}
        first, resumed = (ZeroRedundancyOptimizer(many.parameters(), **made) for _ in range(2))
        train(many, first, 4)
        first.consolidate_state_dict(to=0)
        saved = [first.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved)
        resumed.load_state_dict(saved[0])
        resumed.optim.init_state()  # 8-bit state is unpacked when it is used
        assert equal(everything(resumed.optim), everything(first.optim)), name
        train(many, resumed, 4, seed=2)
        if name in ("float32", "lean"):  # the others draw random bits by the index in a rank's group
            assert equal([param.detach() for param in many.parameters()], everything(alone)[:4]), name


def test_ddp_equals_one_process_and_zero_works(tmp_path):
    on_two_ranks(train_replicas, tmp_path)


@pytest.mark.parametrize("options", STATE_OPTIONS.values(), ids=STATE_OPTIONS)
def test_flat_state_dicts_of_torch_distributed_checkpoint_round_trip(alone, options):
    """As torchtitan saves them: keys such as state.0.weight.m and param_groups.0.weight.lr, in one dict."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for setup_model in (setup, single):
        model, optimizer = setup_model(mvngrad.MVNGradW, **options)
        train(model, optimizer, 2)
        optimizer.zero_grad()
        saved = get_optimizer_state_dict(model, optimizer, options=flat)
        assert "state.0.weight.u" in saved
        resumed = mvngrad.MVNGradW(model.parameters(), **options)
        resumed.init_state()
        set_optimizer_state_dict(model, resumed, saved, options=flat)
        assert resumed.param_groups[0]["lr"] == 1e-2
        assert equal(get_local_parts(optimizer), get_local_parts(resumed))


# The way over from AdamW


def convert_adamw(folder):
    model, adamw = setup(torch.optim.AdamW)
    train(model, adamw, 3)
    dcp.save({"optimizer": get_optimizer_state_dict(model, adamw)}, checkpoint_id=f"{folder}/adamw")
    adamw.zero_grad()
    whole, reference = single(torch.optim.AdamW)
    train(whole, reference, 3)
    adamw = torch.optim.AdamW(model.parameters())  # of the process that continues
    loaded = {"optimizer": get_optimizer_state_dict(model, adamw)}
    dcp.load(loaded, checkpoint_id=f"{folder}/adamw")
    set_optimizer_state_dict(model, adamw, loaded["optimizer"])
    for options in STATE_OPTIONS.values():
        expected = mvngrad.MVNGradW(whole.parameters(), **options)
        expected.load_state_dict(mvngrad.from_adamw(expected, reference.state_dict()))
        optimizer = mvngrad.MVNGradW(model.parameters(), **options)
        optimizer.load_state_dict(mvngrad.from_adamw(optimizer, adamw.state_dict()))
        for param, sharded in zip(whole.parameters(), model.parameters(), strict=True):
            param.data.copy_(sharded.full_tensor())
        wide = options.get("state_dtype", torch.float32) == torch.float32
        if wide:
            assert close(gather(optimizer), everything(expected))
        train(model, optimizer, 1)
        back = mvngrad.to_adamw(optimizer)
        assert all(isinstance(value["exp_avg_sq"], DTensor) for value in back["state"].values())
        torch.optim.AdamW(model.parameters()).load_state_dict(back)
        train(whole, expected, 1)
        after = [p.full_tensor() for p in model.parameters()]
        assert close(after, list(whole.parameters()), atol=1e-6 if wide else 2e-3)  # of steps of 1e-2


def test_sharded_adamw_checkpoint_is_converted(tmp_path):
    on_two_ranks(convert_adamw, tmp_path)
