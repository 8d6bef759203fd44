"""Other people's optimizers by name: those of the paper's appendix train, and what one does not take is refused."""

import pytest
import torch
from tiny import Tiny, TinyTask
from torch import nn

from mvngrad_lab.training import checkpoint, step
from mvngrad_lab.training.optimizers import (
    NEEDS,
    check_options,
    make_third_party_optimizer,
    option_names,
    third_party_options,
)
from mvngrad_lab.training.train import train

OF_TORCH = ("Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "SGD")
OF_THE_PAPER = (
    "Yogi", "RAdam", "AdaShift", "AdaFactor", "SM3", "AdaBound", "PAdam", "AdamP", "Lamb", "NovoGrad", "Shampoo",
)  # fmt: skip


def losses(name, **hyper):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    images, labels = torch.randn(32, 6), torch.randint(3, (32,))
    optimizer = make_third_party_optimizer(name, model.parameters(), **hyper)
    found = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", OF_TORCH)
def test_optimizers_of_torch_train(name):
    found = losses(f"torch:{name}", lr=1e-2)
    assert found[-1] < found[0]


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_optimizers_of_the_paper_s_appendix_train(name):
    pytest.importorskip("pytorch_optimizer")
    found = losses(f"zoo:{name}", lr=1e-2, weight_decay=1e-4 if "weight_decay" in option_names(f"zoo:{name}") else None)
    assert found[-1] < found[0]


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
            check_options(f"zoo:{name}", weight_decay=0.1)


def test_hyper_parameters_are_passed_on():
    (group,) = make_third_party_optimizer(
        "torch:NAdam", [nn.Parameter(torch.ones(2))], lr=0.5, betas=(0.1, 0.2), eps=0.3
    ).param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.1, 0.2), 0.3, 0)


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
    ],
)
def test_invalid_options_are_refused(name, hyper, problem):
    with pytest.raises(ValueError, match=problem):
        make_third_party_optimizer(name, [nn.Parameter(torch.ones(2))], **hyper)


@pytest.mark.parametrize(
    ("name", "hyper", "problem"),
    [
        ("zoo:AdaHessian", {}, "needs a Hessian"),
        ("zoo:SophiaH", {}, "needs a Hessian"),
        ("zoo:Sophia", {}, "needs a Hessian"),
        ("torch:Adam,amsgrad", {}, "cannot be read"),
        ("torch:Adam,lr=0.1", {"lr": 0.2}, "lr is given twice: as 0.1 with torch:Adam and as 0.2"),
        ("zoo:AggMo", {"betas": (0.9, 0.99)}, "3 values"),
        ("zoo:Yogy", {}, r"has no 'Yogy'; did you mean zoo:yogi\?$"),
        ("zoo:0", {}, r"has no '0'; pytorch_optimizer.get_supported_optimizers\(\) lists"),
    ],
)
def test_unsuitable_optimizers_of_the_zoo_are_refused(name, hyper, problem):
    pytest.importorskip("pytorch_optimizer")
    with pytest.raises(ValueError, match=problem):
        make_third_party_optimizer(name, [nn.Parameter(torch.ones(2))], **hyper)


def test_an_optimizer_for_matrices_only_is_refused():
    pytest.importorskip("pytorch_optimizer")
    with pytest.raises(ValueError, match="zoo:SpectralSphere needs parameters of two dimensions alone"):
        check_options("zoo:SpectralSphere")


def test_options_follow_the_name():
    (group,) = make_third_party_optimizer(
        "torch:Adam,amsgrad=True,betas=(0.1,0.2)", [nn.Parameter(torch.ones(2))], lr=0.5
    ).param_groups
    assert (group["lr"], group["betas"], group["amsgrad"]) == (0.5, (0.1, 0.2), True)


def test_the_zoos_muon_gets_groups_of_matrices():
    pytest.importorskip("pytorch_optimizer")
    found = losses("zoo:Muon,adamw_lr=0.01", lr=1e-2)
    assert found[-1] < found[0]


def tiny(name, **hyper):
    return Tiny(optimizer=name, beta1=None, beta2=None, eps=None, eps_s=None, **hyper)


def trained(recipe, root, **options):
    try:
        return train(recipe, root=root, task=TinyTask, **{"on_event": lambda event: None, **options}).result
    finally:
        step.clear_cache()


