"""The optimizer of a recipe: one of ours, or a third-party one by name.

`torch:NAME` is of torch.optim, `zoo:NAME` of the package pytorch-optimizer, `package.module:CLASS` of the user; options
follow the name, as in `torch:Adam,amsgrad=True`. An option that an optimizer does not take is refused, never ignored.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch import Tensor, nn

import mvngrad
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import TrainingRecipe, hash_code

CLASSES = {name.lower(): name for name in mvngrad.__all__ if not name.islower()}
"""Our classes by their name in recipes."""
OPTIMIZER_FIELDS = (
    "optimizer", "beta1", "beta2", "eps", "eps_s", "weight_decay", "state_dtype", "beta_mean", "z_clip", "lean"
)  # fmt: skip
"""Recipe fields that only the optimizer depends on."""

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
"""What some optimizers need beyond loss.backward() and step()."""
REFUSED_OPTIONS = {"capturable": "with CUDA graphs", "differentiable": "which differentiates its steps"}
"""Options that would make a run fail after its start, and the training loops that they are for."""
MUONS = ("zoo:adago", "zoo:adamuon", "zoo:muon", "zoo:muonclip", "zoo:normuon")
"""Optimizers for matrices, which step other parameters like AdamW if their groups say which are which."""
ZOO_NAMES = {"sophia": "sophiah"}
"""Names in pytorch-optimizer that differ from those in the papers."""


def make_optimizer(recipe: TrainingRecipe, model: nn.Module, lr: Tensor) -> torch.optim.Optimizer:
    """The recipe's optimizer. Ours has its state initialized, and is capturable if the model is on a GPU."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if recipe.has_weight_decay(p.dim()) == decays], **options}
        for decays, options in ((True, {}), (False, {"weight_decay": 0.0}))
    ]
    groups = [group for group in groups if group["params"]]
    if recipe.is_third_party:
        theirs = make_third_party_optimizer(recipe.optimizer, groups, **third_party_options(recipe))
        if any("lr" not in group for group in theirs.param_groups):
            raise InvalidInput(f"{recipe.optimizer} has no lr in its param_groups, where the schedule sets it")
        return theirs
    optimizer = getattr(mvngrad, CLASSES[recipe.optimizer])(
        groups,
        lr=lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        eps_s=recipe.eps_s,
        beta_mean=recipe.beta_mean,
        z_clip=recipe.z_clip,
        lean=recipe.lean or None,
        weight_decay=recipe.weight_decay,
        state_dtype=recipe.state_dtype,
        rounding_seed=_rounding_seed(recipe),
        capturable=lr.is_cuda,
    )
    optimizer.init_state()
    return cast(torch.optim.Optimizer, optimizer)


def optimizer_key(recipe: TrainingRecipe) -> tuple[Any, ...]:
    """Everything in a recipe that `make_optimizer` depends on."""
    decays = tuple(recipe.has_weight_decay(dimensions) for dimensions in range(5))
    lr = recipe.lr if recipe.is_third_party else None
    return *(getattr(recipe, name) for name in OPTIMIZER_FIELDS), _rounding_seed(recipe), decays, lr


def _rounding_seed(recipe: TrainingRecipe) -> int:
    """Seed of stochastic rounding; float32 state is not rounded."""
    return 0 if recipe.state_dtype == "float32" else recipe.seed


