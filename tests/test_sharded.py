"""Several processes: FSDP2 and other DTensors, distributed checkpoints, DDP and ZeRO, on two real ranks (gloo)."""

import multiprocessing
import os
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from family import equal, everything, parameters, tensors
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import mvngrad
from mvngrad.optim.formats import load_state
from mvngrad.optim.tensors import get_local

LIMIT = 100
"""Seconds, after which the ranks are ended: one that waits for the other must fail a test, not block it."""

# The ranks are forked from a server that imported torch once; each would take seconds to import it.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "pytest"]
)


def on_two_ranks(scenario, folder, *arguments):
    """Run `scenario(folder, *arguments)` in two processes; what one of them raises, with its traceback, is raised."""
    ranks = torch.multiprocessing.start_processes(
        one_rank, (scenario, folder, *arguments), nprocs=2, join=False, start_method="forkserver"
    )
    end = time.monotonic() + LIMIT
    while not ranks.join(timeout=1):
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            pytest.fail(f"{scenario.__name__} did not end within {LIMIT} s")


def one_rank(rank, scenario, folder, *arguments):
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
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


def network():
    """Seven rows are four and three, and one row leaves nothing for the second rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


def sharded(model, **options):
    for layer in (model[0], model[2], model):
        fully_shard(layer, **options)
    return model


def setup(make, shard=sharded, **options):
    model = shard(network())
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


def whole(optimizer):
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in everything(optimizer)]


def here(optimizer):
    """The part of everything that is on this rank, 8-bit state as the values that its codes stand for."""
    parts = []
    for param, state in optimizer.state.items():
        kept = {name: get_local(value) for name, value in state.items()}
        slots = [name for name in kept if name != "step" and not name.endswith("_scale")]
        parts += [get_local(param).detach().clone(), kept["step"].clone()]
        parts += [value.clone() for value in load_state(slots, kept, torch.float32).values()]
    return parts


def close(left, right, rtol=1e-5, atol=1e-7):
    return len(left) == len(right) and all(torch.allclose(a, b, rtol, atol) for a, b in zip(left, right, strict=True))


# The step

KEPT = {
    "float32": {"state_dtype": torch.float32},
    "bfloat16": {"state_dtype": torch.bfloat16},
    "int8": {"state_dtype": "int8"},
    "lean": {"lean": True},
    "lean int8": {"lean": True, "state_dtype": "int8"},
}


CELLS = [(mvngrad.MVNGradW, {"weight_decay": 0.1}), (mvngrad.LaProp, {"weight_decay": 0.1})]
MORE = [
    (mvngrad.MVNGrad, {"weight_decay": 0.1, "z_clip": 1.0}),
    (mvngrad.MVNGradW, {"lean": True, "maximize": True, "lr": torch.tensor(1e-3)}),
    (mvngrad.AdaBeliefW, {}),
    (mvngrad.Adam, {"capturable": True}),
]


class Dispatched(TorchDispatchMode):
    """Counts the operations that DTensor would have to work out."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(issubclass(kind, DTensor) for kind in types)
        return function(*args, **(kwargs or {}))


def dispatched_in_a_step(model, optimizer):
    train(model, optimizer, 2)
    with Dispatched() as dispatched:
        optimizer.step()
    return dispatched.count


def trains_as_one_process_does(_, cells, fused, same):
    for make, options in cells:
        options = {"lr": 1e-2, "fused": fused, **options}
        one, many = network(), sharded(network())
        alone, optimizer = make(one.parameters(), **options), make(many.parameters(), **options)
        train(one, alone, 10)
        train(many, optimizer, 10)
        assert same(whole(optimizer), whole(alone)), make
        parts = [param.to_local().numel() for param in many.parameters()]
        assert parts == ([40, 4, 7, 1], [30, 3, 0, 0])[dist.get_rank()]
        for param, state in optimizer.state.items():
            assert all(state[slot].placements == param.placements for slot in set(state) - {"step"})
        assert dispatched_in_a_step(many, optimizer) == 0


def test_fsdp_equals_one_process_bit_for_bit(tmp_path):
    on_two_ranks(trains_as_one_process_does, tmp_path, CELLS + MORE, False, equal)


def dispatches(_):
    for options in ({}, {"state_dtype": "int8"}, {"state_dtype": torch.bfloat16}, {"lean": True}):
        assert dispatched_in_a_step(*setup(mvngrad.MVNGradW, **options)) == 0
    assert dispatched_in_a_step(*setup(torch.optim.AdamW)) > 0


