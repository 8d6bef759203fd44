"""What `diagnose` says if epsilon is most of the divisor: how to remove that floor, and what floors did in our runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from mvngrad.diagnostics.records import Record

FLOOR_SHARE = 0.1
"""Share of coordinates at the floor of epsilon that counts as active. Their steps are lr |m| / epsilon."""

MEASURED_FLOOR = (
    "On CIFAR-100 the floor was 1e-3, 2.1 times the root mean square of the gradient, and 8 times the median root in "
    "the first 24 steps."
)
"""Other floors had other effects, so each citation says how large this one was."""

FLOOR_COUPLED = (
    f"{MEASURED_FLOOR} There such a floor added 2 points with coupled weight decay; decoupled decay without a floor "
    "(AdamW, MVNGradW) added 1.5 (three seeds). lr and betas were tuned with and without it, so they differ, too."
)
FLOOR_DECOUPLED = (
    f"{MEASURED_FLOOR} There, with decoupled weight decay, it added 0.9 points to MVNGradW, and 0.2 to AdamW, which "
    "three seeds do not separate from 0. Betas differed, too, so this need not be the floor's effect."
)
FLOOR_WITHOUT_DECAY = (
    f"{MEASURED_FLOOR} There, without weight decay, it lost 1.7 points with Adam and 3.1 with MVN-Grad (30 epochs, one "
    "seed; its best rate was the highest of four). Betas differed, too, so this need not be the floor's effect."
)
FLOOR_LANGUAGE = (
    "On a language model a floor of 1.4 times the root mean square of the gradient cost 0.30 to 0.48 nats, one of 14 "
    "times 0.76 to 0.93 (GPT-2 30M, 1,000 steps, weight decay 1e-6, best of four rates, one seed)."
)

LARGER_EPS = (
    "A larger eps also avoids it, but such a floor cost a language model 0.30 nats or more (GPT-2 30M, one seed)."
)
"""For sign collapse; from `FLOOR_LANGUAGE`."""

NO_FLOOR = 0.1
"""Multiple of the median root at which a floor hardly changes that coordinate's divisor: eps by 10%, eps_s by 0.5%."""


def advise_on_floor(last: Record, root: float, optimizer: str) -> str:
    """When to keep the floor of a record, and how to remove it: with values, if the median root is below it."""
    unless = "If that is not intended,"
    if last.get("weight_decay") and not _is_decoupled(last, optimizer):
        unless = "On images a floor may help with coupled weight decay, as measured below. Otherwise"
    eps, floor = (min(last[name], NO_FLOOR * root) for name in ("eps", "floor"))
    settings = [f"eps_s={floor * floor * (1 - last['beta2']):.1g}"] if floor < last["floor"] else []
    settings += [f"eps={eps:.1g}"] if eps < last["eps"] else []
    if not settings:
        least = NO_FLOOR * max(last["eps"], last["floor"])
        names = [name for name, value in (("eps_s", last["floor"]), ("eps", last["eps"])) if value >= least]
        return f"{unless} lower {' and '.join(names)}, and lr too if it was tuned with this floor."
    growth = (math.hypot(root, last["floor"]) + last["eps"]) / (math.hypot(root, floor) + eps)
    return (
        f"{unless} set {' and '.join(settings)}, a floor of about a tenth of the median root "
        f"({root:.2g}). At the same lr the median step is then about {growth:.2g} times as large: lower lr if it was "
        "tuned with this floor."
    )


def _is_decoupled(entry: Record, optimizer: str) -> bool:
    """Whether a group decouples weight decay; early records have only the name of the optimizer."""
    return bool(entry.get("decoupled_weight_decay", optimizer.endswith("W")))


def compare_floor_with_root(last: Record, roots: Sequence[float], *, is_hidden: bool) -> tuple[str, ...]:
    """A sentence on the size of a record's floor relative to the median root; none without roots.

    If the floor hides them, `roots` are upper bounds.
    """
    if not roots:
        return ()
    floor, root = last["eps"] + last["floor"], median(roots)  # the smallest possible divisor
    times = f"{floor / root:.2g} times the median root"
    size = f"more than {times}" if is_hidden else f"{times} ({root:.2g})"
    return (f"Your floor of {floor:.2g} is {size}. Floors of other sizes have other effects; what we measured:",)


def cite_measurements(optimizer: str, groups: Sequence[Record]) -> tuple[str, ...]:
    """What we measured with a floor: on images with the weight decay that these groups have, and on language."""
    decays = [entry.get("weight_decay") for entry in groups]
    is_decoupled = any(_is_decoupled(entry, optimizer) for entry in groups)
    cited = []
    if any(decays) or None in decays:  # early records do not have it, so that both apply
        cited.append(FLOOR_DECOUPLED if is_decoupled else FLOOR_COUPLED)
    if not any(decays):
        cited.append(FLOOR_WITHOUT_DECAY)
    return (*cited, FLOOR_LANGUAGE)