def make_third_party_optimizer(name: str, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """An optimizer that is not ours, with its own defaults for options that are None or missing.

    Raises InvalidInput if there is no such optimizer, it does not take an option, or it needs another training loop.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> type(make_third_party_optimizer("torch:RAdam", [weight], lr=0.1, betas=(0.8, 0.9))).__name__
    'RAdam'
    """
    chosen, name, params = resolve_options(name, **options), parse_name(name)[0], list(parameters)
    if name == "torch:Muon":
        return MuonAndAdamW(_split_matrices(params, most=2), **chosen)
    groups = _split_matrices(params) if name.lower() in MUONS else params
    try:
        return cast(torch.optim.Optimizer, _find_class(name)(groups, **chosen))
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        values = ", ".join(f"{option}={value!r}" for option, value in chosen.items())
        raise InvalidInput(f"{name} cannot be made with {values}: {error}") from error


def check_optimizer(recipe: TrainingRecipe) -> None:
    """Raise InvalidInput if the recipe's optimizer does not exist, or refuses an option. Needs no data."""
    if recipe.optimizer.startswith(("torch:", "zoo:")):
        make_optimizer(recipe, nn.Linear(2, 2), torch.zeros(()))
    elif recipe.is_third_party:
        resolve_options(recipe.optimizer, **third_party_options(recipe))


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for parameters of two dimensions and its AdamW for all others, with one `state_dict`.

    AdamW gets those of Muon's options that it takes too: lr, eps and weight_decay.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        shared = {option: value for option, value in options.items() if option in option_names("torch:AdamW")}
        matrices, others = ([group for group in groups if group["use_muon"] == muon] for muon in (True, False))
        if not matrices:
            raise InvalidInput("torch:Muon is for parameters of two dimensions, and there are none; take torch:AdamW")
        self.parts: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, **options)]
        if others:
            self.parts.append(torch.optim.AdamW(others, **shared))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step both parts with the groups and state of this optimizer, which load_state_dict replaces."""
        for part, muon in zip(self.parts, (True, False), strict=False):
            part.param_groups = [group for group in self.param_groups if group["use_muon"] == muon]
            part.state = self.state
            part.step()


def resolve_options(name: str, **options: Any) -> dict[str, Any]:
    """The options that an optimizer is made with: those in its name and all others that are not None.

    Raises InvalidInput for what `make_third_party_optimizer` refuses without looking at parameters; a sweep checks its
    recipes by this before the first run.
    """
    name, named = parse_name(name)
    chosen = {option: value for option, value in options.items() if value is not None}
    if twice := sorted(named.keys() & chosen.keys()):
        option = twice[0]
        raise InvalidInput(f"{option} is given twice: as {named[option]!r} with {name} and as {options[option]!r}")
    chosen |= named
    parameters, names = _signature(name), option_names(name)
    own = not name.startswith(("torch:", "zoo:"))
    takes_all = own and any(parameter.kind == Parameter.VAR_KEYWORD for parameter in parameters.values())
    if (need := NEEDS.get(name.lower())) is not None:
        raise InvalidInput(f"{name} needs {need}, which this training does not have; choose another optimizer")
    for option, value in chosen.items():
        if not own and value and option in REFUSED_OPTIONS:
            why = REFUSED_OPTIONS[option]
            raise InvalidInput(f"{name}: {option} is for another training loop, {why}; leave it out")
        if option not in names:
            if takes_all:  # a user's class passes them on; those of pytorch-optimizer ignore what they do not know
                continue
            raise InvalidInput(f"{name} does not take {option}={value!r}; it takes {', '.join(names)}")
        default = parameters[option].default
        if isinstance(default, tuple) and (not isinstance(value, tuple) or len(value) != len(default)):
            raise InvalidInput(f"{option}={value!r} does not fit {name}; it takes {len(default)} values, as {default}")
        if not own and not _is_like(value, default):
            raise InvalidInput(f"{option}={value!r} does not fit {name}; its default is {default!r}")
    return chosen


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value is of the kind of a default: a number, a bool, a string, or a tuple of these."""
    if isinstance(default, tuple):
        return all(map(_is_like, value, default))
    for kind in (bool, (int, float), str):
        if isinstance(default, kind):
            return isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)
    return True


def option_names(name: str) -> tuple[str, ...]:
    """Names of the options that an optimizer takes.

    >>> "betas" in option_names("torch:NAdam"), "betas" in option_names("torch:SGD,momentum=0.9")
    (True, False)
    """
    variable = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    parameters = list(_signature(parse_name(name)[0]).values())[1:]
    return tuple(parameter.name for parameter in parameters if parameter.kind not in variable)


def parse_name(name: str) -> tuple[str, dict[str, Any]]:
    """Split a name from its options; raises InvalidInput unless these are NAME=VALUE, as in a call.

    >>> parse_name("torch:SGD,momentum=0.9,nesterov=True")
    ('torch:SGD', {'momentum': 0.9, 'nesterov': True})
    """
    try:
        call = ast.parse(f"_({name.partition(',')[2]})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("options have names and values")
        if any(word.arg is None for word in call.keywords):  # **
            raise ValueError("options have names and values")
        options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        if len(options) < len(call.keywords):
            raise ValueError("an option is given twice")
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"optimizer={name!r} cannot be read ({error}); write torch:SGD,momentum=0.9") from None
    return name.partition(",")[0], options


