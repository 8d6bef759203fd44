"""Split master weights: bfloat16 parameters whose missing bits are state."""

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from family import OPTIMIZERS, each_device, equal, new_state, step, tensors
from test_sharded import on_two_ranks
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mvngrad
from mvngrad.optim.formats import LOW_DTYPES, Rounding, join_master, split_master
from mvngrad.rule import LEAN, MVNGRAD, Hyper

STATE = [{}, {"state_dtype": torch.bfloat16}, {"state_dtype": "int8"}, {"state_dtype": "int8", "lean": True}]
each_state = pytest.mark.parametrize("options", STATE, ids=["float32", "bf16", "int8", "lean"])
each_width = pytest.mark.parametrize("bits", [24, 32])


def round_half_away(master):
    """The nearest bfloat16 number, ties away from zero, computed in float64."""
    wide = master.double()
    exponent = torch.where(wide == 0, 0.0, wide.abs().log2().floor()).clamp(min=-126)
    unit = 2.0 ** (exponent - 7)
    return (((wide / unit).abs() + 0.5).floor() * unit).copysign(wide).to(torch.bfloat16)


def split_all(master, dtype):
    param, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=dtype)
    split_master(master, param, low)
    return param, low


def test_32_bits_are_split_and_joined_without_loss():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (300_000,), generator=generator, dtype=torch.int64)
    ties = (torch.arange(-(2**15), 2**15) << 16) + 2**15  # every number halfway between two of bfloat16
    master = torch.cat([bits, ties, ties - 1, ties + 1]).to(torch.int32).view(torch.float32)
    param, low = split_all(master, torch.int16)
    joined = join_master(param, low)
    finite = master.isfinite()
    assert torch.equal(joined.view(torch.int32)[finite], master.view(torch.int32)[finite])
    assert torch.equal(joined.isnan(), master.isnan())
    normal = finite & (master.abs() > 1e-37) & (master.abs() < 3e38)
    assert torch.equal(param[normal], round_half_away(master[normal]))


def test_24_bits_are_rounded_to_the_nearest_or_at_random_without_bias():
    master = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    joined = join_master(*split_all(master, torch.int8))
    assert ((joined - master).abs() <= master.abs() * 2.0**-16).all()
    param, low = split_all(torch.full((65_536,), 1.0 + 37 * 2.0**-23), torch.int8)
    split_master(torch.full((65_536,), 1.0 + 37 * 2.0**-23), param, low, torch.arange(65_536, dtype=torch.int32))
    values = join_master(param, low)
    assert set(values.tolist()) == {1.0, 1.0 + 2.0**-15}
    assert values.double().mean() == 1.0 + 37 * 2.0**-23


def train_pair(make, options, bits, device, fused=None, steps=8):
    """Masters, and the same as float32 parameters whose gradients are taken at their rounding to bfloat16."""
    shapes = (21, 15), (7,), (3, 5, 2)
    reference = [torch.nn.Parameter(x.bfloat16().float()) for x in tensors(*shapes, device=device)]
    params = [torch.nn.Parameter(x.detach().bfloat16()) for x in reference]
    path = {"fused": fused, "foreach": None if fused is None else False}
    with_masters = make(params, lr=1e-3, master_bits=bits, **options, **path)
    in_float32 = make(reference, lr=1e-3, **options, **path)
    for t in range(1, steps + 1):
        for i, (param, wide) in enumerate(zip(params, reference, strict=True)):
            noise = tensors(*shapes, device=device, seed=t)[i]
            param.grad = (param.detach().float() + noise).bfloat16()
            seen = round_half_away(wide.detach()) if bits == 32 else param.detach()
            wide.grad = (seen.float() + noise).bfloat16().float()
        with_masters.step()
        in_float32.step()
    masters = [join_master(param.detach(), with_masters.state[param]["low"]) for param in params]
    return params, masters, [wide.detach() for wide in reference], with_masters


@each_device
@each_state
def test_with_32_bits_a_run_is_that_of_float32_parameters_seen_in_bfloat16(options, device, kernel_options):
    params, masters, reference, _ = train_pair(mvngrad.MVNGradW, options, 32, device, **kernel_options)
    for param, master, wide in zip(params, masters, reference, strict=True):
        assert torch.equal(master, wide)
        assert torch.equal(param, round_half_away(wide))


