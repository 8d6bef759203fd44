"""Judge a Monitor's records: which regime a training is in, and which optimizer the paper's theory would pick for it.

Standard library only. Every statement carries its numbers; "cannot tell" is a valid answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, Any

from mvngrad.diagnostics.floor import (
    FLOOR_SHARE,
    LARGER_EPS,
    advise_on_floor,
    cite_measurements,
    compare_floor_with_root,
)
from mvngrad.diagnostics.records import Record, check_not_mixed, drop_repeated_steps, read_records
from mvngrad.diagnostics.signal_to_noise import (
    CENTERED,
    MEASURED_SIGNAL,
    drop_first_steps,
    find_lower_bounds,
    get_clipped,
    get_hidden,
    judge_signal,
)
from mvngrad.diagnostics.spikes import GRADIENT_SPIKE, RECOVERED
from mvngrad.diagnostics.statements import (
    CANNOT_TELL,
    CHOICE,
    ENOUGH,
    Diagnosis,
    GroupDiagnosis,
    Statement,
    format_range,
    too_few_records,
)
from mvngrad.rule import ADABELIEF, ADAM, LAPROP, MVNGRAD

if TYPE_CHECKING:
    from mvngrad.diagnostics.gap import VarianceGap

JUDGED_RECORDS = 20
"""The number of records that are judged, the most recent ones: the regime changes during a training."""

COLLAPSE_SHARE = 0.1
"""Share of coordinates in sign collapse from which it is reported as present. Chance does not produce it: with noise
alone, an update near lr is 4 standard deviations of m away."""

MAJORITY = 0.5
"""Share of coordinates at the floor of epsilon from which the optimizer as a whole works like SGD with momentum, or of
clipped coordinates from which it works like SGD on the sign."""

CARRIED_MULTIPLE = 1.5
"""A spike is carried over if a later update exceeds this multiple of both the largest update during the spike and the
bound for recovery, and momentum can carry it: see `_can_carry_spikes`."""

LEAST_GAP = 0.02
"""Smallest share of AdaBelief's variance that the other order must save for the order to matter."""

GAP_ERRORS = 2.0
"""Number of standard errors by which a measured gap must differ from 0."""

BY_LR = "move by almost exactly lr at each step, whatever the size of their gradient"

BY_Z_CLIP = "move by z_clip * lr at each step, whatever the size of their gradient"

MEASURE_ORDER = "Measure the order of momentum with variance_gap."

LOOK_FOR_NAN = "Unless GradScaler skipped these steps, look for NaN in the weights. "

ONLY_THEORY = (
    "This is the theory of the paper, and does not predict which optimizer reaches the lowest loss: on a language "
    "model none was shown to be ahead of all others (GPT-2 30M, three seeds)."
)


def diagnose(records: Iterable[Record] | str | os.PathLike[str], gap: VarianceGap | None = None) -> Diagnosis:
    """Judge the last records of a `Monitor`, or those in its file; a measured `gap` helps to decide the order.

    If two trainings wrote to the same file, the second is judged. A training that resumed from a checkpoint is judged
    as one. Raises a ValueError if the records of several Monitors are mixed.

    >>> print(diagnose([]))
    No record, no diagnosis.
    """
    if isinstance(records, (str, os.PathLike)):
        records = read_records(records)
    if isinstance(records, dict) or not isinstance(records, Iterable):
        raise TypeError(f"diagnose: pass a list of records, or the file of a Monitor; got a {type(records).__name__}")
    records = list(records)
    check_not_mixed(records)
    training = drop_repeated_steps(records)
    judged = _drop_other_settings(training[-JUDGED_RECORDS:])
    if not judged:
        return Diagnosis(None, ())
    numbers = sorted({entry["group"] for record in judged for entry in record["groups"]})
    groups = tuple(_diagnose_group(number, training, judged, gap) for number in numbers)
    return Diagnosis((judged[0]["step"], judged[-1]["step"]), groups, tuple(_note_not_finite(training)))


def _drop_other_settings(records: Sequence[Record]) -> list[Record]:
    """The last records with about the settings of the last one: they can change when a training resumes."""

    def get_settings(entry: Record) -> tuple[Any, ...]:
        eps_s = entry["floor"] * entry["floor"] * (1 - entry["beta2"])  # beta2 may have a schedule
        return entry["cell"], entry.get("z_clip"), entry["eps"], eps_s

    def has_last_settings(record: Record) -> bool:
        pairs = [(get_settings(entry), last.get(entry["group"])) for entry in record["groups"]]
        return all(
            now is None or (then[:2] == now[:2] and all(map(_within_a_factor_of_2, then[2:], now[2:])))
            for then, now in pairs
        )

    last = {entry["group"]: get_settings(entry) for entry in records[-1]["groups"]} if records else {}
    return [*takewhile(has_last_settings, reversed(records))][::-1]


