"""Verdicts on thm:separation_MVN-Grad_LaProp_smallvar and its lemmas."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.verdicts import Verdict, decided, judges

EXACT = 1e-12
FIXED, SIGNS = "MVN-Grad, s fixed", "LaProp, signs"


@judges("separation-heavy-ball")
def _(result: dict[str, Any]) -> Verdict:
    error = result["stable"]["heavy_ball_error"]
    return decided(error < EXACT, f"largest difference {error:.1g} of |x₀|, over {len(result['stable']['sums'])} steps")


@judges("separation-descent")
def _(result: dict[str, Any]) -> Verdict:
    slack = min(result["stable"]["slack"])
    return decided(slack >= -EXACT, f"smallest slack {slack:.1g} of Φ₀, over {len(result['stable']['slack'])} steps")


@judges("separation-upper")
def _(result: dict[str, Any]) -> Verdict:
    total, bound = result["stable"]["sums"][-1], result["stable"]["bound"]
    power, count = (result[name]["exponents"] for name in ("fixed_gap", "proofs_start"))
    growth = count["MVN-Grad, the theorem's count"]
    text = f"sum of squared gradients {total:.4g}, bound {bound:.4g}; steps grow as d^{power[FIXED]:.3f}"
    caveat = (
        f"O(1/ε²) hides F(x₀). From the proof's own start F(x₀) grows with d, the theorem's count grows as "
        f"d^{growth:.2f}, and the steps taken as d^{count[FIXED]:.2f}."
    )
    return decided(total <= bound and abs(power[FIXED]) <= 0.1, text, caveat if growth > 0.1 else "")


@judges("separation-laprop-form")
def _(result: dict[str, Any]) -> Verdict:
    error = result["closed_form_error"]
    return decided(error < EXACT, f"largest error {error:.1g} of x₀, over {result['horizon']} steps")


@judges("separation-lower")
def _(result: dict[str, Any]) -> Verdict:
    smallest, bound = result["smallest_gradient"], result["lower_bound"]
    power, free = result["proofs_start"]["exponents"][SIGNS], result["one_start"]["exponents"]
    memory, tuned = free["LaProp, beta2 = 0.99"], free["LaProp, signs, tuned constant rate"]
    text = f"smallest gradient {smallest:.4g}, bound {bound:.4g}; steps grow as d^{power:.3f}"
    caveat = (
        f"The limit does the work: from a start that knows no horizon LaProp with β₂ = 0.99 takes d^{memory:.2f} "
        f"steps, and on signs with a rate tuned to d, d^{tuned:.2f}."
    )
    return decided(smallest >= bound and abs(power - 1) <= 0.05, text, caveat if min(memory, tuned) < 0.5 else "")