def third_party_options(recipe: TrainingRecipe) -> dict[str, Any]:
    """The options that a recipe gives to a third-party optimizer.

    weight_decay=0 is passed on too, because some have another default, unless the optimizer takes no weight decay or
    has it in its name.
    """
    takes_decay = "weight_decay" in option_names(recipe.optimizer)
    decay = takes_decay and "weight_decay" not in parse_name(recipe.optimizer)[1]
    return {
        "lr": recipe.lr,
        "betas": None if recipe.beta1 is None else (recipe.beta1, recipe.beta2),
        "eps": recipe.eps,
        "weight_decay": recipe.weight_decay if recipe.weight_decay or decay else None,
    }


def _split_matrices(params: list[Any], most: float = math.inf) -> list[dict[str, Any]]:
    """Split groups into matrices and all else; a matrix has at least 2 and at most `most` dimensions."""
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    split = [
        {**group, "params": [p for p in group["params"] if (1 < p.dim() <= most) == matrices], "use_muon": matrices}
        for group in groups
        for matrices in (True, False)
    ]
    return [group for group in split if group["params"]]


def _signature(name: str) -> dict[str, Parameter]:
    return dict(signature(_find_class(name)).parameters)


def import_module_of(optimizer: str) -> None:
    """Import the module of an optimizer `package.module:CLASS`, which must come from a user, never from a store."""
    source, colon, _ = parse_name(optimizer)[0].partition(":")
    if not colon or source in ("torch", "zoo"):
        return
    try:
        import_module(source)
    except Exception as error:  # the user's code: anything
        raise InvalidInput(
            f"optimizer={optimizer!r}: {source} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def get_package_version(optimizer: str) -> dict[str, str]:
    """The package of an optimizer `package.module:CLASS` and its version; empty for others, and without a version."""
    package = optimizer.partition(":")[0].partition(".")[0]
    if ":" not in optimizer or package in ("torch", "zoo"):
        return {}
    found = getattr(sys.modules.get(package), "__version__", None)
    return {package: str(found)} if found else {}


def _find_class(name: str) -> Any:
    """The class of a name; raises InvalidInput if there is none.

    Imports no module that the name chooses, because it may come from the store of a sweep.
    """
    source, _, wanted = name.partition(":")
    wanted, _, code = wanted.partition("@")
    if source == "zoo":
        return _find_zoo_class(wanted)
    module = torch.optim if source == "torch" else sys.modules.get(source)
    if module is None:
        raise InvalidInput(
            f"optimizer={name!r} is neither torch:NAME nor zoo:NAME nor package.module:CLASS of a module that is "
            "imported; import it in the module of your sweep"
        )
    if code and code != hash_code(f"{source}:{wanted}"):
        raise InvalidInput(f"optimizer={name!r}: {source} has changed since; make the recipe again")
    kind = getattr(module, wanted, None)
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
        return kind
    example = "; names are as there: torch:RAdam, torch:Muon" if source == "torch" else ", a torch.optim.Optimizer"
    raise InvalidInput(f"{module.__name__} has no optimizer {wanted!r}{example}")


def _find_zoo_class(wanted: str) -> Any:
    """The class of pytorch-optimizer with this name, in any case; raises InvalidInput with names that are close."""
    try:
        from pytorch_optimizer import get_supported_optimizers, load_optimizer
    except ModuleNotFoundError:
        raise InvalidInput(f"zoo:{wanted} is of pytorch-optimizer: pip install 'mvngrad-lab[zoo]'") from None
    supported, lower = get_supported_optimizers(), ZOO_NAMES.get(wanted.lower(), wanted.lower())
    if lower not in supported:
        near = ", ".join(f"zoo:{other}" for other in get_close_matches(lower, supported))
        remedy = f"did you mean {near}?" if near else "pytorch_optimizer.get_supported_optimizers() lists what it has"
        raise InvalidInput(f"pytorch-optimizer has no {wanted!r}; {remedy}")
    return load_optimizer(lower)
