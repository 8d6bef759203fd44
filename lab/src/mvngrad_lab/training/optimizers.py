"""Other people's optimizers by name: `torch:NAME` of torch.optim, `zoo:NAME` of the package pytorch-optimizer.

Options follow the name: `torch:Adam,amsgrad=True`. None of them is written here again. What one does not take is
refused and never ignored.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

import mvngrad
from mvngrad.optim.optimizer import RuleOptimizer
from mvngrad_lab.recipe import CELLS, TrainingRecipe

CLASSES = {rule_name: rule.name.replace("-", "") for rule_name, rule in CELLS.items()}

CLOSURE = "a closure that computes the loss again in step()"
HESSIAN = "a Hessian: a backward pass with create_graph=True"
MODEL = "the model, and takes the gradients from it during the backward pass"
SWITCHED = "to be switched between training and evaluation, as models are"
NEEDS = {
    "torch:lbfgs": CLOSURE,
    "torch:sparseadam": "sparse gradients",
    "zoo:lbfgs": CLOSURE,
    "zoo:alig": CLOSURE,
    "zoo:bsam": CLOSURE,
    "zoo:adahessian": HESSIAN,
    "zoo:sophia": HESSIAN,
    "zoo:sophiah": HESSIAN,
    "zoo:lomo": MODEL,
    "zoo:adalomo": MODEL,
    "zoo:adammini": MODEL,
    "zoo:spectralsphere": "parameters of two dimensions alone",
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
OTHERWISE = {"sophia": "sophiah"}
"""What pytorch-optimizer calls those that have another name in their paper."""


def make_optimizer(recipe: TrainingRecipe, model: nn.Module, lr: Tensor) -> torch.optim.Optimizer:
    """The recipe's optimizer. Ours has its state, and is ready to be captured where the model is on a GPU."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if recipe.has_weight_decay(p.dim()) == decays], **options}
        for decays, options in ((True, {}), (False, {"weight_decay": 0.0}))
    ]
    groups = [group for group in groups if group["params"]]
    if recipe.is_third_party:
        return make_third_party_optimizer(recipe.optimizer, groups, **third_party_options(recipe))
    cell = recipe.optimizer.removesuffix("w")
    make = getattr(mvngrad, CLASSES[cell] + "W" * (cell != recipe.optimizer))
    made: RuleOptimizer = make(
        groups,
        lr=lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        eps_s=recipe.eps_s,
        weight_decay=recipe.weight_decay,
        state_dtype=recipe.state_dtype,
        rounding_seed=recipe.rounding_seed,
        capturable=lr.is_cuda,
    )
    made.init_state()
    return made


def option_names(name: str) -> tuple[str, ...]:
    """Names of the hyper-parameters that an optimizer takes.

    >>> "betas" in option_names("torch:NAdam"), "betas" in option_names("torch:SGD,momentum=0.9")
    (True, False)
    """
    name, _ = parse_name(name)
    variable = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    return tuple(option.name for option in list(_signature(name).values())[1:] if option.kind not in variable)