@each_state
def test_with_32_bits_the_eager_step_has_the_same_masters(options):
    _, masters, reference, _ = train_pair(mvngrad.MVNGradW, options, 32, "cpu", fused=False)
    assert all(map(torch.equal, masters, reference))


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_every_optimizer_has_masters(make):
    _, masters, reference, _ = train_pair(make, {}, 32, "cpu", fused=False, steps=5)
    assert all(map(torch.equal, masters, reference))


@each_device
def test_with_24_bits_every_step_rounds_by_less_than_2_to_the_minus_15(device, kernel_options):
    _, masters, reference, _ = train_pair(mvngrad.MVNGradW, {}, 24, device, steps=1, **kernel_options)
    for master, wide in zip(masters, reference, strict=True):
        assert ((master - wide).abs() <= 1.001 * 2.0**-15 * wide.abs()).all()  # and the last bits of float32
    _, masters, reference, _ = train_pair(mvngrad.MVNGradW, {}, 24, device, **kernel_options)
    for master, wide in zip(masters, reference, strict=True):
        error = (master - wide).abs() / (wide.abs() + 1e-2)
        assert error.max() < 8 * 2.0**-15  # eight steps
        assert error.mean() < 3 * 2.0**-15  # at random: they add up like a random walk


@each_device
def test_kernel_and_eager_step_round_masters_by_the_same_bits(device, kernel_options):
    kernel = train_pair(mvngrad.MVNGradW, {}, 24, device, steps=1, **kernel_options)[1]
    eager = train_pair(mvngrad.MVNGradW, {}, 24, device, fused=False, steps=1)[1]
    for a, b in zip(kernel, eager, strict=True):
        assert (a == b).float().mean() > 0.9  # other values of x in float32 are rounded to another neighbour
        torch.testing.assert_close(a, b, rtol=2.0**-14, atol=0)


@pytest.mark.usefixtures("cpp_compiler", "triton")
@each_width
@each_state
def test_both_kernels_step_masters_bit_for_bit_alike(options, bits):
    """Also masters that are NaN, infinite, or halfway between two bfloat16 numbers."""
    rule, rounding = (LEAN if options.get("lean") else MVNGRAD), Rounding(3, params=bits == 24)
    runs = []
    for backend in ("cpu", "cuda"):
        params = tensors((700,), dtype=torch.bfloat16)
        params[0][:3] = torch.tensor([float("nan"), float("inf"), 0.0])
        state = new_state(rule, options.get("state_dtype", torch.float32), params)
        state["low"] = [torch.full((700,), -(2 ** (bits - 17)), dtype=LOW_DTYPES[bits])]
        steps = [torch.ones(())]
        for t in range(2):
            hyper = Hyper(lr=1e-3, beta1=0.97, weight_decay=0.1, decoupled=True)
            grads = tensors((700,), dtype=torch.bfloat16, seed=t)
            step(backend, rule, hyper, params, grads, state, steps, rounding=rounding)
        runs.append([*params, *(stored for (stored,) in state.values())])
    assert equal(*runs)


@each_device
@each_width
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "kernel"])
def test_weights_that_are_set_to_zero_by_hand_stay_finite(bits, fused, device, kernel_options):
    """Pruning, or loading biases of 0: `low` still has bits below the old weight, and 0 minus them would be NaN."""
    (start,) = tensors((2000,), dtype=torch.bfloat16, device=device)
    param = torch.nn.Parameter(start)
    path = kernel_options if fused else {"fused": False}
    optimizer = mvngrad.MVNGradW([param], lr=1e-3, master_bits=bits, **path)
    for t in range(2):
        (param.grad,) = tensors((2000,), dtype=torch.bfloat16, device=device, seed=t)
        optimizer.step()
    low = optimizer.state[param]["low"]
    assert (low < 0).any()
    with torch.no_grad():
        param[:1000], param[1000:] = 0.0, -0.0
    assert (join_master(param.detach(), low).abs() < 1e-37).all()
    optimizer.step()
    assert (param.abs() > 0).all()
    assert (param.abs() < 0.01).all()


@each_width
def test_steps_too_small_for_bfloat16_are_not_lost(bits):
    param = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = mvngrad.AdamW([param], lr=1e-6, weight_decay=0.0, betas=(0.0, 0.0), master_bits=bits)
    for _ in range(100):
        param.grad = torch.ones_like(param)  # a step of 1e-6, over 2^-8 / 2 for bfloat16
        optimizer.step()
    moved = 1 - join_master(param.detach(), optimizer.state[param]["low"]).double().mean()
    assert moved.item() == pytest.approx(1e-4, rel=0.02)


