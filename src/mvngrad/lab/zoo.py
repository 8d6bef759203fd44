"""Other people's optimizers by name: `torch:NAME` of torch.optim, `zoo:NAME` of the package pytorch-optimizer.

Options follow the name: `torch:Adam,amsgrad=True`. None of them is written here again. What one does not take is
refused and never ignored.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from inspect import Parameter, signature
from typing import Any

import torch

from mvngrad.lab.recipes.training import Training

CLOSURE = "a closure that computes the loss again in step()"
HESSIAN = "a Hessian: a backward pass with create_graph=True"
MODEL = "the model, and takes the gradients from it during the backward pass"
MATRICES = "parameters of two dimensions alone"
SWITCHED = "to be switched between training and evaluation, as models are"
NEEDS = {
    "torch:lbfgs": CLOSURE,
    "torch:sparseadam": "sparse gradients",
    "torch:muon": MATRICES,
    "zoo:lbfgs": CLOSURE,
    "zoo:alig": CLOSURE,
    "zoo:bsam": CLOSURE,
    "zoo:adahessian": HESSIAN,
    "zoo:sophiah": HESSIAN,
    "zoo:lomo": MODEL,
    "zoo:adalomo": MODEL,
    "zoo:adammini": MODEL,
    "zoo:spectralsphere": MATRICES,
    "zoo:demo": "a group of processes",
    "zoo:distributedmuon": "a group of processes",
    "zoo:magma": "another optimizer, which it wraps",
    "zoo:ranger21": "the number of steps in advance",
    "zoo:schedulefreeadamw": SWITCHED,
    "zoo:schedulefreeradam": SWITCHED,
    "zoo:schedulefreesgd": SWITCHED,
}
"""What some need that a training loop with loss.backward() and step() does not have."""
MUONS = ("zoo:adago", "zoo:adamuon", "zoo:muon", "zoo:muonclip", "zoo:normuon")
"""Those that are for matrices, and step all other parameters as AdamW does, once told which are which."""


def taken(name: str) -> tuple[str, ...]:
    """Names of the hyper-parameters that an optimizer takes.

    >>> "betas" in taken("torch:NAdam"), "betas" in taken("torch:SGD,momentum=0.9")
    (True, False)
    """
    name, _ = parsed(name)
    variable = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    return tuple(option.name for option in list(_signature(name).values())[1:] if option.kind not in variable)


def parsed(name: str) -> tuple[str, dict[str, Any]]:
    """A name without its options, and these.

    >>> parsed("torch:SGD,momentum=0.9,nesterov=True")
    ('torch:SGD', {'momentum': 0.9, 'nesterov': True})
    """
    try:
        call = ast.parse(f"_({name.partition(',')[2]})", mode="eval").body
        options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}  # type: ignore[attr-defined]
        if call.args or None in options:  # type: ignore[attr-defined]
            raise ValueError("options have names")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"optimizer={name!r} cannot be read ({error}); write torch:SGD,momentum=0.9") from None
    return name.partition(",")[0], options


def make(name: str, parameters: Iterable[Any], **hyper: Any) -> torch.optim.Optimizer:
    """An optimizer of torch.optim or pytorch-optimizer, with its own defaults for whatever is None or not given.

    Args:
        name: `torch:Muon`, `zoo:Yogi`, `torch:SGD,momentum=0.9`.
        parameters: as for every optimizer of torch.
        hyper: lr, betas, eps, weight_decay, and whatever else the class takes.

    Raises:
        ValueError: there is no such optimizer, it does not take a hyper-parameter, or it needs what a plain training
            loop does not give.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> type(make("torch:RAdam", [weight], lr=0.1, betas=(0.8, 0.9))).__name__
    'RAdam'
    """
    given, name, listed = checked(name, **hyper), parsed(name)[0], list(parameters)
    if name.lower() in MUONS:
        listed = _split(listed)
    if NEEDS.get(name.lower()) == MATRICES and any(parameter.dim() != 2 for parameter in _flat(listed)):
        raise _needing(name)
    made: torch.optim.Optimizer = _class(name)(listed, **given)
    return made


def checked(name: str, **hyper: Any) -> dict[str, Any]:
    """The options that an optimizer is made with: those of its name and all others that are not None.

    What is refused without parameters, which a sweep asks before its first run; `make` sees those too.
    """
    name, options = parsed(name)
    given = {option: value for option, value in hyper.items() if value is not None}
    for option in sorted(options.keys() & given.keys()):
        raise ValueError(f"{option} is given twice: as {options[option]!r} with {name} and as {hyper[option]!r}")
    given |= options
    known, names = _signature(name), taken(name)
    if NEEDS.get(name.lower(), MATRICES) != MATRICES:
        raise _needing(name)
    for option, value in given.items():
        if option not in names:
            raise ValueError(f"{name} does not take {option}={value!r}; it takes {', '.join(names)}")
        default = known[option].default
        if isinstance(default, tuple) and (not isinstance(value, tuple) or len(value) != len(default)):
            raise ValueError(f"{option}={value!r} does not fit {name}; it takes {len(default)} values, as {default}")
    return given


def hyper_parameters(recipe: Training) -> dict[str, Any]:
    """What a recipe gives to an optimizer of somebody else. A decay of 0 is none, also where that is not the default;
    who takes no decay, or has it behind the name, is not given that 0.
    """
    asked = "weight_decay" in taken(recipe.optimizer) and "weight_decay" not in parsed(recipe.optimizer)[1]
    betas = None if recipe.beta1 is None else (recipe.beta1, recipe.beta2)
    decay = recipe.weight_decay if recipe.weight_decay or asked else None
    return {"lr": recipe.lr, "betas": betas, "eps": recipe.eps, "weight_decay": decay}


def _needing(name: str) -> ValueError:
    need = NEEDS[name.lower()]
    return ValueError(f"{name} needs {need}, which this training does not have; choose another optimizer")


def _split(parameters: list[Any]) -> list[dict[str, Any]]:
    """Groups of matrices, kernels of convolutions among them, and groups of all else."""
    groups = parameters if parameters and isinstance(parameters[0], dict) else [{"params": parameters}]
    found = [
        {**group, "params": [p for p in group["params"] if (p.dim() > 1) == matrices], "use_muon": matrices}
        for group in groups
        for matrices in (True, False)
    ]
    return [group for group in found if group["params"]]


def _flat(parameters: list[Any]) -> Iterable[torch.Tensor]:
    for each in parameters:
        yield from (each["params"] if isinstance(each, dict) else [each])


def _signature(name: str) -> dict[str, Parameter]:
    return dict(signature(_class(name)).parameters)


def _class(name: str) -> Any:
    source, _, wanted = name.partition(":")
    if source == "torch":
        found = getattr(torch.optim, wanted, None)
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
            return found
        raise ValueError(f"torch.optim has no optimizer {wanted!r}; names are as there: torch:RAdam, torch:Muon")
    if source != "zoo":
        raise ValueError(f"optimizer={name!r} is neither torch:NAME of torch.optim nor zoo:NAME of pytorch-optimizer")
    try:
        from pytorch_optimizer import get_supported_optimizers, load_optimizer
    except ModuleNotFoundError:
        raise ValueError(f"{name} is of pytorch-optimizer: pip install 'mvngrad[zoo]'") from None
    if wanted.lower() not in get_supported_optimizers():
        raise ValueError(f"pytorch-optimizer has no {wanted!r}; it has {', '.join(get_supported_optimizers())}")
    return load_optimizer(wanted.lower())