def parse_name(name: str) -> tuple[str, dict[str, Any]]:
    """A name without its options, and these.

    >>> parse_name("torch:SGD,momentum=0.9,nesterov=True")
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


def make_third_party_optimizer(name: str, parameters: Iterable[Any], **hyper: Any) -> torch.optim.Optimizer:
    """An optimizer of torch.optim or pytorch-optimizer, with its own defaults for whatever is None or not given.

    Args:
        name: `torch:Muon`, `zoo:Yogi`, `torch:SGD,momentum=0.9`.
        parameters: as for every optimizer of torch.
        hyper: lr, betas, eps, weight_decay, and whatever else the class takes.

    Raises:
        ValueError: there is no such optimizer, it does not take a hyper-parameter, or it needs what a plain training
            loop does not give.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> type(make_third_party_optimizer("torch:RAdam", [weight], lr=0.1, betas=(0.8, 0.9))).__name__
    'RAdam'
    """
    given, name, listed = check_options(name, **hyper), parse_name(name)[0], list(parameters)
    if name == "torch:Muon":
        return MuonAndAdamW(_split(listed, most=2), **given)
    made: torch.optim.Optimizer = _class(name)(_split(listed) if name.lower() in MUONS else listed, **given)
    return made


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for parameters of two dimensions and its AdamW for all others, as one with one `state_dict`.

    AdamW is given of Muon's options what it takes too: lr, eps and weight_decay.
    """

    def __init__(self, groups: list[dict[str, Any]], **given: Any) -> None:
        shared = {option: value for option, value in given.items() if option in option_names("torch:AdamW")}
        matrices, others = ([group for group in groups if group["use_muon"] == muon] for muon in (True, False))
        if not matrices:
            raise ValueError("torch:Muon is for parameters of two dimensions, and there are none; take torch:AdamW")
        self.parts: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, **given)]
        if others:
            self.parts.append(torch.optim.AdamW(others, **shared))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Each part steps its own; groups and state are lent to it, because a loaded `state_dict` brings new ones."""
        for part, muon in zip(self.parts, (True, False), strict=False):
            part.param_groups = [group for group in self.param_groups if group["use_muon"] == muon]
            part.state = self.state
            part.step()


def check_options(name: str, **hyper: Any) -> dict[str, Any]:
    """The options that an optimizer is made with: those of its name and all others that are not None.

    What is refused without parameters, which a sweep asks before its first run; `make` sees those too.
    """
    name, options = parse_name(name)
    given = {option: value for option, value in hyper.items() if value is not None}
    for option in sorted(options.keys() & given.keys()):
        raise ValueError(f"{option} is given twice: as {options[option]!r} with {name} and as {hyper[option]!r}")
    given |= options
    known, names = _signature(name), option_names(name)
    if (need := NEEDS.get(name.lower())) is not None:
        raise ValueError(f"{name} needs {need}, which this training does not have; choose another optimizer")
    for option, value in given.items():
        if option not in names:
            raise ValueError(f"{name} does not take {option}={value!r}; it takes {', '.join(names)}")
        default = known[option].default
        if isinstance(default, tuple) and (not isinstance(value, tuple) or len(value) != len(default)):
            raise ValueError(f"{option}={value!r} does not fit {name}; it takes {len(default)} values, as {default}")
    return given


def third_party_options(recipe: TrainingRecipe) -> dict[str, Any]:
    """What a recipe gives to an optimizer of somebody else. A decay of 0 is none, also where that is not the default;
    who takes no decay, or has it behind the name, is not given that 0.
    """
    asked = "weight_decay" in option_names(recipe.optimizer) and "weight_decay" not in parse_name(recipe.optimizer)[1]
    betas = None if recipe.beta1 is None else (recipe.beta1, recipe.beta2)
    decay = recipe.weight_decay if recipe.weight_decay or asked else None
    return {"lr": recipe.lr, "betas": betas, "eps": recipe.eps, "weight_decay": decay}


def _split(parameters: list[Any], most: float = math.inf) -> list[dict[str, Any]]:
    """Groups of matrices and groups of all else. Kernels of convolutions are matrices unless four dimensions are more
    than the `most`.
    """
    groups = parameters if parameters and isinstance(parameters[0], dict) else [{"params": parameters}]
    found = [
        {**group, "params": [p for p in group["params"] if (1 < p.dim() <= most) == matrices], "use_muon": matrices}
        for group in groups
        for matrices in (True, False)
    ]
    return [group for group in found if group["params"]]


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
        raise ValueError(f"{name} is of pytorch-optimizer: pip install 'mvngrad-lab[zoo]'") from None
    known, lower = get_supported_optimizers(), OTHERWISE.get(wanted.lower(), wanted.lower())
    if lower not in known:
        near = ", ".join(f"zoo:{other}" for other in get_close_matches(lower, known))
        remedy = f"did you mean {near}?" if near else "pytorch_optimizer.get_supported_optimizers() lists what it has"
        raise ValueError(f"pytorch-optimizer has no {wanted!r}; {remedy}")
    return load_optimizer(lower)
