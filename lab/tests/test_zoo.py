"""Third-party optimizers by name: those of the paper's appendix train, and options they do not take are refused."""

import pytest
import torch
from tiny import Tiny, TinyTask, killed_after
from torch import nn

from mvngrad_lab.errors import InvalidInput, NotPossible
from mvngrad_lab.training import checkpoint, step
from mvngrad_lab.training.optimizers import (
    NEEDS,
    make_third_party_optimizer,
    option_names,
    resolve_options,
    third_party_options,
)
from mvngrad_lab.training.train import train

NAMES = [
    "torch:Adafactor", "torch:Adagrad", "torch:Adam", "torch:AdamW", "torch:Adamax", "torch:Muon", "torch:NAdam",
    "torch:RAdam", "torch:RMSprop", "torch:SGD", "zoo:Yogi", "zoo:RAdam", "zoo:AdaShift", "zoo:AdaFactor", "zoo:SM3",
    "zoo:AdaBound", "zoo:PAdam", "zoo:AdamP", "zoo:Lamb", "zoo:NovoGrad", "zoo:Shampoo", "zoo:Muon,adamw_lr=0.01",
]  # fmt: skip
"""All of torch that a plain loop can train with, and those of the paper's appendix."""


def losses(name, **hyper):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    images, labels = torch.randn(32, 6), torch.randint(3, (32,))
    optimizer = make_third_party_optimizer(name, model.parameters(), **hyper)
    values = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def require_zoo(name):
    if name.startswith("zoo:"):
        pytest.importorskip("pytorch_optimizer")


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_of_torch_and_of_the_papers_appendix_train(name):
    require_zoo(name)
    decay = 1e-4 if name.startswith("zoo:") and "weight_decay" in option_names(name) else None
    first, *_, last = losses(name, lr=1e-2, weight_decay=decay)
    assert last < first


@pytest.mark.parametrize(
    ("decoupled", "names"),
    [
        (True, ("Yogi", "RAdam", "AdaFactor", "AdaBound", "AdamP", "Lamb", "Muon", "Yogi,weight_decouple=True")),
        (False, ("PAdam", "NovoGrad", "Shampoo", "Yogi,weight_decouple=False")),
    ],
)
def test_the_form_of_weight_decay_is_that_of_the_guide(decoupled, names):
    pytest.importorskip("pytorch_optimizer")
    for name in names:
        (group,) = make_third_party_optimizer(
            f"zoo:{name}", [nn.Parameter(torch.ones(2, 2))], weight_decay=0.1
        ).param_groups
        assert group["weight_decouple"] is decoupled, name
    for name in ("AdaShift", "SM3"):
        with pytest.raises(ValueError, match=f"{name} does not take weight_decay"):
            resolve_options(f"zoo:{name}", weight_decay=0.1)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("torch:NAdam", {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3}, {"weight_decay": 0}),
        ("torch:Adam,amsgrad=True,betas=(0.1,0.2)", {"lr": 0.5}, {"betas": (0.1, 0.2), "amsgrad": True}),
        ("torch:Muon", {"lr": 0.5, "momentum": 0.25}, {}),
    ],
    ids=["options", "options in the name", "Muon of matrices alone"],
)
def test_options_reach_the_optimizer(name, options, expected):
    (group,) = make_third_party_optimizer(name, [nn.Parameter(torch.ones(2, 2))], **options).param_groups
    assert {**group, **options, **expected} == group


