"""Bad input raises a ValueError that names the argument, its value and what would be valid."""

import math

import numpy as np
import pytest
import torch
from family import OPTIMIZERS, each_optimizer, equal, everything, parameters, train

import mvngrad

INVALID = [
    ({"lr": -1e-3}, r"lr=-0.001 .* finite and >= 0"),
    ({"lr": math.inf}, r"lr=inf .* finite and >= 0"),
    ({"lr": math.nan}, r"lr=nan .* finite and >= 0"),
    ({"lr": torch.tensor(-1.0)}, r"lr=tensor\(-1.\) .* finite and >= 0"),
    ({"lr": torch.ones(2)}, r"lr has 2 elements"),
    ({"eps": torch.ones(2)}, r"eps has 2 elements; a tensor eps must have one"),
    ({"lr": "fast"}, r"lr='fast' .* finite and >= 0"),
    ({"weight_decay": [0.1]}, r"weight_decay=\[0.1\] .* finite and >= 0"),
    ({"eps": -1e-8}, r"eps=-1e-08 .* finite and >= 0"),
    ({"eps": math.nan}, r"eps=nan .* finite and >= 0"),
    ({"weight_decay": -0.1}, r"weight_decay=-0.1 .* finite and >= 0"),
    ({"betas": (1.0, 0.999)}, r"betas\[0\]=1.0 .* in \[0, 1\)"),
    ({"betas": (-0.1, 0.999)}, r"betas\[0\]=-0.1 .* in \[0, 1\)"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0 .* in \[0, 1\)"),
    ({"betas": (0.9, math.nan)}, r"betas\[1\]=nan .* in \[0, 1\)"),
    ({"betas": (0.9,)}, r"betas=\(0.9,\) .* two numbers"),
    ({"betas": 0.9}, r"betas=0.9 .* two numbers"),
    ({"betas": ("a", 0.9)}, r"betas=\('a', 0.9\) .* two numbers"),
    ({"betas": (torch.tensor(0.9), torch.tensor(0.9))}, r"two numbers .* not tensors: pass float\(beta\)"),
    ({"foreach": True, "differentiable": True}, r"foreach=True and differentiable=True exclude"),
    ({"foreach": True, "fused": True}, r"foreach=True and fused=True exclude"),
    ({"maximize": "False"}, r"maximize='False' is invalid; it must be True or False"),
]


@pytest.mark.parametrize(("options", "message"), INVALID, ids=[str(options) for options, _ in INVALID])
@each_optimizer
def test_invalid_options_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(parameters((3,)), **options)
    with pytest.raises(ValueError, match=message):  # also as an option of a group
        make([{"params": parameters((3,)), **options}])


@each_optimizer
def test_one_group_alone_cannot_be_differentiable(make):
    with pytest.raises(ValueError, match="differentiable=True cannot be set for one group"):
        make([{"params": parameters((3,)), "differentiable": True}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "x"}, "lr='x' is invalid; it must be finite and >= 0"),
        ({"lr": None}, "lr=None is invalid; it must be finite and >= 0"),
        ({"lr": torch.ones(2)}, "lr has 2 elements; a tensor lr must have one"),
        ({"weight_decay": "x"}, "weight_decay='x' is invalid; it must be finite and >= 0"),
    ],
    ids=str,
)
def test_decoupled_rates_name_what_is_not_a_number(options, message):
    with pytest.raises(ValueError, match=f"MVNGradW: {message}"):
        mvngrad.MVNGradW(parameters((3,)), decouple_lr=True, **options)


