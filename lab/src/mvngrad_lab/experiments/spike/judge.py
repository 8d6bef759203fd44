"""Verdicts on thm:spike, rem:adam_bound and cor:multi_spike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mvngrad_lab.report.verdicts import Strip, Verdict, decide, judges

ROUNDING = 1 + 1e-9
PANELS = ("long horizon", "early carry-over")


def get_peaks(result: dict[str, Any], panel: str, cell: str) -> Any:
    return np.array(result["panels"][panel]["peaks"][cell])


def decide_bound(what: str, rows: Iterable[tuple[str, float, float]], caveat: str = "") -> Verdict:
    """Whether each of (label, value, bound) is under its bound."""
    rows = list(rows)
    holds = all(value <= bound * ROUNDING for _, value, bound in rows)
    return decide(bool(holds), "", caveat, Strip.of_numbers(what, rows, "bound"))


def decide_peaks(result: dict[str, Any], cell: str, caveat: str = "") -> Verdict:
    panels = result["panels"]
    rows = [(panel, get_peaks(result, panel, cell).max(), panels[panel]["bounds"][cell]) for panel in PANELS]
    return decide_bound(f"largest update of {cell}", rows, caveat)


@judges("spike-mvngrad")
def _(result: dict[str, Any]) -> Verdict:
    far = [p for p in PANELS if (get_peaks(result, p, "MVN-Grad") > 100 * get_peaks(result, p, "LaProp")).any()]
    caveat = (
        f"The constant is |u|/ε, and MVN-Grad reaches it or far exceeds LaProp ({', '.join(far)}): the gradients "
        "after the spike are constant, so their variance vanishes. AdaBelief has such a constant too."
    )
    return decide_peaks(result, "MVN-Grad", caveat if far else "")


@judges("spike-laprop")
def _(result: dict[str, Any]) -> Verdict:
    return decide_peaks(result, "LaProp")


@judges("spike-adam")
def _(result: dict[str, Any]) -> Verdict:
    ratios = {
        name: (np.array(panel["adam_at_forgetting"]) / np.array(panel["carry_over"])).min()
        for name, panel in result["panels"].items()
    }
    strip = Strip.of_numbers(
        "smallest update of Adam at t*, of the bound", ((*row, 1) for row in ratios.items()), "bound"
    )
    return decide(all(ratio >= 1 / ROUNDING for ratio in ratios.values()), "", strip=strip)


@judges("spike-adam-growth")
def _(result: dict[str, Any]) -> Verdict:
    powers = {name: (panel["adam_growth"], panel["adam_growth_expected"]) for name, panel in result["panels"].items()}
    strip = Strip.of_numbers("exponent of M", ((name, *pair) for name, pair in powers.items()), "expected", 3)
    holds = all(abs(power - expected) <= 0.05 and power > 0 for power, expected in powers.values())
    return decide(holds, "", strip=strip)


@judges("spike-adam-bounded")
def _(result: dict[str, Any]) -> Verdict:
    rows = ((f"β = ({r['beta1']:g}, {r['beta2']:g})", r["peak"], r["bound"]) for r in result["adam_bounded"])
    return decide_bound("largest update of Adam", rows)


@judges("spike-figure-long")
def _(result: dict[str, Any]) -> Verdict:
    peaks = {cell: get_peaks(result, "long horizon", cell) for cell in ("LaProp", "MVN-Grad", "Adam")}
    ratios = {cell: values.max() / values.min() for cell, values in peaks.items()}
    strip = Strip.of_numbers("largest over smallest peak", ratios.items())
    above = float((peaks["MVN-Grad"] > peaks["Adam"]).mean())
    caveat = f"MVN-Grad's flat line is |u|/ε = {peaks['MVN-Grad'].max():.3g}, above Adam at {above:.0%} of all M."
    holds = max(ratios["LaProp"], ratios["MVN-Grad"]) < 10 and ratios["Adam"] > 100
    return decide(bool(holds), "", caveat if above else "", strip)


@judges("spike-figure-early")
def _(result: dict[str, Any]) -> Verdict:
    panel = result["panels"]["early carry-over"]
    growth = {cell: np.array(panel["peaks"][cell]) / panel["peaks"][cell][0] for cell in ("LaProp", "MVN-Grad", "Adam")}
    rows = ((cell, values.max()) for cell, values in growth.items())
    strip = Strip.of_numbers("largest peak over that at M = 1", rows)
    is_bounded = np.maximum(growth["LaProp"], growth["MVN-Grad"]) <= 10
    is_far = abs(np.array(panel["sizes"]) / panel["resonance"] - 1) > 0.2
    caveat = (
        f"At M = 1/(1−β₁) = {panel['resonance']:.3g} m equals the gradients after the spike, and MVN-Grad peaks at "
        f"{panel['at_resonance']['MVN-Grad']:.2g}. The claim holds for M more than 20% away from it."
    )
    holds = is_bounded[is_far].all() and growth["Adam"].max() > 100
    return decide(bool(holds), "", "" if is_bounded.all() else caveat, strip)


@judges("spike-adabelief")
def _(result: dict[str, Any]) -> Verdict:
    shares = {p: (get_peaks(result, p, "AdaBelief") > 10 * get_peaks(result, p, "MVN-Grad")).mean() for p in PANELS}
    rows = ((panel, 100 * share, 50) for panel, share in shares.items())
    strip = Strip.of_numbers("AdaBelief's peak above 10 times MVN-Grad's, % of all M", rows, "needed", 0)
    return decide(max(shares.values()) >= 0.5, "", strip=strip)


@judges("multi-spike-laprop")
def _(result: dict[str, Any]) -> Verdict:
    largest, bound = max(result["trains"]["laprop"]), result["trains"]["laprop_bound"]
    return decide_bound("largest normalized gradient, |z|", [("LaProp", largest, bound)])


@judges("multi-spike-mvngrad")
def _(result: dict[str, Any]) -> Verdict:
    trains = result["trains"]
    largest, bound, jump = max(trains["mvngrad"]), trains["mvngrad_bound"], max(trains["shifted"])
    what = f"largest normalized gradient, |z|, at {sum(trains['spikes']):.0f} spikes"
    caveat = f"The condition is needed: if the gradient jumps and stays there, |z| reaches {jump:.2g}."
    return decide_bound(what, [("MVN-Grad", largest, bound)], caveat if jump > bound else "")


@judges("z-clip")
def _(result: dict[str, Any]) -> Verdict:
    largest = max(max(panel["clipped"]) for panel in result["panels"].values())
    jump = max(result["trains"]["shifted_clipped"])
    bound = result["trains"]["z_clip"]
    rows = [("update after one spike", largest, bound), ("|z| if the gradient jumps and stays", jump, bound)]
    return decide_bound("largest value", rows)


@judges("spike-forgetting")
def _(result: dict[str, Any]) -> Verdict:
    errors = {}
    for name, panel in result["panels"].items():
        beta2, sizes = panel["panel"]["beta2"], np.array(panel["sizes"])
        expected = np.maximum(1, (2 * np.log(sizes) + np.log(1 - beta2)) / -np.log(beta2))
        errors[name] = float(abs(np.array(panel["forgetting_times"]) - expected).max())
    strip = Strip.of_numbers("largest difference, steps", ((*row, 1) for row in errors.items()))
    return decide(max(errors.values()) <= ROUNDING, "", strip=strip)