@pytest.mark.parametrize(
    ("name", "hyper", "problem"),
    [
        ("torch:SGD", {"betas": (0.9, 0.99)}, r"does not take betas=\(0.9, 0.99\); it takes lr, momentum"),
        ("torch:Adafactor", {"eps": 1e-8}, r"eps=1e-08 does not fit.*2 values"),
        ("torch:LBFGS", {}, "needs a closure"),
        ("torch:Muon", {}, "there are none; take torch:AdamW"),
        ("torch:Muon", {"betas": (0.9, 0.99)}, "does not take betas"),
        ("torch:Optimizer", {}, "has no optimizer 'Optimizer'"),
        ("adam", {}, "neither torch:NAME"),
        ("torch:Adam,amsgrad=True)(", {}, "cannot be read"),
        ("torch:Adam,)+(1", {}, "cannot be read"),
        ("torch:Adam,**{}", {}, "cannot be read"),
        ("torch:Adam,amsgrad", {}, "cannot be read"),
        ("torch:Adam,lr=0.1", {"lr": 0.2}, "lr is given twice: as 0.1 with torch:Adam and as 0.2"),
        ("zoo:SpectralSphere", {}, "zoo:SpectralSphere needs parameters of two dimensions alone"),
        ("zoo:AdaHessian", {}, "needs a Hessian"),
        ("zoo:SophiaH", {}, "needs a Hessian"),
        ("zoo:Sophia", {}, "needs a Hessian"),
        ("zoo:AggMo", {"betas": (0.9, 0.99)}, "3 values"),
        ("zoo:Yogy", {}, r"has no 'Yogy'; did you mean zoo:yogi\?$"),
        ("zoo:0", {}, r"has no '0'; pytorch_optimizer.get_supported_optimizers\(\) lists"),
    ],
)
def test_unsuitable_optimizers_and_options_are_refused(name, hyper, problem):
    require_zoo(name)
    with pytest.raises(ValueError, match=problem):
        make_third_party_optimizer(name, [nn.Parameter(torch.ones(2))], **hyper)


def tiny(name, **hyper):
    return Tiny(optimizer=name, beta1=None, beta2=None, eps=None, eps_s=None, **hyper)


def run(recipe, root, **options):
    return train(recipe, root=root, task=TinyTask, **options).result


def run_alone(recipe, root, **options):
    """Train with nothing in the cache."""
    step.clear_cache()
    return run(recipe, root, **options)


def test_a_run_with_torchs_adamw_equals_one_with_ours_to_rounding(tmp_path):
    recipes = [Tiny(optimizer=name, eps_s=None, lr=1e-2, weight_decay=0.1) for name in ("torch:AdamW", "adamw")]
    theirs, ours = (run_alone(recipe, tmp_path)["test_loss"] for recipe in recipes)
    assert theirs == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("torch:SGD,momentum=0.9", "torch:Adam,amsgrad=True", "torch:Muon", "zoo:Yogi", "zoo:Muon", "zoo:SM3"),
        *("zoo:MADGRAD", "zoo:SPAM"),  # have state that is not of a parameter
        "zoo:Scion",  # has an option that is an object
    ],
)
def test_a_run_with_a_third_party_optimizer_is_resumed_exactly(tmp_path, name):
    require_zoo(name)
    recipe = tiny(name, lr=1e-2)
    whole = run_alone(recipe, tmp_path / "whole")
    with killed_after(9):
        run_alone(recipe, tmp_path / "killed", checkpoint_every=0)
    again = run_alone(recipe, tmp_path / "killed")
    assert again["weights"] == whole["weights"]
    assert again["state_bytes"] > 0
    other = run_alone(tiny(name, lr=2e-2), tmp_path)
    assert other["weights"] != whole["weights"]


def test_runs_in_one_process_do_not_share_the_learning_rate(tmp_path):
    results = [run(tiny("torch:SGD", lr=lr), tmp_path) for lr in (1e-3, 1e-1)]
    alone = run_alone(tiny("torch:SGD", lr=1e-1), tmp_path / "alone")
    assert results[1]["weights"] == alone["weights"] != results[0]["weights"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"optimizer": "adamx"},
            "choose from mvngrad, .* torch:NAME such as torch:SGD, zoo:NAME and package.module:CLASS",
        ),
        ({"optimizer": "torch:SGD"}, "eps_s=1e-08 is for our optimizers"),
        ({"optimizer": "torch:SGD", "eps_s": None, "state_dtype": "int8"}, "state_dtype='int8' is for our optimizers"),
        ({"beta1": None}, "beta1=None is invalid with optimizer='mvngrad'"),
        ({"optimizer": "torch:Adam", "eps_s": None, "beta1": None}, "beta1=None and beta2=0.* do not go together"),
        ({"optimizer": "torch:SGD", "eps_s": None, "beta2": None}, "beta1=0.* and beta2=None do not go together"),
    ],
)
def test_recipes_refuse_options_of_ours(change, message):
    with pytest.raises(ValueError, match=message):
        Tiny(**change)