def make_model(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).to(dtype)


def train(model, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 10, generator=generator)
        model(x.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@each_state
@each_width
def test_a_checkpoint_continues_exactly(bits, options):
    model = make_model(torch.bfloat16)
    optimizer = mvngrad.MVNGradW(model.parameters(), master_bits=bits, **options)
    train(model, optimizer, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 5, seed=2)
    other = make_model(torch.bfloat16)
    resumed = mvngrad.MVNGradW(other.parameters(), master_bits=bits, **options)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, 5, seed=2)
    ends = [mvngrad.get_master_state_dict(*pair) for pair in ((model, optimizer), (other, resumed))]
    torch.testing.assert_close(*ends, rtol=0, atol=0)
    converted = mvngrad.convert_state_dict(saved[1], torch.float32)
    assert all(torch.equal(state["low"], saved[1]["state"][key]["low"]) for key, state in converted["state"].items())


def test_checkpoints_of_other_widths_are_refused_and_those_without_masters_load():
    model = make_model(torch.bfloat16)
    none, narrow, wide = (mvngrad.MVNGradW(model.parameters(), master_bits=bits) for bits in (None, 24, 32))
    for optimizer in (none, narrow):
        train(model, optimizer, 1)
    with pytest.raises(ValueError, match=r"saved with master_bits=24; make the optimizer with that"):
        wide.load_state_dict(narrow.state_dict())
    with pytest.raises(ValueError, match="saved with master_bits=24"):
        none.load_state_dict(narrow.state_dict())
    wide.load_state_dict(none.state_dict())
    assert all(not state["low"].any() for state in wide.state.values())


@each_width
def test_weights_go_to_and_from_float32(bits):
    source = make_model(torch.float32)
    model = make_model(torch.bfloat16)
    optimizer = mvngrad.MVNGradW(model.parameters(), master_bits=bits)
    before = mvngrad.get_master_state_dict(model, optimizer)  # without state
    assert all(
        value.dtype == torch.float32 and torch.equal(value, model.state_dict()[k]) for k, value in before.items()
    )
    mvngrad.load_master_state_dict(model, optimizer, source.state_dict())
    masters = mvngrad.get_master_state_dict(model, optimizer)
    assert {value.dtype for value in masters.values()} == {torch.float32}
    bound = 0 if bits == 32 else 2.0**-16
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], round_half_away(value)) or bits == 24
        torch.testing.assert_close(masters[name], value, rtol=bound, atol=0)
    source.load_state_dict(masters)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master_bits": 16}, "must be None, 24 or 32"),
        ({"master_bits": 32, "stochastic_rounding": True}, "stochastic_rounding=True exclude each other"),
        ({"master_bits": 32, "foreach": True}, "foreach=True exclude each other"),
    ],
)
def test_options_that_exclude_masters_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mvngrad.MVNGradW([torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))], **options)


def test_parameters_that_are_not_bfloat16_are_refused():
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    optimizer = mvngrad.MVNGradW([param], master_bits=32)
    with pytest.raises(ValueError, match=r"here is one of torch\.float32: cast it"):
        optimizer.step()
    assert not optimizer.state[param]


@pytest.mark.parametrize(("bits", "options"), [(32, STATE[0]), (24, STATE[0]), (24, STATE[1]), (24, STATE[3])], ids=str)
def test_torch_compile_traces_a_step_with_masters_into_one_graph(bits, options):
    counter = CompileCounter()
    twins = []
    for compiled in (False, True):
        model = make_model(torch.bfloat16)
        params = list(model.parameters())
        optimizer = mvngrad.MVNGradW(params, lr=torch.tensor(1e-2), master_bits=bits, **options)
        torch._dynamo.reset()
        take = torch.compile(optimizer.step, backend=counter) if compiled else optimizer.step
        for seed in range(3):
            for param, grad in zip(params, tensors(*(p.shape for p in params), seed=seed), strict=True):
                param.grad = grad.bfloat16()
            take()
        twins.append(mvngrad.get_master_state_dict(model, optimizer))
    torch._dynamo.reset()
    assert counter.frame_count == 1
    torch.testing.assert_close(*twins, rtol=0, atol=1e-4)