def test_training_with_one_equals_a_plain_loop(tmp_path):
    """torch's AdamW, as anybody's, is ours to rounding."""
    common = {"lr": 1e-2, "weight_decay": 0.1}
    theirs = Tiny(optimizer="torch:AdamW", beta1=0.9, beta2=0.99, eps_s=None, **common)
    ours = Tiny(optimizer="adamw", beta1=0.9, beta2=0.99, eps_s=None, **common)
    losses = [trained(recipe, tmp_path)["test_loss"] for recipe in (theirs, ours)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    "name", ["torch:SGD,momentum=0.9", "torch:Adam,amsgrad=True", "torch:Muon", "zoo:Yogi", "zoo:Muon", "zoo:SM3"]
)
def test_a_run_with_one_is_resumed_exactly(tmp_path, name):
    if name.startswith("zoo"):
        pytest.importorskip("pytorch_optimizer")
    recipe = tiny(name, lr=1e-2)
    whole = trained(recipe, tmp_path / "whole")
    kept = checkpoint.save

    def killed(folder, number, *rest):
        kept(folder, number, *rest)
        if number == 9:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(recipe, tmp_path / "killed", checkpoint_every=0)
    again = trained(recipe, tmp_path / "killed")
    assert again["weights"] == whole["weights"]
    assert again["state_bytes"] > 0
    other = trained(tiny(name, lr=2e-2), tmp_path)
    assert other["weights"] != whole["weights"]


def test_runs_of_one_process_do_not_share_its_rate(tmp_path):
    try:
        results = [
            train(tiny("torch:SGD", lr=lr), root=tmp_path, task=TinyTask, on_event=lambda event: None).result
            for lr in (1e-3, 1e-1)
        ]
    finally:
        step.clear_cache()
    alone = trained(tiny("torch:SGD", lr=1e-1), tmp_path / "alone")
    assert results[1]["weights"] == alone["weights"] != results[0]["weights"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "adamx"}, "choose of mvngrad, .* torch:NAME and zoo:NAME"),
        ({"optimizer": "torch:SGD"}, "eps_s=1e-08 is for our optimizers"),
        ({"optimizer": "torch:SGD", "eps_s": None, "state_dtype": "int8"}, "state_dtype='int8' is for our optimizers"),
        ({"beta1": None}, "beta1=None is invalid with optimizer='mvngrad'"),
    ],
)
def test_recipes_refuse_options_of_ours(change, message):
    with pytest.raises(ValueError, match=message):
        Tiny(**change)


def test_a_recipe_that_names_what_the_optimizer_does_not_take_is_refused_before_it_trains(tmp_path):
    with pytest.raises(ValueError, match="torch:SGD does not take betas"):
        trained(Tiny(optimizer="torch:SGD", eps_s=None), tmp_path)


def test_options_are_checked_without_parameters():
    recipe = tiny("torch:SGD,momentum=0.9", lr=0.5, weight_decay=0.25)
    assert check_options(recipe.optimizer, **third_party_options(recipe)) == {
        "lr": 0.5,
        "weight_decay": 0.25,
        "momentum": 0.9,
    }
    assert check_options("torch:Muon", lr=0.5) == {"lr": 0.5}
    with pytest.raises(ValueError, match="needs a closure"):
        check_options("torch:LBFGS")


def test_muon_of_torch_steps_matrices_and_adamw_all_else():
    """As two optimizers would; each group has its own decay, and AdamW is given lr, eps and the decay of Muon."""
    given = {"lr": 0.1, "eps": 0.5, "weight_decay": 0.25}
    torch.manual_seed(0)
    mine, theirs = ([nn.Parameter(torch.ones(size)) for size in ((3, 2), (4,), (2, 2, 3, 3), (2, 3))] for _ in range(2))
    one = make_third_party_optimizer(
        "torch:Muon", [{"params": mine[:2]}, {"params": mine[2:], "weight_decay": 0.0}], **given
    )
    bare = {**given, "weight_decay": 0.0}
    two = [torch.optim.Muon(theirs[:1], **given), torch.optim.AdamW(theirs[1:2], **given)]
    two += [torch.optim.AdamW(theirs[2:3], **bare), torch.optim.Muon(theirs[3:], **bare)]
    for _ in range(3):
        for left, right in zip(mine, theirs, strict=True):
            left.grad = right.grad = torch.randn_like(left)
        for optimizer in (one, *two):
            optimizer.step()
    assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


def test_muon_of_torch_takes_matrices_alone_too():
    (group,) = make_third_party_optimizer(
        "torch:Muon", [nn.Parameter(torch.ones(2, 2))], lr=0.5, momentum=0.25
    ).param_groups
    assert (group["lr"], group["momentum"]) == (0.5, 0.25)


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