def test_a_recipe_that_names_what_the_optimizer_does_not_take_is_refused_before_it_trains(tmp_path):
    with pytest.raises(ValueError, match="torch:SGD does not take betas"):
        run_alone(Tiny(optimizer="torch:SGD", eps_s=None), tmp_path)


def test_muon_of_torch_steps_matrices_and_adamw_all_else():
    """As two optimizers would; each group has its own decay, and AdamW is given lr, eps and the decay of Muon."""
    options = {"lr": 0.1, "eps": 0.5, "weight_decay": 0.25}
    torch.manual_seed(0)
    mine, theirs = ([nn.Parameter(torch.ones(size)) for size in ((3, 2), (4,), (2, 2, 3, 3), (2, 3))] for _ in range(2))
    one = make_third_party_optimizer(
        "torch:Muon", [{"params": mine[:2]}, {"params": mine[2:], "weight_decay": 0.0}], **options
    )
    bare = {**options, "weight_decay": 0.0}
    two = [torch.optim.Muon(theirs[:1], **options), torch.optim.AdamW(theirs[1:2], **options)]
    two += [torch.optim.AdamW(theirs[2:3], **bare), torch.optim.Muon(theirs[3:], **bare)]
    for _ in range(3):
        for left, right in zip(mine, theirs, strict=True):
            left.grad = right.grad = torch.randn_like(left)
        for optimizer in (one, *two):
            optimizer.step()
    assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


def test_every_other_optimizer_of_the_zoo_trains_as_it_is():
    zoo = pytest.importorskip("pytorch_optimizer")
    names = [name for name in zoo.get_supported_optimizers() if f"zoo:{name}" not in NEEDS]
    assert len(names) > 100
    for name in names:
        assert all(loss == loss for loss in losses(f"zoo:{name}")), name


@pytest.mark.parametrize(
    ("optimizer", "decay"), [("torch:AdamW", 0.0), ("torch:AdamW,weight_decay=0.1", None), ("torch:LBFGS", None)]
)
def test_weight_decay_0_overrides_another_default(optimizer, decay):
    assert third_party_options(tiny(optimizer, weight_decay=0.0))["weight_decay"] == decay


# State and options of other forms


@pytest.mark.parametrize(("name", "kind"), [("zoo:ScalableShampoo", "PreConditioner"), ("zoo:AdaShift", "deque")])
def test_a_state_that_no_checkpoint_can_have_is_named_and_the_weights_are_kept(tmp_path, name, kind):
    require_zoo(name)
    recipe, messages = tiny(name, lr=1e-2), []
    with killed_after(9):
        run_alone(recipe, tmp_path, checkpoint_every=0, on_event=lambda event: messages.append(str(event)))
    assert sum(f"cannot be resumed: its state has a {kind}" in text for text in messages) == 1
    with pytest.raises(NotPossible, match=f"its state has a {kind}.*delete .*{recipe.key}"):
        run_alone(recipe, tmp_path)
    assert run_alone(recipe, tmp_path / "other")["status"] == "finished"
    assert checkpoint.load_weights(tmp_path / "other" / recipe.key)


def test_the_bytes_of_a_state_include_those_in_queues(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    result = run_alone(tiny("zoo:AdaShift,keep_num=2", lr=1e-2), tmp_path)
    assert result["state_bytes"] == 4 * 4 * result["parameters"]  # two moments, two gradients


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("torch:SGD,momentum=0.9,momentum=0.8", "given twice"),
        ("torch:Adam,foreach=True,fused=True", "cannot be `True` together"),
        ("torch:Adam,capturable=True", "capturable is for another training loop"),
        ("torch:Adam,differentiable=True", "differentiable is for another training loop"),
    ],
)
def test_options_that_torch_would_refuse_later_are_refused(name, problem):
    with pytest.raises(InvalidInput, match=problem):
        make_third_party_optimizer(name, [nn.Parameter(torch.ones(2))])
