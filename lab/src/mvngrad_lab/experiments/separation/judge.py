"""Verdicts on thm:separation_MVN-Grad_LaProp_smallvar and its lemmas."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.verdicts import Strip, Verdict, decide, judges

EXACT = 1e-12
FIXED, SIGNS = "MVN-Grad, s fixed", "LaProp, signs"


@judges("separation-heavy-ball")
def _(result: dict[str, Any]) -> Verdict:
    error, steps = result["stable"]["heavy_ball_error"], len(result["stable"]["sums"])
    strip = Strip.of_numbers("difference, of |x₀|", [(f"largest of {steps} steps", error, EXACT)])
    return decide(error < EXACT, "", strip=strip)


@judges("separation-descent")
def _(result: dict[str, Any]) -> Verdict:
    slack = result["stable"]["slack"]
    strip = Strip.of_numbers("slack, of Φ₀", [(f"smallest of {len(slack)} steps", min(slack), -EXACT)])
    return decide(min(slack) >= -EXACT, "", strip=strip)


@judges("separation-upper")
def _(result: dict[str, Any]) -> Verdict:
    total, bound = result["stable"]["sums"][-1], result["stable"]["bound"]
    power, from_proof = result["fixed_gap"]["exponents"][FIXED], result["proofs_start"]["exponents"]
    growth = from_proof["MVN-Grad, the theorem's count"]
    strip = Strip.of_numbers("exponent of d in the steps", [(FIXED, power, 0)], "paper", 3)
    text = f"sum of squared gradients {total:.4g}, bound {bound:.4g}"
    caveat = (
        f"O(1/ε²) hides F(x₀). From the proof's own start F(x₀) grows with d, the theorem's count grows as "
        f"d^{growth:.2f}, and the steps taken as d^{from_proof[FIXED]:.2f}."
    )
    return decide(total <= bound and abs(power) <= 0.1, text, caveat if growth > 0.1 else "", strip)


@judges("separation-laprop-form")
def _(result: dict[str, Any]) -> Verdict:
    error = result["closed_form_error"]
    strip = Strip.of_numbers("error, of x₀", [(f"largest of {result['horizon']} steps", error, EXACT)])
    return decide(error < EXACT, "", strip=strip)


@judges("separation-lower")
def _(result: dict[str, Any]) -> Verdict:
    smallest, bound = result["smallest_gradient"], result["lower_bound"]
    power, from_one = result["proofs_start"]["exponents"][SIGNS], result["one_start"]["exponents"]
    memory, tuned = from_one["LaProp, beta2 = 0.99"], from_one["LaProp, signs, tuned constant rate"]
    strip = Strip.of_numbers("exponent of d in the steps", [(SIGNS, power, 1)], "paper", 3)
    text = f"smallest gradient {smallest:.4g}, bound {bound:.4g}"
    caveat = (
        f"Only in the limit: from a start that depends on no horizon, LaProp with β₂ = 0.99 takes d^{memory:.2f} "
        f"steps, and on signs with a rate tuned to d, d^{tuned:.2f}."
    )
    holds = smallest >= bound and abs(power - 1) <= 0.05
    return decide(holds, text, caveat if min(memory, tuned) < 0.5 else "", strip)


@judges("separation-others")
def _(result: dict[str, Any]) -> Verdict:
    adam = result["proofs_start"]["exponents"].get("Adam, beta2 = 0.99")
    variance = result["fixed_gap"]["exponents"]["AdaBelief, s fixed"]
    rows = [] if adam is None else [("Adam, from the proof's start", adam)]
    strip = Strip.of_numbers("exponent of d in the steps", [*rows, ("AdaBelief, s fixed", variance)], digits=3)
    text = "from the proof's start Adam does not get there" if adam is None else ""
    return decide(adam is not None and adam >= 0.5 and abs(variance) <= 0.1, text, strip=strip)


EXPONENT = "exponent of T in the average squared gradient"


@judges("separation-rate")
def _(result: dict[str, Any]) -> Verdict:
    ours = result["rates"]["exponents"]["MVN-Grad, s fixed"]
    return decide(ours <= -0.9, "", strip=Strip.of_numbers(EXPONENT, [("MVN-Grad, s fixed", ours, -1)], "paper", 2))


@judges("separation-improves")
def _(result: dict[str, Any]) -> Verdict:
    powers = result["rates"]["exponents"]
    ours, theirs, constant = (powers[name] for name in ("MVN-Grad, s fixed", "Adam, rate 1/√T", "Adam, constant rate"))
    rows = (("MVN-Grad, s fixed", ours, -1), ("Adam, rate 1/√T", theirs, -0.5))
    text = f"with a constant rate of 0.001 Adam has T^{constant:.2f}; the improvement is one of upper bounds"
    return decide(theirs >= ours + 0.3, text, strip=Strip.of_numbers(EXPONENT, rows, "paper", 2))
