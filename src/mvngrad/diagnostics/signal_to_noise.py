"""Judge from a Monitor's records whether the gradients of a group are mostly signal or mostly noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from mvngrad.diagnostics.floor import FLOOR_SHARE
from mvngrad.diagnostics.records import Record
from mvngrad.diagnostics.statements import CANNOT_TELL, EARLIEST, ENOUGH, Statement, format_range, too_few_records
from mvngrad.rule import ADABELIEF, LEAN, MVNGRAD

SETTLED = 3.0
"""Multiple of 1/(1-beta) steps, of the slower average, after which the weight of its first gradients is below 5%.
Earlier, s still contains the first deviations from m = 0, which are signal and not noise. An earlier answer is
provisional."""

SIGNAL_FROM = 1.0
"""Median |mu|/sigma from which a group is signal-dominated: half of its coordinates have more signal than noise. Then
mu^2 is the larger part of v = mu^2 + sigma^2, so that the two normalizers differ by more than sqrt(2)."""

NOISE_MULTIPLE = 2.0
"""Multiple of the median |m|/sigma of pure noise, 0.67 sqrt((1-beta)/(1+beta)), up to which a group is noise-dominated.
At beta = 0.9 that is 0.31, where v and s differ by 5% and their roots by less."""

STALE_SHARE = 0.25
"""Share of the median |m|/sigma of pure noise below which the divisor is too large for the present gradients, so that
the signal cannot be judged. Heavy tails lower the median, too, but less: to a half in a language model
(`results/monitors`)."""

STALE_MEAN = 0.1
"""If m is slower than s or v, and |m|/sqrt(s), before bias correction, is this close to 1 in the middle half of the
coordinates, s is m^2: the present gradients are small beside m. |m|/sqrt(v) exceeds 1 by more than this only if m has
larger gradients than v."""

HALF_NORMAL = 0.6745
"""The median of |xi| for a standard normal xi."""

MEASURED_SIGNAL = "|mean|/std of the gradient"

CENTERED = (ADABELIEF.name, MVNGRAD.name, LEAN.name)


def judge_signal(entries: Sequence[Record]) -> Statement:
    """Judge whether signal or noise dominates the gradients of a group, from its entries in the last records."""
    last = entries[-1]
    if last["m"] is None:
        return Statement("signal", CANNOT_TELL, f"{last['cell']} keeps no m, from which it is measured.")
    judged = drop_first_steps(entries)
    if len(judged) < ENOUGH:
        return too_few_records("signal", "the signal", len(judged), len(entries) - len(judged))
    known = [entry for entry in judged if entry["snr"] and entry["ratio"] and entry["ratio"]["0.5"] is not None]
    if not known:
        return Statement("signal", CANNOT_TELL, "No coordinate has had a gradient, or half of the state is not finite.")
    # An snr of None with a finite ratio is infinite: |m|/sqrt(v) tends to 1 as the noise tends to 0.
    medians = [math.inf if entry["snr"]["0.5"] is None else entry["snr"]["0.5"] for entry in known]
    snr = median(medians)
    snr_of_noise = HALF_NORMAL * median(map(_find_mean_noise, known))
    noise_to = NOISE_MULTIPLE * snr_of_noise
    hidden, reason = find_lower_bounds(known)
    numbers = {"snr": snr, "signal_from": SIGNAL_FROM, "noise_to": noise_to, "hidden": hidden}
    if noise_to >= SIGNAL_FROM:
        because = (
            f"With little momentum noise alone can give a median {MEASURED_SIGNAL} of {noise_to:.2g}; it is {snr:.3g}."
        )
        return Statement("signal", CANNOT_TELL, because, numbers)
    thresholds = f"Below {noise_to:.2g} it may be pure noise; above {SIGNAL_FROM:g} signal dominates."
    if snr <= noise_to:
        thresholds += " A mean that changes within a few steps counts as noise."
    or_more = " or more" if hidden >= FLOOR_SHARE else ""
    if or_more and snr < SIGNAL_FROM:
        because = f"{reason} Median {MEASURED_SIGNAL}: {snr:.3g} or more."
        return Statement("signal", CANNOT_TELL, because, numbers)
    needed = _count_steps_to_settle(last)
    is_settled = last["t"] >= needed
    corrected = snr if is_settled else median(map(_remove_start, medians, known))
    if corrected < (stale := STALE_SHARE * snr_of_noise):
        because = (
            f"Median {MEASURED_SIGNAL}: {snr:.2g}, where noise alone gives {snr_of_noise:.2g}: the "
            "divisor still contains larger gradients, as after a spike, or most coordinates have no gradient now."
        )
        return Statement("signal", CANNOT_TELL, because, numbers | {"stale_below": stale})
    if _has_stale_mean(known[-1]):
        because = (
            f"Median {MEASURED_SIGNAL}: {snr:.2g}, but the mean, which is slower than the divisor, still contains "
            "larger gradients than the present ones."
        )
        return Statement("signal", CANNOT_TELL, because, numbers | {"stale_mean": STALE_MEAN})
    if is_settled:
        because = f"Median {MEASURED_SIGNAL}: {snr:.3g}{or_more}. {thresholds}"
        return Statement("signal", _name_regime(snr, noise_to), because, numbers)
    numbers |= {"snr_corrected": corrected, "t": last["t"]}
    low, high = sorted((snr, corrected))
    values = format_range(low, high, 3)
    because = f"Median {MEASURED_SIGNAL} after {last['t']} steps: {values}{or_more}. {thresholds}"
    if last["m"] == "rebuilt":
        because += " With lean=True the mean is rebuilt from the updates, so these values may be too low."
    if _name_regime(low, noise_to) != _name_regime(high, noise_to):
        because += f" The averages still contain too much of the first steps; they need {needed:.0f} steps."
        return Statement("signal", CANNOT_TELL, because, numbers | {"needed": needed})
    return Statement("signal", _name_regime(low, noise_to), because, numbers, provisional=True)


def drop_first_steps(entries: Sequence[Record]) -> list[Record]:
    """The entries of a group from step `EARLIEST` on."""
    return [entry for entry in entries if entry["t"] >= EARLIEST]


def find_lower_bounds(entries: Sequence[Record]) -> tuple[float, str]:
    """The share of coordinates whose snr is only a lower bound, and why."""
    last, hidden = entries[-1], median(map(get_hidden, entries))
    clipped = median(map(get_clipped, entries)) if last["m"] == "rebuilt" else 0.0
    if clipped > hidden:
        return clipped, f"With lean=True the mean is rebuilt from the updates, and z_clip bounds {clipped:.0%} of them."
    return hidden, f"The floor of eps_s ({last['floor']:.2g}) hides the noise of {hidden:.0%} of the coordinates."


def get_hidden(entry: Record) -> float:
    """The share of coordinates whose noise is hidden by the floor; of early records, all of those at the floor."""
    hidden = entry.get("noise_hidden", entry["epsilon_floor"] if entry["floor"] > entry["eps"] else 0.0)
    return hidden or 0.0


def get_clipped(entry: Record) -> float:
    """The share of coordinates that move by z_clip * lr; early records do not have it."""
    return entry.get("clipped") or 0.0


def _name_regime(snr: float, noise_to: float) -> str:
    if snr >= SIGNAL_FROM:
        return "signal-dominated"
    return "noise-dominated" if snr <= noise_to else "between signal and noise"


def _get_mean_decay(entry: Record) -> float:
    """The beta of m."""
    noise: float = entry["mean_noise"] ** 2
    return (1 - noise) / (1 + noise)


def _has_stale_mean(entry: Record) -> bool:
    """Whether m is mostly of gradients that the divisor has forgotten."""
    beta = _get_mean_decay(entry)
    if beta <= entry["beta2"]:
        return False
    lower, middle, upper = (math.inf if (r := entry["ratio"].get(q)) is None else r for q in ("0.25", "0.5", "0.75"))
    if entry["cell"] not in CENTERED:
        return middle > 1 + STALE_MEAN
    weight: float = 1 - beta ** entry["t"]  # takes the bias correction of m back
    return lower * weight > 1 - STALE_MEAN and upper * weight < 1 + STALE_MEAN


def _count_steps_to_settle(entry: Record) -> float:
    """The number of steps after which neither m nor s or v has much weight left on its first gradients."""
    noise = entry["mean_noise"] ** 2
    least = min(1 - entry["beta2"], 2 * noise / (1 + noise))  # 1 - beta of the slower average
    return SETTLED / least if least > 0 else math.inf


def _find_mean_noise(entry: Record) -> float:
    """The deviation of the bias-corrected m of pure noise after the entry's steps, in deviations of the gradient."""
    noise, t = entry["mean_noise"] ** 2, entry["t"]
    power = _get_mean_decay(entry) ** t
    return math.sqrt(noise * (1 + power) / (1 - power) if power < 1 else 1 / t)


def _remove_start(snr: float, entry: Record) -> float:
    """The largest |mu|/sigma if s or v is too large by what it still has from its start.

    The first steps of a training are unlike the later ones: the weight of the first third of them is taken as the
    error of both. s has one more: m starts at 0, so that g - m has a mean of mu beta^i at step i, and s an excess of
    mu^2 times the average of beta^(2i), if mu has not changed. The larger of the two counts.
    """
    beta2, t = entry["beta2"], entry["t"]
    first = beta2 ** (t * 2 / 3) * (1 - beta2 ** (t / 3)) / (1 - beta2**t)
    from_first = snr * math.sqrt(1 + first)
    if entry["cell"] not in CENTERED:
        return from_first
    if not (beta := _get_mean_decay(entry)):
        return from_first
    q = beta * beta
    # The sum of beta2^(t-i) q^i over i = 1 ... t
    total = t * q**t if math.isclose(beta2, q, rel_tol=1e-6) else q * (beta2**t - q**t) / (beta2 - q)
    excess = total * (1 - beta2) / (1 - beta2**t)
    ratio = snr / (beta * math.sqrt(2 / (1 + beta)))
    left = 1 - excess * ratio * ratio
    return max(from_first, snr / math.sqrt(left)) if left > 0 else math.inf
