"""Verdicts on thm:spike, rem:adam_bound and cor:multi_spike."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvngrad_lab.report.verdicts import Verdict, decided, judges

ROUNDING = 1 + 1e-9
PANELS = ("long horizon", "early carry-over")


def peaks(result: dict[str, Any], panel: str, cell: str) -> Any:
    return np.array(result["panels"][panel]["peaks"][cell])


def bounded(result: dict[str, Any], cell: str) -> tuple[bool, str]:
    texts, holds = [], True
    for panel in PANELS:
        worst, bound = peaks(result, panel, cell).max(), result["panels"][panel]["bounds"][cell]
        holds &= bool(worst <= bound * ROUNDING)
        texts.append(f"{panel}: largest peak {worst:.3g}, bound {bound:.3g}")
    return holds, "; ".join(texts)


@judges("spike-mvngrad")
def _(result: dict[str, Any]) -> Verdict:
    holds, text = bounded(result, "MVN-Grad")
    far = [p for p in PANELS if (peaks(result, p, "MVN-Grad") > 100 * peaks(result, p, "LaProp")).any()]
    caveat = (
        f"The constant is |u|/ε, and MVN-Grad reaches it or far exceeds LaProp ({', '.join(far)}): constant "
        "gradients after the spike leave no variance to divide by. AdaBelief has such a constant too."
    )
    return decided(holds, text, caveat if far else "")


@judges("spike-laprop")
def _(result: dict[str, Any]) -> Verdict:
    return decided(*bounded(result, "LaProp"))


@judges("spike-adam")
def _(result: dict[str, Any]) -> Verdict:
    ratios = {
        name: (np.array(panel["adam_at_forgetting"]) / np.array(panel["carry_over"])).min()
        for name, panel in result["panels"].items()
    }
    text = "; ".join(f"{name}: smallest ratio of update to bound {ratio:.3g}" for name, ratio in ratios.items())
    return decided(all(ratio >= 1 / ROUNDING for ratio in ratios.values()), text)


@judges("spike-adam-growth")
def _(result: dict[str, Any]) -> Verdict:
    pairs = {name: (panel["adam_growth"], panel["adam_growth_expected"]) for name, panel in result["panels"].items()}
    text = "; ".join(f"{name}: M^{found:.3f}, expected M^{due:.3f}" for name, (found, due) in pairs.items())
    return decided(all(abs(found - due) <= 0.05 and found > 0 for found, due in pairs.values()), text)


@judges("spike-adam-bounded")
def _(result: dict[str, Any]) -> Verdict:
    rows = result["adam_bounded"]
    text = "; ".join(f"({r['beta1']:g}, {r['beta2']:g}): {r['peak']:.4g} of {r['bound']:.4g}" for r in rows)
    return decided(all(row["peak"] <= row["bound"] * ROUNDING for row in rows), f"(β₁, β₂): peak of bound. {text}")


def spread(values: Any) -> float:
    return float(values.max() / values.min())


@judges("spike-figure-long")
def _(result: dict[str, Any]) -> Verdict:
    found = {cell: peaks(result, "long horizon", cell) for cell in ("LaProp", "MVN-Grad", "Adam")}
    text = "largest over smallest peak: " + ", ".join(f"{cell} {spread(v):.3g}" for cell, v in found.items())
    holds = max(spread(found["LaProp"]), spread(found["MVN-Grad"])) < 10 and spread(found["Adam"]) > 100
    above = float((found["MVN-Grad"] > found["Adam"]).mean())
    caveat = f"MVN-Grad's flat line is |u|/ε = {found['MVN-Grad'].max():.3g}, above Adam at {above:.0%} of all M."
    return decided(holds, text, caveat if above else "")


@judges("spike-figure-early")
def _(result: dict[str, Any]) -> Verdict:
    panel = result["panels"]["early carry-over"]
    away = abs(np.array(panel["sizes"]) / panel["resonance"] - 1) > 0.2
    growth = {cell: np.array(panel["peaks"][cell]) / panel["peaks"][cell][0] for cell in ("LaProp", "MVN-Grad", "Adam")}
    text = "largest peak over that at M = 1: " + ", ".join(f"{cell} {v.max():.3g}" for cell, v in growth.items())
    calm = [np.maximum(growth["LaProp"], growth["MVN-Grad"])[chosen].max() <= 10 for chosen in (away, ...)]
    caveat = (
        f"At M = 1/(1−β₁) = {panel['resonance']:.3g} the spike leaves m equal to the gradients that follow, and "
        f"MVN-Grad peaks at {panel['at_resonance']['MVN-Grad']:.2g}. Outside 20% around it the claim holds."
    )
    return decided(bool(calm[0] and growth["Adam"].max() > 100), text, "" if calm[1] else caveat)


@judges("spike-adabelief")
def _(result: dict[str, Any]) -> Verdict:
    shares = {p: (peaks(result, p, "AdaBelief") > 10 * peaks(result, p, "MVN-Grad")).mean() for p in PANELS}
    text = "; ".join(f"{panel}: above 10 times MVN-Grad's at {share:.0%} of all M" for panel, share in shares.items())
    return decided(max(shares.values()) >= 0.5, text)


@judges("multi-spike-laprop")
def _(result: dict[str, Any]) -> Verdict:
    trains = result["trains"]
    worst, bound = max(trains["laprop"]), trains["laprop_bound"]
    return decided(worst <= bound * ROUNDING, f"largest |z| {worst:.4g}, bound {bound:.4g}")


@judges("multi-spike-mvngrad")
def _(result: dict[str, Any]) -> Verdict:
    trains = result["trains"]
    worst, bound, jump = max(trains["mvngrad"]), trains["mvngrad_bound"], max(trains["shifted"])
    caveat = f"The condition is needed: where the gradient jumps and stays, |z| reaches {jump:.2g}."
    return decided(
        worst <= bound * ROUNDING,
        f"largest |z| at {sum(trains['spikes']):.0f} spikes {worst:.4g}, bound {bound:.4g}",
        caveat if jump > bound else "",
    )


@judges("z-clip")
def _(result: dict[str, Any]) -> Verdict:
    clip = result["trains"]["z_clip"]
    worst = max(max(panel["clipped"]) for panel in result["panels"].values())
    jump = max(result["trains"]["shifted_clipped"])
    text = f"largest update after one spike {worst:.4g}; largest |z| where the gradient jumps and stays {jump:.4g}"
    return decided(max(worst, jump) <= clip * ROUNDING, text)