def test_the_step_makes_no_dtensor_operation(tmp_path):
    on_two_ranks(dispatches, tmp_path)


def trains_otherwise(_):
    one, alone = single(mvngrad.MVNGradW)
    train(one, alone, 5)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    many, optimizer = setup(mvngrad.MVNGradW, lambda model: sharded(model, mesh=mesh))
    train(many, optimizer, 5)
    assert equal(whole(optimizer), whole(alone))

    def half(model):
        fully_shard(model[0])
        return model

    mixture, optimizer = setup(mvngrad.MVNGradW, half)
    assert {type(param.data) for param in mixture.parameters()} == {DTensor, torch.Tensor}
    train(mixture, optimizer, 5)
    assert equal(whole(optimizer), whole(alone))

    one, alone = single(mvngrad.MVNGradW)
    train(one, alone, 5, clip=0.1)
    many, optimizer = setup(mvngrad.MVNGradW)
    train(many, optimizer, 5, clip=0.1)
    assert close(whole(optimizer), whole(alone))  # the norm is summed in another order

    model, optimizer = setup(mvngrad.MVNGradW, lambda model: sharded(model.bfloat16()), stochastic_rounding=True)
    model(torch.ones(2, 10, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert {state["s"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_two_dimensional_meshes_mixtures_clipping_and_bfloat16(tmp_path):
    on_two_ranks(trains_otherwise, tmp_path)


def takes_gradients_as_they_come(_, make, fused, same):
    mesh = init_device_mesh("cpu", (2,))
    weight, *grads = tensors((7, 10), (7, 10), (7, 10), (7, 10))
    alone = torch.nn.Parameter(weight.clone())
    reference = make([alone], weight_decay=0.1)
    for alone.grad in grads:
        reference.step()

    def halves(g):
        return DTensor.from_local(g / 2, mesh, [Partial()])

    comings = {
        "Shard": lambda g: distribute_tensor(g.clone(), mesh, [Shard(0)]),
        "Replicate": lambda g: distribute_tensor(g.clone(), mesh, [Replicate()]),
        "Partial": halves,
        "still on its way": lambda g: halves(g).redistribute(mesh, [Replicate()], async_op=True),
    }
    for placement in (Shard(0), Replicate()):
        for name, come in comings.items():
            param = torch.nn.Parameter(distribute_tensor(weight.clone(), mesh, [placement]))
            optimizer = make([param], weight_decay=0.1, fused=fused)
            for g in grads:
                param.grad = come(g)
                placements = param.grad.placements
                optimizer.step()
                assert param.grad.placements == placements
            assert optimizer.state[param]["u"].placements == param.placements == (placement,)
            assert same(whole(optimizer), everything(reference)), (placement, name)


def test_gradients_placed_otherwise_are_redistributed(tmp_path):
    on_two_ranks(takes_gradients_as_they_come, tmp_path, mvngrad.MVNGradW, False, equal)


def compiles(folder, make, options):
    trains_as_one_process_does(folder, [(make, options)], True, close)
    takes_gradients_as_they_come(folder, make, True, close)


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("cell", CELLS, ids=["decoupled", "coupled"])
def test_the_compiled_step_does_the_same_to_rounding(tmp_path, cell):
    """Parts of 0 and 1 elements are not compiled, and the last elements of a row are computed apart from the rest."""
    on_two_ranks(compiles, tmp_path, *cell)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_a_part_is_stepped_as_a_plain_tensor_is(options, device):
    """On CUDA, by the kernel. Nothing is sent, so that the parts can have any shape."""
    mesh, shapes = init_device_mesh(device, (1,)), [(4, 10), (0, 10), (7,), (5, 3)]

    def spread(values):
        return [DTensor.from_local(value, mesh, [Shard(0)]) for value in values[:3]] + values[3:]

    plain = parameters(*shapes, device=device)
    mixture = [torch.nn.Parameter(value) for value in spread(tensors(*shapes, device=device))]
    reference, optimizer = mvngrad.MVNGradW(plain, **options), mvngrad.MVNGradW(mixture, **options)
    for seed in range(4):
        for params, place in ((plain, list), (mixture, spread)):
            for param, grad in zip(params, place(tensors(*shapes, device=device, seed=seed)), strict=True):
                param.grad = grad
        reference.step()
        with Dispatched() as dispatched:
            optimizer.step()
        assert seed == 0 or dispatched.count == 0  # the first makes the state
    assert equal(here(optimizer), here(reference))
    again = mvngrad.MVNGradW(mixture, **options)
    again.load_state_dict(optimizer.state_dict())
    assert equal(here(again), here(optimizer))


@pytest.mark.usefixtures("alone")
def test_a_gradient_of_the_other_kind_is_refused():
    mesh = init_device_mesh("cpu", (1,))
    plain = torch.nn.Parameter(torch.ones(2))
    spread = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    optimizer = mvngrad.MVNGrad([plain, spread])
    plain.grad, spread.grad = torch.ones(2), torch.ones(2)
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


def saves_and_resumes(folder):
    for name, options in KEPT.items():
        model, optimizer = setup(mvngrad.MVNGradW, **options)
        train(model, optimizer, 4)
        save(model, optimizer, folder / name)
        saved = optimizer.state_dict()["state"].values()
        assert all(isinstance(state[slot], DTensor) for state in saved for slot in set(state) - {"step"})
        assert all(state["s"].is_floating_point() and "s_scale" not in state for state in saved)
        values = [value.full_tensor() if isinstance(value, DTensor) else value for s in saved for value in s.values()]
        values += [param.full_tensor() for param in model.parameters()]
        if dist.get_rank() == 0:
            torch.save(values, folder / f"{name}.pt")

        resumed_model, resumed = setup(mvngrad.MVNGradW, **options)
        load(resumed_model, resumed, folder / name)
        assert equal(here(resumed), here(optimizer)), name
        train(model, optimizer, 4, seed=2)
        train(resumed_model, resumed, 4, seed=2)
        assert equal(here(resumed), here(optimizer)), name


def saves_and_resumes_at_step_zero(folder):
    for name, options in KEPT.items():
        untouched_model, untouched = setup(mvngrad.MVNGradW, **options)
        model, optimizer = setup(mvngrad.MVNGradW, **options)
        optimizer.init_state()
        save(model, optimizer, folder / name)
        resumed_model, resumed = setup(mvngrad.MVNGradW, **options)
        resumed.init_state()
        load(resumed_model, resumed, folder / name)
        for each in ((untouched_model, untouched), (model, optimizer), (resumed_model, resumed)):
            train(*each, 4)
        assert equal(here(optimizer), here(untouched)), name
        assert equal(here(resumed), here(untouched)), name
        assert {state["step"].item() for state in resumed.state.values()} == {4.0}


def kept(model, optimizer):
    """As `saves_and_resumes` left it in its file, 8-bit state as floats."""
    if optimizer.param_groups[0]["state_dtype"] == "int8":
        states = mvngrad.convert_state_dict(optimizer.state_dict(), torch.float32)["state"].values()
    else:
        states = optimizer.state.values()
    return [value for state in states for value in state.values()] + [param.detach() for param in model.parameters()]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_ranks_resumes_on_two_and_on_one(tmp_path):
    on_two_ranks(saves_and_resumes, tmp_path)
    for name, options in KEPT.items():
        small = options.get("state_dtype") == "int8"
        model, optimizer = single(mvngrad.MVNGradW, **options)
        template = mvngrad.MVNGradW(model.parameters(), lean=options.get("lean")) if small else optimizer
        load(model, optimizer, tmp_path / name, template)
        near = partial(close, rtol=1 / 8, atol=1e-4)  # the blocks of a whole tensor are not those of its shards
        assert (near if small else equal)(kept(model, optimizer), torch.load(tmp_path / f"{name}.pt")), name
        train(model, optimizer, 4, seed=2)
        if name in ("float32", "lean"):  # the others draw random bits by the place in a shard
            uninterrupted_model, uninterrupted = single(mvngrad.MVNGradW, **options)
            train(uninterrupted_model, uninterrupted, 4)
            train(uninterrupted_model, uninterrupted, 4, seed=2)
            assert equal(everything(optimizer), everything(uninterrupted)), name


def test_a_checkpoint_at_step_zero_hides_no_step(tmp_path):
    on_two_ranks(saves_and_resumes_at_step_zero, tmp_path)


def passes_whole_state_dicts(folder):
    for options in KEPT.values():
        model, optimizer = setup(mvngrad.MVNGradW, **options)
        train(model, optimizer, 4)
        asked = StateDictOptions(full_state_dict=True, cpu_offload=True)
        gathered = get_optimizer_state_dict(model, optimizer, options=asked)
        assert bool(gathered) == (dist.get_rank() == 0)
        for broadcast in (False, True):
            given = [gathered]
            if not broadcast:
                dist.broadcast_object_list(given)
            _, twin = restored = setup(mvngrad.MVNGradW, **options)
            asked = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            set_optimizer_state_dict(*restored, given[0], options=asked)
            restored[0].load_state_dict(model.state_dict())
            assert equal(here(twin), here(optimizer)), (options, broadcast)
        if gathered:
            plain_model, plain = single(mvngrad.MVNGradW, **options)
            set_optimizer_state_dict(plain_model, plain, gathered)


def test_full_state_dicts_round_trip(tmp_path):
    on_two_ranks(passes_whole_state_dicts, tmp_path)


def spread_and_plain(state_dtype):
    mesh = init_device_mesh("cpu", (1,))
    (value,) = tensors((3, 4))
    spread = torch.nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)]))
    plain = torch.nn.Parameter(value.clone())
    spread.grad, plain.grad = distribute_tensor(value.clone(), mesh, [Shard(0)]), value.clone()
    made = [mvngrad.MVNGradW([param], state_dtype=state_dtype) for param in (spread, plain)]
    for optimizer in made:
        optimizer.step()
    return made


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16], ids=str)
def test_state_that_is_not_sharded_as_its_parameter_is_refused(state_dtype):
    spread, plain = spread_and_plain(state_dtype)
    with pytest.raises(ValueError, match="m is whole, its parameter sharded: load it by set_optimizer_state_dict"):
        spread.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="m is sharded, its parameter whole: save it by get_optimizer_state_dict"):
        plain.load_state_dict(spread.state_dict())