def train_sharded(folder):
    """FSDP2 equals one process, and its checkpoint continues exactly. All ranks have the same data."""
    plain = make_model(torch.bfloat16)
    optimizer = mvngrad.MVNGradW(plain.parameters(), lr=1e-2, master_bits=32)
    train(plain, optimizer, 3)
    train(plain, optimizer, 3, seed=2)
    expected = mvngrad.get_master_state_dict(plain, optimizer)
    for bits, options in ((32, {}), (24, {}), (24, {"state_dtype": "int8", "lean": True})):
        ends, saved = [], None
        for resumed in (False, True):
            model = make_model(torch.bfloat16)
            fully_shard(model)
            optimizer = mvngrad.MVNGradW(model.parameters(), lr=1e-2, master_bits=bits, **options)
            if resumed:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            else:
                train(model, optimizer, 3)
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            train(model, optimizer, 3, seed=2)
            masters = mvngrad.get_master_state_dict(model, optimizer)
            ends.append({name: value.full_tensor() for name, value in masters.items()})
        torch.testing.assert_close(*ends, rtol=0, atol=0)
        if not options:  # 24 bits are rounded at random, by bits that depend on the place in a shard
            torch.testing.assert_close(ends[0], expected, rtol=0, atol=0 if bits == 32 else 1e-3)
        assert any((value != value.bfloat16().float()).any() for value in ends[0].values())


def test_sharded_parameters_have_masters(tmp_path):
    on_two_ranks(train_sharded, tmp_path)


def setup_masters(sharded, **options):
    model = make_model(torch.bfloat16)
    if sharded:
        fully_shard(model)
    return model, mvngrad.MVNGradW(model.parameters(), master_bits=32, **options)


def gather_masters(model, optimizer):
    masters = mvngrad.get_master_state_dict(model, optimizer)
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in masters.items()}


def load_full_state_dicts(_folder):
    """Between sharded and whole parameters, with the state_dict on all ranks or sent by rank 0."""
    for sharded, state_dtype in product((True, False), (None, "int8")):
        model, optimizer = setup_masters(sharded, lr=1e-2, state_dtype=state_dtype)
        train(model, optimizer, 3)
        expected = gather_masters(model, optimizer)
        assert any((value != value.bfloat16().float()).any() for value in expected.values())
        weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        if not sharded:
            state = mvngrad.convert_state_dict(state, state_dtype and "int8 as float32")
        for to_shards, broadcast in product((True, False), (True, False)):
            model, optimizer = setup_masters(to_shards, lr=1e-2, state_dtype=state_dtype)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            empty = broadcast and dist.get_rank() > 0
            # Copies, because torch writes shards into the dicts that it loads.
            set_model_state_dict(model, {} if empty else copy.deepcopy(weights), options=options)
            set_optimizer_state_dict(model, optimizer, {} if empty else copy.deepcopy(state), options=options)
            torch.testing.assert_close(gather_masters(model, optimizer), expected, rtol=0, atol=0)
            train(model, optimizer, 1)


def test_full_state_dicts_have_all_32_bits_of_masters(tmp_path):
    on_two_ranks(load_full_state_dicts, tmp_path)


def load_zero(_folder):
    """It copies state_dicts into the state of the optimizer, without its load_state_dict."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make_model(torch.bfloat16))
    options = {"lr": 1e-2, "master_bits": 32, "state_dtype": "int8"}
    optimizer, other = (ZeroRedundancyOptimizer(model.parameters(), mvngrad.MVNGradW, **options) for _ in range(2))
    train(model.module, optimizer, 3)
    expected = mvngrad.get_master_state_dict(model.module, optimizer.optim)
    optimizer.consolidate_state_dict()
    saved = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    other.load_state_dict(saved[0])
    states = [each.optim.state_dict()["state"] for each in (other, optimizer)]  # of `other` before its first step
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert any((value != value.bfloat16().float()).any() for value in expected.values())
    torch.testing.assert_close(mvngrad.get_master_state_dict(model.module, other.optim), expected, rtol=0, atol=0)
    train(model.module, other, 1)


def test_zero_loads_masters(tmp_path):
    on_two_ranks(load_zero, tmp_path)


def refuse_whole_state(_folder):
    model, optimizer = setup_masters(sharded=False)
    train(model, optimizer, 1)
    _, sharded = setup_masters(sharded=True)
    with pytest.raises(ValueError, match=r"m is whole, its parameter sharded: .* full_state_dict=True"):
        sharded.load_state_dict(optimizer.state_dict())


def test_whole_state_with_masters_is_refused_by_shards_with_the_remedy(tmp_path):
    on_two_ranks(refuse_whole_state, tmp_path)


def test_a_state_dict_shares_the_memory_of_masters():
    model, optimizer = setup_masters(sharded=False)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()["state"]
    for i, param in enumerate(model.parameters()):
        assert saved[i]["low"].data_ptr() == optimizer.state[param]["low"].data_ptr()


def test_masters_of_frozen_parameters_are_loaded_too():
    """They may be trained later."""
    model = torch.nn.Linear(4, 4, bias=False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.bfloat16().requires_grad_(False)
    optimizer = mvngrad.MVNGradW(model.parameters(), master_bits=32)
    mvngrad.load_master_state_dict(model, optimizer, weights)
    assert torch.equal(mvngrad.get_master_state_dict(model, optimizer)["weight"], weights["weight"])


def test_masters_of_wrapped_modules_have_the_names_of_the_state_dict():
    """Activation checkpointing gives parameters other names than the state_dict has."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 1))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.bfloat16()
    optimizer = mvngrad.MVNGradW(model.parameters(), master_bits=32)
    mvngrad.load_master_state_dict(model, optimizer, weights)
    masters = mvngrad.get_master_state_dict(model, optimizer)
    assert masters.keys() == weights.keys()
    assert equal(masters.values(), weights.values())