def _within_a_factor_of_2(a: float, b: float) -> bool:
    """For epsilons, which may have a schedule."""
    return a <= 2 * b and b <= 2 * a


def _note_not_finite(training: Sequence[Record]) -> Iterator[str]:
    """A sentence for each logged name with values that were not finite: they are rare, so the whole training counts."""
    for name in dict.fromkeys(name for record in training for name in record.get("logged_not_finite", {})):
        counts = {record["step"]: record.get("logged_not_finite", {}).get(name, 0) for record in training}
        first = next((step for step, count in counts.items() if count), None)
        if first is not None:
            yield f"Values of {name} that were not finite: {sum(counts.values())}, the first by step {first}."


def _diagnose_group(
    number: int, training: Sequence[Record], judged: Sequence[Record], gap: VarianceGap | None
) -> GroupDiagnosis:
    entries = _find_entries(number, judged)
    signal = judge_signal(entries)
    collapse = _judge_collapse(entries)
    floor = _judge_floor(entries)
    spikes = _judge_spikes(_find_entries(number, training))  # spikes are rare, so the whole training counts
    normalizer = _judge_normalizer(signal, collapse, floor)
    order = _judge_order(entries[-1], signal, spikes, gap)
    statements = [signal, collapse, floor, spikes, normalizer, order, _pick_optimizer(normalizer, order)]
    statements.sort(key=lambda statement: statement.verdict == CANNOT_TELL)
    cell = entries[-1]["cell"]
    optimizer = judged[-1].get("optimizer") or cell
    floor_action, measured = _explain_floor(entries, optimizer, judged[-1]["groups"])
    measure = MEASURE_ORDER if gap is None else order.because
    finding, action = _summarize(floor_action, measure, signal, collapse, floor, spikes)
    if floor.numbers.get("share", 0.0) < MAJORITY:  # what was measured with a floor is of no use then
        measured = ()
    if (nonfinite := _find_nonfinite_state(number, training)) is not None:
        step, share = nonfinite
        percent = f"{share:.0%}" if share >= 0.01 else f"{100 * share:.2g}%"
        finding = f"From step {step} on a part of the state is not finite: {percent} in the last record."
        action, measured = "Go back to a checkpoint before that, and clip or skip such gradients, or lower lr.", ()
    return GroupDiagnosis(number, cell, optimizer, finding, action, tuple(statements), measured, len(entries))


def _find_entries(number: int, records: Sequence[Record]) -> list[Record]:
    """The entries of one group in the records."""
    return [entry for record in records for entry in record["groups"] if entry["group"] == number]


def _explain_floor(entries: Sequence[Record], optimizer: str, groups: Sequence[Record]) -> tuple[str, tuple[str, ...]]:
    """What to do about the floor of a group, and sentences on its size and on what floors did in our runs."""
    with_root = [entry for entry in entries if entry.get("root")]  # early records do not have it
    roots = [entry["root"] for entry in with_root if get_hidden(entry) < MAJORITY]
    upper_bounds = [entry["root"] for entry in with_root]  # of the roots that the floor hides
    size = compare_floor_with_root(entries[-1], roots or upper_bounds, is_hidden=not roots)
    action = advise_on_floor(entries[-1], median(roots) if roots else math.inf, optimizer)
    return action, (*size, *cite_measurements(optimizer, groups))


def _find_nonfinite_state(number: int, training: Sequence[Record]) -> tuple[int, float] | None:
    """The first step from which every record has state that is not finite, and its share in the last record.

    None if the last record is finite.
    """
    lost = None
    for record in training:
        for entry in _find_entries(number, [record]):
            share = entry.get("not_finite") or 0.0
            lost = (lost[0] if lost else record["step"], share) if share else None
    return lost


