"""Register the optimizers in timm by name."""

from __future__ import annotations

try:
    from timm.optim._optim_factory import OptimInfo, default_registry
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("timm"):  # it is installed, and its own message says what is missing
        raise
    raise ImportError("mvngrad.integrations.timm needs timm: pip install timm") from error

from mvngrad import optim

NAMES = ("MVNGrad", "MVNGradW", "LaProp", "LaPropW", "AdaBelief", "AdaBeliefW")


def register() -> list[str]:
    """Make `timm.optim.create_optimizer_v2(model, opt="mvngradw", ...)` find these classes; return the names.

    MVN-Grad is `mvngrad` and `mvngradw`. The others are `mvngrad-laprop`, `mvngrad-adabelief` and so on, because timm
    has its own `laprop` and `adabelief`, and reads only what follows the last underscore of a name.
    """
    names = []
    for name in NAMES:
        key = name.lower() if name.startswith("MVN") else f"mvngrad-{name.lower()}"
        decay = "decoupled" if name.endswith("W") else "coupled"
        info = OptimInfo(key, getattr(optim, name), f"{name} of mvngrad, {decay} weight decay", has_betas=True)
        default_registry.register(info)
        names.append(key)
    return names
