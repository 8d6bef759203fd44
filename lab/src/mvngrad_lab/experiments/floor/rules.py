"""What several claims about the floor share: whether effects are gains, or equal within a margin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mvngrad_lab.experiments.floor.effects import Effects
from mvngrad_lab.recipe import COUPLED, NAMES
from mvngrad_lab.report.statistics import OUR_LEVEL, Contrast, adjust_by_holm
from mvngrad_lab.report.verdicts import NOT_REPRODUCED, REPRODUCED, UNDECIDED, Estimate, Strip, Verdict, decide

GAIN = 1.0
"""Points that the floor is said to be worth at least."""
MARGIN = 0.3
"""Points within which two arms are called equal."""
GAIN_LEVEL = 0.01
"""Of tests that something gains; all others have OUR_LEVEL."""
EQUIVALENCE_SEEDS = 6


def describe_seeds(seeds: Sequence[str], contrast: Contrast) -> str:
    which = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 6 else ", ".join(seeds)
    return f"n = {len(seeds)} seeds ({which}), {contrast.freedom} degrees of freedom"


def make_effect_strip(
    effects: Effects, n: int, reference: float = 0.0, what: str = "no effect", counts: Mapping[str, int] | None = None
) -> Strip:
    """The effects with their intervals; `counts` has the seeds of those that have others than n."""
    rows = tuple(
        Estimate(name, effect.estimate, effect.interval(), (counts or {}).get(name, n), reference)
        for name, effect in effects.items()
    )
    return Strip("points of test accuracy, and 95% interval", rows, reference=what)


def judge_gain(effect: Contrast, n: int, text: str, level: float = GAIN_LEVEL) -> Verdict:
    above, below = effect.p_above(GAIN), effect.p_below(GAIN)
    status = REPRODUCED if above < level else NOT_REPRODUCED if below < level else UNDECIDED
    strip = make_effect_strip({"with a floor less without": effect}, n, GAIN, "needed")
    return Verdict(status, f"p for more than {GAIN:g} point {above:.2g}, for less {below:.2g}; {text}", strip=strip)


def judge_gains(effects: Effects, details: str, n: int, level: float = OUR_LEVEL, least: float = 0.0) -> Verdict:
    """Whether the floor adds more than `least` points in each cell."""
    gains = {NAMES[cell]: effects[f"floor, {NAMES[cell]}"] for cell in COUPLED}
    above = dict(zip(gains, adjust_by_holm([gain.p_above(least) for gain in gains.values()]), strict=True))
    below = adjust_by_holm([gain.p_below(least) for gain in gains.values()])
    text = f"p (Holm): {', '.join(f'{cell} {value:.2g}' for cell, value in above.items())}; {details}"
    strip = make_effect_strip(gains, n, least, "needed" if least else "no effect")
    failed = [cell for cell in gains if above[cell] >= level]
    if len(failed) < len(gains):
        return decide(True, text, f"Not shown for {', '.join(failed)}." if failed else "", strip)
    return Verdict(NOT_REPRODUCED if min(below) < level else UNDECIDED, text, strip=strip)


def judge_equivalence(
    effects: Effects, seeds: Sequence[str], counts: Mapping[str, int] | None = None, margin: float = MARGIN
) -> Verdict:
    """Whether the first of the effects is within the margin; the others are stated."""
    effect, strip = next(iter(effects.values())), make_effect_strip(effects, len(seeds), counts=counts)
    p, (low, high) = effect.p_within(margin), effect.interval()
    text = f"p for within {margin} points {p:.2g}; {describe_seeds(seeds, effect)}"
    if len(seeds) < EQUIVALENCE_SEEDS:
        return Verdict(
            UNDECIDED, text, f"There were too few seeds to decide: {len(seeds)} of {EQUIVALENCE_SEEDS}.", strip
        )
    differs = (low > 0 or high < 0) and abs(effect.estimate) > margin
    if p >= OUR_LEVEL:
        return Verdict(NOT_REPRODUCED if differs else UNDECIDED, text, strip=strip)
    apart = [name for name, part in [*effects.items()][1:] if part.p_within(margin) >= OUR_LEVEL]
    note = f"Not shown to be within {margin} points: {'; '.join(apart)}." if apart else ""
    return decide(True, text, note, strip)