def _summarize(
    floor_action: str, measure: str, signal: Statement, collapse: Statement, floor: Statement, spikes: Statement
) -> tuple[str, str]:
    """What is known that matters most, and one thing to do about it."""
    share = floor.numbers.get("share", 0.0)
    rates = f" at {_format_rates(floor.numbers['sgd_rates'])}" if "sgd_rates" in floor.numbers else ""
    like_sgd = f"{share:.0%} of the coordinates are stepped as by SGD with momentum{rates}"
    if share >= MAJORITY:
        return f"{like_sgd}, because their divisor is mostly epsilon.", floor_action
    if "z_clip" in collapse.numbers:
        finding = f"{collapse.numbers['share']:.0%} of the coordinates {BY_Z_CLIP}."
        return finding, "If that is not intended, raise z_clip, and lower lr with it."
    if spikes.verdict == "carried over":
        return (
            f"{spikes.numbers['carried_over']} of {spikes.numbers['count']} spikes of the gradient came back in later "
            "updates.",
            "Clip the norm of the gradient, or use momentum after normalizing (LaProp, MVN-Grad), which has z_clip.",
        )
    if collapse.verdict == "present":
        return (
            f"{collapse.numbers['share']:.0%} of the coordinates {BY_LR} (sign collapse).",
            f"Divide by the variance (AdaBelief, MVN-Grad). {LARGER_EPS}",
        )
    if floor.verdict == "active":
        known = "" if signal.verdict == CANNOT_TELL else f"Gradients are {signal.verdict}. "
        follow = "Follow that share: if it grows beyond a half, epsilon decides the steps."
        return f"{known}{like_sgd}.", follow
    if floor.verdict == CANNOT_TELL:
        return "Nothing can be judged yet.", floor.because
    if too_few := next((each for each in (signal, collapse) if "records" in each.numbers), None):
        return too_few.because, "Record more often (Monitor(every=...)) or train longer."
    if signal.numbers.keys() & {"stale_below", "stale_mean"}:
        return signal.because, "Diagnose again later, or look at the layers in the records."
    no_change, advice = "nothing in these records calls for a change", ""
    if not_finite := spikes.numbers.get("not_finite"):
        spiked = "spikes of the gradient that were" if not_finite > 1 else "spike of the gradient that was"
        no_change = f"apart from {not_finite} {spiked} not finite, {no_change}"
        advice = LOOK_FOR_NAN
    if signal.verdict == CANNOT_TELL:
        more = f"{advice}Whether noise or signal dominates cannot be told. {signal.because}"
        return f"{no_change[0].upper()}{no_change[1:]}.", more
    tune = "Tune lr before you change the optimizer."
    finding = f"Gradients are {signal.verdict}, and {no_change}."
    return finding, advice + (tune if signal.verdict == "noise-dominated" else measure)


def _judge_collapse(entries: Sequence[Record]) -> Statement:
    """Judge the share of coordinates in sign collapse, or that would be if the cell did not divide by the variance."""
    topic, judged = "sign collapse", drop_first_steps(entries)
    if len(judged) < ENOUGH:
        return too_few_records(topic, topic, len(judged), len(entries) - len(judged))
    share = _get_median_share(judged, "sign_collapse")
    if share is None:
        return Statement(topic, CANNOT_TELL, _explain_no_share(judged))
    if (clipped := median(map(get_clipped, judged))) >= MAJORITY:
        because = f"{clipped:.1%} of the coordinates {BY_Z_CLIP}."
        numbers = {"share": clipped, "bound": MAJORITY, "z_clip": judged[-1].get("z_clip")}
        return Statement(topic, "present", because, numbers)
    numbers = {"share": share, "bound": COLLAPSE_SHARE}
    if entries[-1]["sign_collapse_is"] == "measured":
        because = f"{share:.1%} of the coordinates {BY_LR}; {COLLAPSE_SHARE:.0%} or more is a problem."
        return Statement(topic, "present" if share >= COLLAPSE_SHARE else "absent", because, numbers)
    hidden, reason = find_lower_bounds(judged)
    if share < COLLAPSE_SHARE and hidden >= FLOOR_SHARE:
        because = f"It is computed from {MEASURED_SIGNAL}. {reason}"
        return Statement(topic, CANNOT_TELL, because, numbers | {"hidden": hidden})
    because = (
        f"With the second moment (Adam, LaProp) {share:.1%} of the coordinates would {BY_LR}; dividing by the "
        "variance avoids it."
    )
    return Statement(topic, "avoided" if share >= COLLAPSE_SHARE else "absent", because, numbers)


