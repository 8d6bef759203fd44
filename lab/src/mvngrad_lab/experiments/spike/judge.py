"""Verdicts on thm:spike, rem:adam_bound and cor:multi_spike."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvngrad_lab.report.verdicts import Verdict, decide, judges

ROUNDING = 1 + 1e-9
PANELS = ("long horizon", "early carry-over")


def get_peaks(result: dict[str, Any], panel: str, cell: str) -> Any:
    return np.array(result["panels"][panel]["peaks"][cell])


def check_bound(result: dict[str, Any], cell: str) -> tuple[bool, str]:
    peaks = {panel: get_peaks(result, panel, cell).max() for panel in PANELS}
    bounds = {panel: result["panels"][panel]["bounds"][cell] for panel in PANELS}
    text = "; ".join(f"{panel}: largest peak {peaks[panel]:.3g}, bound {bounds[panel]:.3g}" for panel in PANELS)
    return all(peaks[panel] <= bounds[panel] * ROUNDING for panel in PANELS), text


@judges("spike-mvngrad")
def _(result: dict[str, Any]) -> Verdict:
    holds, text = check_bound(result, "MVN-Grad")
    far = [p for p in PANELS if (get_peaks(result, p, "MVN-Grad") > 100 * get_peaks(result, p, "LaProp")).any()]
    caveat = (
        f"The constant is |u|/ε, and MVN-Grad reaches it or far exceeds LaProp ({', '.join(far)}): the gradients "
        "after the spike are constant, so their variance vanishes. AdaBelief has such a constant too."
    )
    return decide(holds, text, caveat if far else "")


@judges("spike-laprop")
def _(result: dict[str, Any]) -> Verdict:
    return decide(*check_bound(result, "LaProp"))


@judges("spike-adam")
def _(result: dict[str, Any]) -> Verdict:
    ratios = {
        name: (np.array(panel["adam_at_forgetting"]) / np.array(panel["carry_over"])).min()
        for name, panel in result["panels"].items()
    }
    text = "; ".join(f"{name}: smallest ratio of update to bound {ratio:.3g}" for name, ratio in ratios.items())
    return decide(all(ratio >= 1 / ROUNDING for ratio in ratios.values()), text)


@judges("spike-adam-growth")
def _(result: dict[str, Any]) -> Verdict:
    powers = {name: (panel["adam_growth"], panel["adam_growth_expected"]) for name, panel in result["panels"].items()}
    text = "; ".join(f"{name}: M^{power:.3f}, expected M^{expected:.3f}" for name, (power, expected) in powers.items())
    return decide(all(abs(power - expected) <= 0.05 and power > 0 for power, expected in powers.values()), text)


@judges("spike-adam-bounded")
def _(result: dict[str, Any]) -> Verdict:
    rows = result["adam_bounded"]
    text = "; ".join(f"({r['beta1']:g}, {r['beta2']:g}): {r['peak']:.4g} of {r['bound']:.4g}" for r in rows)
    holds = all(row["peak"] <= row["bound"] * ROUNDING for row in rows)
    return decide(holds, f"(β₁, β₂): peak of bound. {text}")


@judges("spike-figure-long")
def _(result: dict[str, Any]) -> Verdict:
    peaks = {cell: get_peaks(result, "long horizon", cell) for cell in ("LaProp", "MVN-Grad", "Adam")}
    ratios = {cell: values.max() / values.min() for cell, values in peaks.items()}
    text = "largest over smallest peak: " + ", ".join(f"{cell} {ratio:.3g}" for cell, ratio in ratios.items())
    above = float((peaks["MVN-Grad"] > peaks["Adam"]).mean())
    caveat = f"MVN-Grad's flat line is |u|/ε = {peaks['MVN-Grad'].max():.3g}, above Adam at {above:.0%} of all M."
    holds = max(ratios["LaProp"], ratios["MVN-Grad"]) < 10 and ratios["Adam"] > 100
    return decide(bool(holds), text, caveat if above else "")


@judges("spike-figure-early")
def _(result: dict[str, Any]) -> Verdict:
    panel = result["panels"]["early carry-over"]
    growth = {cell: np.array(panel["peaks"][cell]) / panel["peaks"][cell][0] for cell in ("LaProp", "MVN-Grad", "Adam")}
    text = "largest peak over that at M = 1: " + ", ".join(f"{cell} {v.max():.3g}" for cell, v in growth.items())
    is_bounded = np.maximum(growth["LaProp"], growth["MVN-Grad"]) <= 10
    is_far = abs(np.array(panel["sizes"]) / panel["resonance"] - 1) > 0.2
    caveat = (
        f"At M = 1/(1−β₁) = {panel['resonance']:.3g} m equals the gradients after the spike, and MVN-Grad peaks at "
        f"{panel['at_resonance']['MVN-Grad']:.2g}. The claim holds for M more than 20% away from it."
    )
    holds = is_bounded[is_far].all() and growth["Adam"].max() > 100
    return decide(bool(holds), text, "" if is_bounded.all() else caveat)


@judges("spike-adabelief")
def _(result: dict[str, Any]) -> Verdict:
    shares = {p: (get_peaks(result, p, "AdaBelief") > 10 * get_peaks(result, p, "MVN-Grad")).mean() for p in PANELS}
    text = "; ".join(f"{panel}: above 10 times MVN-Grad's at {share:.0%} of all M" for panel, share in shares.items())
    return decide(max(shares.values()) >= 0.5, text)


@judges("multi-spike-laprop")
def _(result: dict[str, Any]) -> Verdict:
    largest, bound = max(result["trains"]["laprop"]), result["trains"]["laprop_bound"]
    return decide(largest <= bound * ROUNDING, f"largest |z| {largest:.4g}, bound {bound:.4g}")


@judges("multi-spike-mvngrad")
def _(result: dict[str, Any]) -> Verdict:
    trains = result["trains"]
    largest, bound, jump = max(trains["mvngrad"]), trains["mvngrad_bound"], max(trains["shifted"])
    text = f"largest |z| at {sum(trains['spikes']):.0f} spikes {largest:.4g}, bound {bound:.4g}"
    caveat = f"The condition is needed: if the gradient jumps and stays there, |z| reaches {jump:.2g}."
    return decide(largest <= bound * ROUNDING, text, caveat if jump > bound else "")


@judges("z-clip")
def _(result: dict[str, Any]) -> Verdict:
    largest = max(max(panel["clipped"]) for panel in result["panels"].values())
    jump = max(result["trains"]["shifted_clipped"])
    text = f"largest update after one spike {largest:.4g}; largest |z| if the gradient jumps and stays there {jump:.4g}"
    return decide(max(largest, jump) <= result["trains"]["z_clip"] * ROUNDING, text)