def test_a_state_dict_with_a_decoupled_rate_and_no_max_lr_is_refused():
    optimizer = mvngrad.MVNGradW(parameters((3,)))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["decouple_lr"] = True
    with pytest.raises(ValueError, match="max_lr=None is invalid; with decouple_lr=True it must be the largest lr"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mvngrad.MVNGradW, "in a group that has no max_lr, .* set group\\['max_lr'\\] too"),
        (mvngrad.MVNGrad, "decouple_lr=True is for decoupled weight decay; use the class whose name ends in W"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_decoupled_rate_set_by_hand_without_max_lr_stops_the_whole_step(make, message):
    params = parameters((3,), (3,))
    optimizer = make([{"params": [param]} for param in params], lr=0.1, weight_decay=0.1)
    train(optimizer, 1)
    optimizer.param_groups[1]["decouple_lr"] = True
    before = everything(optimizer)
    with pytest.raises(ValueError, match=message):
        train(optimizer, 1)
    assert equal(before, everything(optimizer))
    assert "lr: 0.1" in repr(optimizer)


def test_a_decoupled_rate_set_by_hand_with_max_lr_is_obeyed():
    (param,) = parameters((3,))
    before = param.detach().clone()
    optimizer = mvngrad.MVNGradW([param], lr=0.1, weight_decay=0.01)
    optimizer.param_groups[0] |= {"decouple_lr": True, "max_lr": 0.2}
    param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.testing.assert_close(param.detach(), before * (1 - 0.1 / 0.2 * 0.01))


@pytest.mark.parametrize(("name", "value"), [("eps_s", 1e-16), ("beta_mean", 0.9), ("z_clip", 1.0)])
@each_optimizer
def test_an_option_of_another_cell_is_refused(make, name, value):
    if name in make.rule.options:
        assert make(parameters((3,)), **{name: value}).param_groups[0][name] == value
        return
    for arguments in [(parameters((3,)), {name: value}), ([{"params": parameters((3,)), name: value}], {})]:
        with pytest.raises(ValueError, match=f"has no {name}={value}; it belongs to .*MVN-Grad"):
            make(arguments[0], **arguments[1])


SET_BY_HAND = {"eps_s": 0.1, "beta_mean": 0.5, "z_clip": 1.0, "lean": True}


@pytest.mark.parametrize(("make", "name"), [(make, name) for make in OPTIMIZERS for name in make.rule.missing_options])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_option_of_another_cell_set_by_hand_stops_the_whole_step(make, name, steps):
    """Most of them would change the rule: an Adam with lean=True would be lean MVN-Grad."""
    value = SET_BY_HAND[name]
    optimizer = make([{"params": parameters((3,))}, {"params": parameters((4,))}])
    train(optimizer, steps)
    optimizer.param_groups[1][name] = value
    before = everything(optimizer)
    message = f"^{make.__name__} has no {name}={value}; it belongs to .*MVN-Grad"
    with pytest.raises(ValueError, match=message):
        train(optimizer, 1)
    with pytest.raises(ValueError, match=message):
        optimizer.init_state()
    assert equal(before, everything(optimizer))
    del optimizer.param_groups[1][name]
    train(optimizer, 1)


@each_optimizer
def test_a_misspelled_argument_names_the_class_and_the_closest_argument(make):
    message = r"__init__\(\) got an unexpected keyword argument 'weigth_decay'. Did you mean 'weight_decay'\?$"
    with pytest.raises(TypeError, match=f"^{make.__name__}.{message}"):
        make(parameters((3,)), weigth_decay=0.1)
    with pytest.raises(TypeError, match=rf"^{make.__name__}.__init__\(\) .* argument 'amsgrad'$"):
        make(parameters((3,)), amsgrad=True)
    with pytest.raises(TypeError, match=rf"^{make.__name__}.__init__\(\) missing a required argument: 'params'"):
        make()


def test_a_misspelled_argument_is_not_taken_for_one_of_another_cell():
    with pytest.raises(TypeError, match=r"^Adam.__init__\(\) .* 'epss'. Did you mean 'eps'\?$"):
        mvngrad.Adam(parameters((3,)), epss=1e-8)
    with pytest.raises(TypeError, match=r"^AdaBelief.__init__\(\) .* 'leen'$"):
        mvngrad.AdaBelief(parameters((3,)), leen=True)


@pytest.mark.parametrize("make", [m for m in OPTIMIZERS if m.rule.centered], ids=lambda m: m.__name__)
def test_variance_cells_reject_beta1_zero_with_the_reason(make):
    with pytest.raises(ValueError, match=r"betas\[0\]=0.* > 0 here: at 0 the mean m equals the gradient"):
        make(parameters((3,)), betas=(0.0, 0.999))
    with pytest.raises(ValueError, match=r"eps_s=-1e-08"):
        make(parameters((3,)), eps_s=-1e-8)


def test_with_beta_mean_beta1_may_be_zero():
    train(mvngrad.MVNGrad(parameters((3,)), betas=(0.0, 0.999), beta_mean=0.9), 2)
    with pytest.raises(ValueError, match=r"beta_mean=0"):
        mvngrad.MVNGrad(parameters((3,)), beta_mean=0.0)
    with pytest.raises(ValueError, match=r"beta_mean=1.0 .* in \[0, 1\)"):
        mvngrad.MVNGrad(parameters((3,)), beta_mean=1.0)


@pytest.mark.parametrize("make", [mvngrad.Adam, mvngrad.LaProp])
def test_second_moment_cells_accept_beta1_zero(make):
    train(make(parameters((3,)), betas=(0.0, 0.999)), 2)


@pytest.mark.parametrize("make", [m for m in OPTIMIZERS if m.rule.momentum_last], ids=lambda m: m.__name__)
@pytest.mark.parametrize("z_clip", [0.0, -1.0, math.nan, "a"])
def test_z_clip_must_be_positive(make, z_clip):
    with pytest.raises(ValueError, match=f"z_clip={z_clip!r} .* > 0"):
        make(parameters((3,)), z_clip=z_clip)


@each_optimizer
def test_an_empty_parameter_list_is_refused(make):
    with pytest.raises(ValueError, match="empty parameter list"):
        make([])


@each_optimizer
def test_a_sparse_gradient_anywhere_stops_the_whole_step(make):
    embedding, (x,) = torch.nn.Embedding(4, 2, sparse=True), parameters((3,))
    optimizer = make([{"params": [x]}, {"params": embedding.parameters()}])
    embedding(torch.tensor([1])).sum().backward()
    x.grad = torch.ones(3)
    before = [p.detach().clone() for p in (x, embedding.weight)]
    with pytest.raises(ValueError, match=r"needs dense gradients.*sparse=False"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip((x, embedding.weight), before, strict=True))


@each_optimizer
def test_a_sparse_gradient_after_dense_ones_is_refused(make):
    (x,) = parameters((4, 2))
    optimizer = make([x])
    train(optimizer, 2)
    x.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(ValueError, match="needs dense gradients"):
        optimizer.step()


@each_optimizer
def test_stochastic_rounding_of_float16_parameters_is_refused(make):
    optimizer = make(parameters((3,), dtype=torch.float16), stochastic_rounding=True)
    with pytest.raises(ValueError, match=r"rounds bfloat16 parameters; here is a float16"):
        train(optimizer, 1)


@each_optimizer
def test_decoupled_weight_decay_cannot_be_set_in_a_group(make):
    with pytest.raises(ValueError, match="decoupled_weight_decay cannot be set; use the class whose name ends in W"):
        make([{"params": parameters((3,)), "decoupled_weight_decay": not make.decoupled}])


@each_optimizer
def test_none_in_a_group_is_the_default_as_in_the_constructor(make):
    (group,) = make([{"params": parameters((3,)), "weight_decay": None, "eps_s": None, "z_clip": None}]).param_groups
    assert group["weight_decay"] == (1e-2 if make.decoupled else 0)
    assert group.get("eps_s") == (1e-16 if make.rule.centered else None)


def test_none_in_a_group_overrides_the_default_of_all_groups():
    groups = [{"params": parameters((3,)), "z_clip": None, "beta_mean": None}, {"params": parameters((3,))}]
    first, second = mvngrad.MVNGrad(groups, z_clip=3.0, beta_mean=0.95).param_groups
    assert (first["z_clip"], first["beta_mean"]) == (None, None)
    assert (second["z_clip"], second["beta_mean"]) == (3.0, 0.95)


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("fused", [False, True])
@each_optimizer
def test_numpy_numbers_are_accepted(make, fused):
    options = {"lr": np.float32(0.1), "betas": (np.float32(0.5), np.float64(0.9)), "eps": np.float32(1e-8)}
    train(make(parameters((3,)), **options, maximize=np.True_, fused=fused), 1)


@each_optimizer
def test_a_bad_group_is_not_added(make):
    optimizer = make(parameters((3,)))
    with pytest.raises(ValueError, match="lr=-1"):
        optimizer.add_param_group({"params": parameters((3,)), "lr": -1.0})
    assert len(optimizer.param_groups) == 1