def _judge_floor(entries: Sequence[Record]) -> Statement:
    """Judge the share of coordinates at the floor of epsilon, which a single record shows."""
    share, last = _get_median_share(entries, "epsilon_floor"), entries[-1]
    if share is None:
        return Statement("epsilon floor", CANNOT_TELL, _explain_no_share(entries))
    numbers: dict[str, Any] = {"share": share, "bound": FLOOR_SHARE}
    of_eps_s = f", floor of eps_s {last['floor']:.2g}" if last["cell"] in CENTERED else ""
    because = f"For {share:.1%} of the coordinates the divisor is mostly epsilon (eps {last['eps']:.2g}{of_eps_s})"
    # Early records have no floor_divisor. At an lr of 0, as at the end of a schedule, nothing is stepped.
    rates = [entry["lr"] / entry["floor_divisor"] for entry in entries if entry["lr"] and entry.get("floor_divisor")]
    if rates:
        numbers |= {"sgd_rate": median(rates), "sgd_rates": (min(rates), max(rates))}
        because += f", so that they are stepped as by SGD at {_format_rates(numbers['sgd_rates'])}"
    because += f"; the threshold is {FLOOR_SHARE:.0%}."
    return Statement("epsilon floor", "active" if share >= FLOOR_SHARE else "not active", because, numbers)


def _get_median_share(entries: Sequence[Record], name: str) -> float | None:
    shares = [entry[name] for entry in entries if entry[name] is not None]
    return median(shares) if shares else None


def _explain_no_share(entries: Sequence[Record]) -> str:
    if any(entry.get("not_finite") for entry in entries):
        return "The state is not finite."
    return "No coordinate has had a gradient."


def _format_rates(rates: tuple[float, float]) -> str:
    """`rate 10`, or `rates 3 to 10` if they differ in two digits."""
    text = format_range(*rates, 2)
    return f"rates {text}" if " to " in text else f"rate {text}"


def _judge_spikes(entries: Sequence[Record]) -> Statement:
    spikes = {spike["step"]: spike for entry in entries for spike in entry["spikes"]}  # the last report of each
    if not spikes:
        if not any(entry["gradient_norm"] for entry in entries):
            return Statement("spikes", CANNOT_TELL, "Gradients were not followed.")
        because = f"After the first {GRADIENT_SPIKE.warm_up} steps no gradient norm was far above its running median."
        return Statement("spikes", "none", because, {"count": 0})
    multiples = [spike["multiple"] for spike in spikes.values() if spike["multiple"] is not None]
    not_finite = len(spikes) - len(multiples)
    numbers: dict[str, Any] = {"count": len(spikes), "not_finite": not_finite, "steps": sorted(spikes)}
    text = f"{len(spikes)} found" + (f", {not_finite} of them not finite" if not_finite else "")
    text += f", the largest {max(multiples):.3g} times the median" if multiples else ""
    followed = [spike for spike in spikes.values() if spike["update_during"] is not None]
    if not followed and not multiples:
        return Statement("spikes", "not finite", f"{text}; GradScaler may have skipped them.", numbers)
    if not followed:
        return Statement("spikes", CANNOT_TELL, f"{text}; updates were not followed.", numbers)
    rose, largest, recovery_steps, bound = 0, 0.0, None, 0.0
    for spike in followed:
        during, after = spike["update_during"], spike["update_after"] or 0.0
        recovered = spike.get("recovered", RECOVERED)  # early records do not have it
        bound = max(bound, recovered)
        rose += after > CARRIED_MULTIPLE * max(during, recovered)
        largest = max(largest, during, after)
        if spike["recovery_steps"] is not None:
            recovery_steps = max(recovery_steps or 0, spike["recovery_steps"])
    carried = rose if rose and _can_carry_spikes(entries[-1]) else 0
    numbers |= {"carried_over": carried, "update": largest, "recovery_steps": recovery_steps}
    because = (
        f"{text}; updates rose to at most {largest:.3g} times their median, for at most {recovery_steps} steps above "
        f"{bound:g} times; {rose} rose again after the gradient had recovered"
    )
    because += "." if carried == rose else ", but from later gradients: here momentum only decays after a spike."
    return Statement("spikes", "carried over" if carried else "absorbed", because, numbers)


def _can_carry_spikes(entry: Record) -> bool:
    """Whether an update can rise again long after a spike: if v forgets it faster than m (Remark 3.1).

    Momentum on normalized gradients only decays after a spike.
    """
    return entry["cell"] in (ADAM.name, ADABELIEF.name) and entry["beta1"] ** 2 >= entry["beta2"]


