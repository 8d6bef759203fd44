"""Verdicts on thm:mvngrad_convergence."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.verdicts import Verdict, decided, judges


@judges("convergence-bound")
def _(result: dict[str, Any]) -> Verdict:
    rate = result["rate"]
    tops = [mean + half for mean, half in zip(rate["measured"], rate["half_width"], strict=True)]
    shares = [top / bound for top, bound in zip(tops, rate["bound"], strict=True)]
    trivial = sum(bound > rate["trivial"] for bound in rate["bound"]) / len(rate["bound"])
    text = f"T from {rate['T'][0]:,} to {rate['T'][-1]:,}: measured at most {max(shares):.1%} of the bound"
    caveat = f"At {trivial:.0%} of the T the bound exceeds d max|F'|² = {rate['trivial']:.3g}, which no run can."
    return decided(max(shares) <= 1, text, caveat if trivial >= 0.5 else "")


@judges("convergence-rate")
def _(result: dict[str, Any]) -> Verdict:
    power = result["rate"]["exponent"]
    return decided(power <= -0.45, f"T^{power:.3f}")


@judges("convergence-floor")
def _(result: dict[str, Any]) -> Verdict:
    powers = {name: floor["exponent"] for name, floor in result["floors"].items() if floor["exponent"] is not None}
    linear = [name for name, power in powers.items() if abs(power - 1) <= 0.15]
    text = ", ".join(f"{name} noise (1−β₂)^{power:.2f}" for name, power in powers.items())
    none = [name for name, floor in result["floors"].items() if floor["exponent"] is None]
    caveat = (
        f"Linear only for {', '.join(linear)} noise, spikes that s has forgotten before the next; else the floor falls "
        f"faster, and for {', '.join(none)} noise there is none. The bound holds for all."
    )
    return decided(bool(linear), text, caveat if len(linear) < len(powers) else "")


@judges("convergence-covariance")
def _(result: dict[str, Any]) -> Verdict:
    shares = {
        name: max(c / b for c, b in zip(floor["covariance"], floor["covariance_bound"], strict=True))
        for name, floor in result["floors"].items()
    }
    text = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return decided(max(shares.values()) <= 1, f"largest |Cov|, of the bound: {text}")