class Versioned(torch.nn.Module):
    """With extra state that is not a tensor, and a version by which old weights are doubled."""

    _version = 2

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        assert state == {"a": 1}

    def _load_from_state_dict(self, state_dict, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def test_masters_of_modules_with_extra_state_and_versions():
    model = Versioned(torch.bfloat16)
    optimizer = mvngrad.MVNGrad(model.parameters(), master_bits=32)
    masters = mvngrad.get_master_state_dict(model, optimizer)
    wide = Versioned(torch.float32)
    wide.load_state_dict(masters)
    assert torch.equal(wide.weight, torch.ones(3))
    mvngrad.load_master_state_dict(model, optimizer, masters)
    assert torch.equal(model.weight, torch.ones(3))


@each_width
def test_masters_have_the_bits_of_weights_that_a_module_renames_or_changes(bits):
    """An early version of the module doubled its weights, and had another name for them."""

    def rename(module, state_dict, prefix, *rest):
        state_dict[f"{prefix}0.weight"] = state_dict.pop(f"{prefix}w")

    model = torch.nn.Sequential(Versioned(torch.bfloat16))
    model.register_load_state_dict_pre_hook(rename)
    optimizer = mvngrad.MVNGrad(model.parameters(), master_bits=bits)
    early = {"w": torch.tensor([0.1, -2 / 3, 1e-5]), "0._extra_state": {"a": 1}}
    mvngrad.load_master_state_dict(model, optimizer, early)
    masters = mvngrad.get_master_state_dict(model, optimizer)
    torch.testing.assert_close(masters["0.weight"], 2 * early["w"], rtol=0 if bits == 32 else 2.0**-16, atol=0)


def test_masters_of_weights_that_are_changed_after_loading_are_those_weights():
    model = torch.nn.Linear(3, 1, bias=False).bfloat16()

    def zero_first(module, keys):
        with torch.no_grad():
            module.weight[0, 0] = 0

    model.register_load_state_dict_post_hook(zero_first)
    optimizer = mvngrad.MVNGrad(model.parameters(), master_bits=32)
    mvngrad.load_master_state_dict(model, optimizer, {"weight": torch.tensor([[0.1, 0.2, 0.3]])})
    masters = mvngrad.get_master_state_dict(model, optimizer)
    assert torch.equal(masters["weight"], torch.tensor([[0.0, 0.2, 0.3]]))


@pytest.mark.parametrize(
    "use", [mvngrad.get_master_state_dict, lambda *pair: mvngrad.load_master_state_dict(*pair, {})]
)
def test_masters_need_the_model_and_the_optimizer_that_steps_it(use):
    model = make_model(torch.bfloat16)
    with pytest.raises(ValueError, match="steps none of this model's parameters; pass the model that it steps"):
        use(model, mvngrad.MVNGradW(copy.deepcopy(model).parameters(), master_bits=32))
    with pytest.raises(TypeError, match=r"AdamW has none of their state\. If it wraps one, pass that"):
        use(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, lambda low: low.to("meta")], ids=["sparse", "meta"])
def test_bits_without_memory_are_refused(change):
    model, optimizer = setup_masters(sharded=False)
    train(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["low"] = change(saved["state"][0]["low"])
    with pytest.raises(ValueError, match="corrupted state_dict: low is"):
        optimizer.load_state_dict(saved)