def _judge_normalizer(signal: Statement, collapse: Statement, floor: Statement) -> Statement:
    if collapse.verdict in ("present", "avoided") or signal.verdict == "signal-dominated":
        because = (
            "With more signal than noise, dividing by the second moment leaves little but the sign of the gradient; "
            "dividing by the variance keeps its size (Theorem 3.4)."
        )
        if floor.verdict == "active":
            because += " But many divisors are mostly epsilon, which then sets the size of a step: choose it with care."
        if "z_clip" in collapse.numbers:
            because += " But z_clip bounds most steps, which then have one size: choose it with care."
        return Statement("normalizer", "variance", because)
    if signal.verdict == "noise-dominated":
        because = (
            "Gradients are mostly noise, so dividing by the second moment or by the variance gives the same step up to "
            "a constant."
        )
        return Statement("normalizer", "either", because)
    if signal.verdict == CANNOT_TELL:
        return Statement("normalizer", CANNOT_TELL, "It depends on the signal, which cannot be judged.")
    return Statement("normalizer", CANNOT_TELL, "Gradients are neither mostly noise nor mostly signal.")


def _judge_order(last: Record, signal: Statement, spikes: Statement, gap: VarianceGap | None) -> Statement:
    beta1, beta2 = last["beta1"], last["beta2"]
    if spikes.verdict == "carried over":
        because = "A gradient that is normalized first enters momentum at a bounded size, however large (Theorem 3.3)."
        return Statement("order", "after", because)
    # Spikes that are not finite do not count: GradScaler skips them, or the state is lost with any order.
    if spikes.numbers.get("count", 0) > spikes.numbers.get("not_finite", 0) and beta1**2 >= beta2:
        because = (
            "There were spikes, and Adam bounds the updates after one only if beta1^2 < beta2 (Remark 3.1); here "
            f"beta1^2 = {beta1**2:.3g} and beta2 = {beta2:.3g}."
        )
        return Statement("order", "after", because, {"beta1^2": beta1**2, "beta2": beta2})
    if gap is not None and gap.cells[0] == ADABELIEF.name:  # the theorem does not cover Adam and LaProp
        numbers = {"gap": gap.gap, "relative": gap.relative, "error": gap.error}
        if not math.isfinite(gap.gap):
            return Statement("order", CANNOT_TELL, f"Measured: {gap}. Gradients or state are not finite.", numbers)
        if abs(gap.relative) < LEAST_GAP:
            return Statement("order", "either", f"Measured: {gap}. Less than {LEAST_GAP:.0%} does not matter.", numbers)
        if abs(gap.gap) < GAP_ERRORS * gap.error:
            return Statement("order", CANNOT_TELL, f"Measured: {gap}. Take more batches.", numbers)
        order = "after" if gap.gap > 0 else "before"
        because = f"Measured: {gap}. Updates vary less with momentum {order} normalizing."
        return Statement("order", order, because, numbers)
    not_covered = f"Measured: {gap}. Theorem 3.1 does not cover these two."
    if signal.verdict == "signal-dominated":
        because = "The mean gradient is large, and then updates vary less with momentum after normalizing (Theorem 3.1)"
        because += "; measure by how much with variance_gap." if gap is None else f". {not_covered}"
        return Statement("order", "after", because)
    if signal.verdict == "noise-dominated":
        unknown = spikes.verdict == CANNOT_TELL
        seen = "spikes were not followed" if unknown else "no gradient spike reappeared in later updates"
        because = (
            "Momentum before or after normalizing makes little difference while the mean gradient is small "
            f"(Theorem 3.1); {seen}."
        )
        return Statement("order", "either", because)
    if last["m"] is None:
        return Statement("order", CANNOT_TELL, f"{last['cell']} keeps no m, which variance_gap needs to measure it.")
    return Statement("order", CANNOT_TELL, "Measure it with variance_gap." if gap is None else not_covered)


def _pick_optimizer(normalizer: Statement, order: Statement) -> Statement:
    names = [
        rule.name
        for rule in (ADABELIEF, MVNGRAD, ADAM, LAPROP)
        if (rule.centered or normalizer.verdict != "variance")
        and order.verdict != ("before" if rule.momentum_last else "after")
    ]
    if len(names) == 4:
        because = "The records favour none of Adam, LaProp, AdaBelief and MVN-Grad."
        return Statement(CHOICE, CANNOT_TELL, because)
    if len(names) == 1:
        because = "The records decide the normalizer and the order of momentum."
    elif normalizer.verdict == "variance":
        because = "The records decide the normalizer, but not the order of momentum."
    else:
        because = "The records decide the order of momentum, but not the normalizer."
    return Statement(CHOICE, " or ".join(names), f"{because} {ONLY_THEORY}")
