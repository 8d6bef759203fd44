"""Saving and loading: round trips, 16-bit parameters, distributed checkpoints, and state_dicts that are refused."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from family import NAMES, OPTIMIZERS, PLAIN, each_optimizer, equal, everything, parameters, through_disk, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import mvngrad

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)


def make_trained(make, dtype=torch.float32, steps=5, **options):
    optimizer = make(parameters((4, 3), (), (0,), dtype=dtype), **options)
    train(optimizer, steps)
    return optimizer


@each_dtype
@each_optimizer
def test_state_dict_round_trip_resumes_exactly(make, dtype):
    original = make_trained(make, dtype, lr=1e-2)
    resumed = make([p.detach().clone().requires_grad_() for p in original.param_groups[0]["params"]])
    resumed.load_state_dict(through_disk(original.state_dict()))
    assert equal(everything(resumed), everything(original))
    train(original, 5, seed=2)
    train(resumed, 5, seed=2)
    assert equal(everything(resumed), everything(original))


@each_dtype
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))], ids=["deepcopy", "pickle"]
)
@each_optimizer
def test_copied_optimizers_continue_bit_for_bit(make, clone, dtype):
    original = make_trained(make, dtype, lr=1e-2)
    twin = clone(original)
    train(original, 5, seed=2)
    train(twin, 5, seed=2)
    assert equal(everything(twin), everything(original))
    assert repr(twin) == repr(original)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_optimizer
def test_moments_of_16_bit_parameters_are_still_float32_after_loading(make, dtype):
    original = make_trained(make, dtype)
    resumed = make(parameters((4, 3), (), (0,), dtype=dtype))
    resumed.load_state_dict(original.state_dict())
    for state in resumed.state.values():
        assert {state[name].dtype for name in make.rule.state_names} == {torch.float32}
    assert equal(everything(resumed)[3:], everything(original)[3:])


@each_optimizer
def test_loading_copies_tensors(make):
    original = make_trained(make)
    saved = original.state_dict()
    twin = make(parameters((4, 3), (), (0,)))
    twin.load_state_dict(saved)
    before = everything(original)
    train(twin, 3)
    assert equal(everything(original), before)
    assert all(state["step"] == 5 for state in saved["state"].values())


@each_optimizer
def test_loading_calls_pre_and_post_hooks(make):
    original, twin = make_trained(make), make(parameters((4, 3), (), (0,)))

    def double_lr(_, state_dict):
        groups = [{**group, "lr": 2 * group["lr"]} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    dtypes = []
    twin.register_load_state_dict_pre_hook(double_lr)
    twin.register_load_state_dict_post_hook(
        lambda optimizer: dtypes.extend(type(v) for s in optimizer.state.values() for v in s.values())
    )
    twin.load_state_dict(original.state_dict())
    assert twin.param_groups[0]["lr"] == 2e-3
    assert set(dtypes) == {torch.Tensor}


@each_optimizer
def test_a_loaded_capturable_optimizer_keeps_counting_steps(make):
    original = make_trained(make, capturable=True)
    twin = make(parameters((4, 3), (), (0,)))
    twin.load_state_dict(through_disk(original.state_dict()))
    assert twin.param_groups[0]["capturable"]
    train(original, 2)
    train(twin, 2)
    assert [s["step"].item() for s in twin.state.values()] == [7, 7, 7]


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@each_optimizer
def test_a_checkpoint_does_not_change_what_autograd_records(make):
    plain, recorded = (make_trained(make, steps=0, differentiable=each) for each in (False, True))
    plain.load_state_dict(recorded.state_dict())
    recorded.load_state_dict(plain.state_dict())
    assert [each.param_groups[0]["differentiable"] for each in (plain, recorded)] == [False, True]


def model_and_optimizer(make):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    return model, make(model.parameters(), lr=1e-2)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("flatten", [False, True])
@each_optimizer
def test_a_distributed_checkpoint_at_step_zero_changes_nothing(make, flatten, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    _, untouched = model_and_optimizer(make)
    model, optimizer = model_and_optimizer(make)
    optimizer.init_state()
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(saved, checkpoint_id=tmp_path / "checkpoint")
    resumed_model, resumed = model_and_optimizer(make)
    resumed.init_state()
    loaded = {"optimizer": get_optimizer_state_dict(resumed_model, resumed, options=options)}
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    set_optimizer_state_dict(resumed_model, resumed, loaded["optimizer"], options=options)
    for each in (untouched, optimizer, resumed):
        train(each, 4)
    assert equal(everything(optimizer), everything(untouched))
    assert equal(everything(resumed), everything(untouched))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_a_distributed_checkpoint_of_the_optimizer_itself(state_dtype, tmp_path):
    """It loads tensors in place, but adds entries that are no tensors under the text of a key."""
    optimizer, resumed = (make_trained(mvngrad.MVNGrad, steps=n, state_dtype=state_dtype) for n in (3, 1))
    for each, count in (optimizer, 3), (resumed, 1):
        each.state[each.param_groups[0]["params"][0]]["counts"] = {"hook": count}
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    dcp.load({"optimizer": resumed}, checkpoint_id=tmp_path)
    saved, loaded = (list(each.state.values()) for each in (optimizer, resumed))
    assert loaded[0]["counts"] == {"hook": 3}
    for before, after in zip(saved, loaded, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before.keys() - {"counts"})


def test_without_init_state_a_distributed_checkpoint_takes_a_hidden_step():
    """The reason for `init_state`: if torch stops taking this step, `init_state` can be removed."""
    model, optimizer = model_and_optimizer(mvngrad.MVNGrad)
    get_optimizer_state_dict(model, optimizer)
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}


@each_optimizer
def test_init_state_creates_what_the_first_step_would_create(make):
    early, late = make(parameters((4, 3), ())), make(parameters((4, 3), ()))
    early.init_state()
    assert all(not value.any() for state in early.state.values() for value in state.values())
    before = everything(early)
    early.init_state()
    assert equal(everything(early), before)
    train(early, 3)
    train(late, 3)
    assert equal(everything(early), everything(late))


def test_init_state_skips_frozen_parameters():
    a, b = parameters((3,), (3,))
    b.requires_grad_(False)
    optimizer = mvngrad.MVNGrad([a, b])
    optimizer.init_state()
    assert list(optimizer.state) == [a]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("source", [*OPTIMIZERS, torch.optim.Adam, torch.optim.SGD], ids=[*NAMES, "torch", "SGD"])
@each_optimizer
def test_a_state_dict_of_another_cell_is_refused_and_changes_nothing(make, source, steps):
    if make is source or (source is torch.optim.Adam and make is mvngrad.Adam and steps == 0):
        return  # before its first step, a state_dict of torch's Adam fits ours
    other = source(parameters((4, 3)), lr=1e-3)
    train(other, steps)
    optimizer = make(parameters((4, 3)))
    train(optimizer, 2)
    before, groups = everything(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=f"not a state_dict of {make.__name__}"):
        optimizer.load_state_dict(other.state_dict())
    assert equal(everything(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups


@each_optimizer
def test_a_state_dict_of_torch_is_refused_with_the_remedy(make):
    theirs = torch.optim.AdamW(parameters((4, 3)))
    train(theirs, 1)
    optimizer = make(parameters((4, 3)), state_dtype=torch.bfloat16)
    remedy = r"load mvngrad\.convert_state_dict\(state_dict, torch\.bfloat16\)$"
    if make.rule is not mvngrad.Adam.rule:
        hook = r"or, .*optimizer.register_load_state_dict_pre_hook\(mvngrad.from_adamw\) before$"
        remedy = rf"has {', '.join(make.rule.state_names)}: load mvngrad.from_adamw\(optimizer, state_dict\) {hook}"
    with pytest.raises(ValueError, match=f"it has exp_avg, as torch.optim's do.*{remedy}"):
        optimizer.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("steps", [0, 1])
@each_optimizer
def test_refusing_the_state_of_another_cell_names_that_cell(make, steps):
    for source in PLAIN:
        if source.rule == make.rule:
            continue
        name = source.__name__
        other = source(parameters((4, 3)))
        train(other, steps)
        with pytest.raises(ValueError, match=f"as that of {name} and {name}W, .*: load it into mvngrad.{name} or"):
            make(parameters((4, 3))).load_state_dict(other.state_dict())
    if make.rule != mvngrad.Adam.rule:
        theirs = torch.optim.AdamW(parameters((4, 3)))
        train(theirs, 1)
        with pytest.raises(ValueError, match=r"its state is m, v, as that of Adam and AdamW"):
            make(parameters((4, 3))).load_state_dict(mvngrad.convert_state_dict(theirs.state_dict(), None))


@pytest.mark.parametrize("make", [torch.optim.RAdam, torch.optim.NAdam, lambda p: torch.optim.Adam(p, amsgrad=True)])
def test_only_adam_of_torchs_optimizers_is_converted(make):
    theirs = make(parameters((4, 3)))
    train(theirs, 1)
    with pytest.raises(ValueError, match="only the state of Adam and AdamW, without amsgrad, can be converted"):
        mvngrad.convert_state_dict(theirs.state_dict(), None)


def test_conversion_copies_and_a_group_keeps_options_that_torch_lacks():
    theirs = torch.optim.AdamW(parameters((4, 3), dtype=torch.bfloat16))
    train(theirs, 1)
    converted = mvngrad.convert_state_dict(theirs.state_dict(), None)
    train(theirs, 1)
    params = parameters((4, 3), dtype=torch.bfloat16)
    optimizer = mvngrad.AdamW([{"params": params, "stochastic_rounding": True, "rounding_seed": 7}])
    optimizer.load_state_dict(converted)
    assert optimizer.state[params[0]]["step"] == 1
    (group,) = optimizer.param_groups
    assert (group["stochastic_rounding"], group["rounding_seed"]) == (True, 7)


def edit(*path, to):
    """A corruption: the value at `path` becomes `to`, or `to(value)`."""

    def corrupt(d):
        for key in path[:-1]:
            d = d[key]
        d[path[-1]] = to(d[path[-1]]) if callable(to) else to

    return corrupt


CORRUPTIONS = {
    "no state": (lambda d: d.pop("state"), "without state and param_groups"),
    "state not a dict": (edit("state", to=[]), "state must be a dict"),
    "groups not a list": (edit("param_groups", to=None), "param_groups a list"),
    "a group not a dict": (edit("param_groups", 0, to=3), "param_groups a list"),
    "no params": (lambda d: d["param_groups"][0].pop("params"), "dicts with params"),
    "one group too many": (lambda d: d["param_groups"].append(d["param_groups"][0]), "groups hold"),
    "a parameter lost": (lambda d: d["param_groups"][0]["params"].pop(), "groups hold"),
    "an unknown parameter": (lambda d: d["state"].update({"0": d["state"].pop(0)}), "not among its parameters"),
    "lr lost": (lambda d: d["param_groups"][0].pop("lr"), "lr"),
    "lr negative": (edit("param_groups", 0, "lr", to=-1.0), "lr=-1.0"),
    "betas broken": (edit("param_groups", 0, "betas", to=(0.9, 1.5)), r"betas\[1\]=1.5"),
    "z_clip not a number": (edit("param_groups", 0, "z_clip", to="x"), "z_clip='x'"),
    "amsgrad": (lambda d: d["param_groups"][0].update(amsgrad=True), "amsgrad"),
    "state lost": (lambda d: d["state"][0].pop("m"), "it has .* for each parameter"),
    "no dict for a parameter": (edit("state", 1, to=None), "NoneType, not a dict"),
    "state of another shape": (edit("state", 0, "m", to=torch.zeros(2)), r"m is torch.float32 of \(2,\)"),
    "state of integers": (edit("state", 0, "m", to=lambda m: m.long()), "m is torch.int64"),
    "state complex": (edit("state", 0, "m", to=lambda m: m.to(torch.complex64)), "m is torch.complex64"),
    "state sparse": (edit("state", 0, "m", to=lambda m: m.to_sparse()), "m is"),
    "state without data": (edit("state", 1, "u", to=lambda u: u.to("meta")), "u is"),
    "state not a tensor": (edit("state", 0, "s", to=None), "s is NoneType"),
    "s negative": (edit("state", 0, "s", to=lambda s: s - 1), "negative"),
    "step NaN": (edit("state", 1, "step", to=torch.tensor(float("nan"))), "step is"),
    "step infinite": (edit("state", 1, "step", to=float("inf")), "step is"),
    "step not an integer": (edit("state", 1, "step", to=2.5), "step is 2.5"),
    "step a string": (edit("state", 1, "step", to="x"), "step is 'x'"),
    "step None": (edit("state", 1, "step", to=None), "step is None"),
    "step complex": (edit("state", 1, "step", to=torch.tensor(1j)), "step is"),
}


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "int8"])
def test_other_entries_of_state_are_saved_loaded_and_converted(state_dtype):
    """As torch.optim does: timm's Lookahead has its slow weights there."""
    optimizer = make_trained(mvngrad.MVNGrad, state_dtype=state_dtype)
    (first, *_) = optimizer.param_groups[0]["params"]
    optimizer.state[first] |= {"slow": torch.full_like(first, 7.0), "counts": {"hook": 3}}
    saved = through_disk(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    wide = make_trained(mvngrad.MVNGrad)
    wide.load_state_dict(mvngrad.convert_state_dict(saved, None))
    for each in (optimizer, wide):
        state = each.state[each.param_groups[0]["params"][0]]
        assert torch.equal(state["slow"], torch.full_like(first, 7.0))
        assert state["slow"] is not saved["state"][0]["slow"]
        assert state["counts"] == {"hook": 3}
        train(each, 1)


@pytest.mark.parametrize("nothing", [None, [], 3])
def test_a_value_that_is_not_a_state_dict_is_refused(nothing):
    with pytest.raises(ValueError, match="not an optimizer's state_dict"):
        make_trained(mvngrad.MVNGrad).load_state_dict(nothing)


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_corrupted_state_dict_is_refused_and_changes_nothing(corrupt, message):
    optimizer, twin = make_trained(mvngrad.MVNGrad), make_trained(mvngrad.MVNGrad, steps=2, lr=0.5)
    broken = copy.deepcopy(optimizer.state_dict())
    corrupt(broken)
    before, groups = everything(twin), copy.deepcopy(twin.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        twin.load_state_dict(broken)
    assert equal(everything(twin), before)
    assert twin.state_dict()["param_groups"] == groups
    twin.load_state_dict(optimizer.state_dict())


def test_a_damaged_layout_of_8_bit_codes_is_named():
    optimizer = make_trained(mvngrad.MVNGrad, state_dtype="int8")
    saved = copy.deepcopy(optimizer.state_dict())
    (blocks,) = (value for value in [saved["state"][0]["m_scale"]] if isinstance(value, dict))
    blocks["layout"] = torch.tensor([[1000], [1000]])
    with pytest.raises(ValueError, match="corrupted state_dict: the layout of the 8-bit codes of m"):
        optimizer.load_state_dict(saved)


def test_a_loaded_option_that_is_none_is_refused():
    optimizer = mvngrad.MVNGrad(parameters((3,)))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["eps_s"] = None
    with pytest.raises(ValueError, match="eps_s=None is invalid"):
        optimizer.load_state_dict(saved)
