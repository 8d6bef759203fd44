"""Verdicts on thm:mvngrad_convergence."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvngrad_lab.report.verdicts import Estimate, Strip, Verdict, decide, judges


@judges("convergence-bound")
def _(result: dict[str, Any]) -> Verdict:
    rate = result["rate"]
    bound, T = np.array(rate["bound"]), rate["T"]
    share = ((np.array(rate["measured"]) + rate["half_width"]) / bound).max()
    trivial = (bound > rate["trivial"]).mean()
    strip = Strip.of_numbers(
        "average squared gradient, of its bound", [(f"largest, T {T[0]:,} to {T[-1]:,}", share, 1)], "bound"
    )
    caveat = f"At {trivial:.0%} of the T the bound exceeds d max|F'|² = {rate['trivial']:.3g}, which no run can."
    return decide(bool(share <= 1), "", caveat if trivial >= 0.5 else "", strip)


@judges("convergence-rate")
def _(result: dict[str, Any]) -> Verdict:
    power = result["rate"]["exponent"]
    strip = Strip.of_numbers("exponent of T", [("average squared gradient", power, -0.5)], "paper", 3)
    return decide(power <= -0.45, "", strip=strip)


@judges("convergence-floor")
def _(result: dict[str, Any]) -> Verdict:
    powers = {name: floor["exponent"] for name, floor in result["floors"].items() if floor["exponent"] is not None}
    linear = [name for name, power in powers.items() if abs(power - 1) <= 0.15]
    without = [name for name in result["floors"] if name not in powers]
    rows = tuple(Estimate(f"{name} noise", power, reference=1.0) for name, power in powers.items())
    caveat = (
        f"Linear only for {', '.join(linear)} noise, spikes that s forgets before the next one; otherwise the floor "
        f"falls faster, and for {', '.join(without)} noise there is none. The bound holds for all."
    )
    return decide(
        bool(linear), "", caveat if len(linear) < len(powers) else "", Strip("exponent of 1−β₂ in the floor", rows)
    )


@judges("convergence-covariance")
def _(result: dict[str, Any]) -> Verdict:
    shares = {
        name: (np.array(floor["covariance"]) / floor["covariance_bound"]).max()
        for name, floor in result["floors"].items()
    }
    rows = tuple(Estimate(f"{name} noise", share, reference=1.0) for name, share in shares.items())
    strip = Strip("largest |Cov|, of the bound", rows, 3, "bound")
    return decide(bool(max(shares.values()) <= 1), "", strip=strip)


@judges("convergence-scaling")
def _(result: dict[str, Any]) -> Verdict:
    measured, bound = result["scaling"], result["scaling"]["bound"]
    rows = ((f"of {name}", measured[key], bound[key]) for name, key in (("d", "d"), ("1/ε", "inverse_eps")))
    strip = Strip.of_numbers("exponent", rows, "bound", 2)
    holds = all(measured[name] <= bound[name] + 0.05 for name in bound)
    loose = measured["inverse_eps"] < 0.5
    return decide(holds, "", "The bound's dependence on ε does not show." if loose else "", strip)