@pytest.mark.usefixtures("alone")
def test_8_bit_blocks_are_not_cut_into_shards_but_converted():
    spread, plain = spread_and_plain("int8")
    with pytest.raises(ValueError, match=r"m is in 8-bit blocks, which cannot be cut where shards are"):
        spread.load_state_dict(plain.state_dict())

    one, small = single(mvngrad.MVNGradW, state_dtype="int8")
    train(one, small, 3)
    many, wide = setup(mvngrad.MVNGradW, state_dtype=torch.float32)
    floats = mvngrad.convert_state_dict(get_optimizer_state_dict(one, small), torch.float32)
    set_optimizer_state_dict(many, wide, floats, options=StateDictOptions(full_state_dict=True))
    again = mvngrad.MVNGradW(many.parameters(), state_dtype="int8")
    again.load_state_dict(mvngrad.convert_state_dict(wide.state_dict(), "int8"))
    assert again.state[many[0].weight]["m"].dtype == torch.uint8
    saved = [
        [get_local(value) for kept in each["state"].values() for value in kept.values()]
        for each in (again.state_dict(), floats)
    ]
    assert equal(*saved)


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
    assert equal(here(again), here(optimizer))


# Replicas


def replicates(_):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of its own deprecated parts

    one, alone = single(mvngrad.MVNGradW)
    train(one, alone, 6)
    many, optimizer = setup(mvngrad.MVNGradW, DistributedDataParallel)
    train(many, optimizer, 6)
    assert equal(everything(optimizer), everything(alone))

    for name, options in KEPT.items():
        one, alone = single(mvngrad.MVNGradW, **options)
        train(one, alone, 4)
        train(one, alone, 4, seed=2)
        many, made = DistributedDataParallel(network()), {"optimizer_class": mvngrad.MVNGradW, "lr": 1e-2, **options}
        first, resumed = (ZeroRedundancyOptimizer(many.parameters(), **made) for _ in range(2))
        train(many, first, 4)
        first.consolidate_state_dict(to=0)
        saved = [first.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved)
        resumed.load_state_dict(saved[0])
        assert equal(everything(resumed.optim), everything(first.optim)), name
        train(many, resumed, 4, seed=2)
        if name in ("float32", "lean"):  # the others draw random bits by the place in a rank's group
            assert equal([param.detach() for param in many.parameters()], everything(alone)[:4]), name


def test_ddp_equals_one_process_and_zero_works(tmp_path):
    on_two_ranks(replicates, tmp_path)
