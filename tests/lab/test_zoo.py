"""Other people's optimizers by name: those of the paper's appendix train, and what one does not take is refused."""

import pytest
import torch
from torch import nn

from mvngrad.lab.zoo import NEEDS, make, taken

OF_TORCH = ("Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
OF_THE_PAPER = (
    "Yogi", "RAdam", "AdaShift", "AdaFactor", "SM3", "AdaBound", "PAdam", "AdamP", "Lamb", "NovoGrad", "Shampoo",
)  # fmt: skip


def losses(name, **hyper):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    images, labels = torch.randn(32, 6), torch.randint(3, (32,))
    optimizer = make(name, model.parameters(), **hyper)
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
    found = losses(f"zoo:{name}", lr=1e-2, weight_decay=1e-4 if "weight_decay" in taken(f"zoo:{name}") else None)
    assert found[-1] < found[0]


def test_hyper_parameters_arrive():
    (group,) = make("torch:NAdam", [nn.Parameter(torch.ones(2))], lr=0.5, betas=(0.1, 0.2), eps=0.3).param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.1, 0.2), 0.3, 0)


@pytest.mark.parametrize(
    ("name", "hyper", "problem"),
    [
        ("torch:SGD", {"betas": (0.9, 0.99)}, r"does not take betas=\(0.9, 0.99\); it takes lr, momentum"),
        ("torch:Adafactor", {"eps": 1e-8}, r"eps=1e-08 does not fit.*2 values"),
        ("torch:LBFGS", {}, "needs a closure"),
        ("torch:Muon", {}, "two dimensions alone"),
        ("torch:Optimizer", {}, "has no optimizer 'Optimizer'"),
        ("adam", {}, "neither torch:NAME"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(name, hyper, problem):
    with pytest.raises(ValueError, match=problem):
        make(name, [nn.Parameter(torch.ones(2))], **hyper)


@pytest.mark.parametrize(
    ("name", "hyper", "problem"),
    [
        ("zoo:AdaHessian", {}, "needs a Hessian"),
        ("zoo:SophiaH", {}, "needs a Hessian"),
        ("zoo:Muon", {}, "use_muon"),
        ("zoo:AggMo", {"betas": (0.9, 0.99)}, "3 values"),
        ("zoo:Nothing", {}, "has no 'Nothing'; it has a2grad"),
    ],
)
def test_what_the_zoo_cannot_is_refused_with_the_reason(name, hyper, problem):
    pytest.importorskip("pytorch_optimizer")
    with pytest.raises(ValueError, match=problem):
        make(name, [nn.Parameter(torch.ones(2))], **hyper)


def test_muon_takes_matrices():
    matrix = nn.Parameter(torch.ones(2, 2))
    matrix.grad = torch.ones(2, 2)
    make("torch:Muon", [matrix], lr=0.1).step()
    assert not torch.equal(matrix, torch.ones(2, 2))


def test_every_other_optimizer_of_the_zoo_trains_as_it_is():
    zoo = pytest.importorskip("pytorch_optimizer")
    names = [name for name in zoo.get_supported_optimizers() if f"zoo:{name}" not in NEEDS]
    assert len(names) > 100
    for name in names:
        assert all(loss == loss for loss in losses(f"zoo:{name}")), name
