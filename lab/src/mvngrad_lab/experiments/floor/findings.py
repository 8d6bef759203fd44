"""What we found about the floor, in sentences and one figure for the first screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from mvngrad_lab.experiments.floor.arms import GRID_ARMS
from mvngrad_lab.experiments.floor.effects import SGD_ARMS, get_seeds_of_look, name_arm
from mvngrad_lab.experiments.floor.judge import PAPERS_SETTINGS
from mvngrad_lab.experiments.floor.rules import MARGIN
from mvngrad_lab.report.figures.style import LIGHT, MARKS, draw_vertical, label_rows, make_axes
from mvngrad_lab.report.figures.svg import Figure, make_panel
from mvngrad_lab.report.tables import OPTIMIZERS, VARIANCE
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, Estimate, Verdict

TITLES = {"floor": "A floor of 10⁻³ under the divisor", "none": "No floor"}


def get_accuracy(arms: Mapping[str, Any], arm: str) -> float:
    """Of an arm at 200 epochs, the mean over seeds; of an arm of the grid, the best; nan without a run."""
    rows = arms.get(arm)
    if isinstance(rows, dict):
        values = [value for value in rows.values() if value is not None]
        return fmean(values) if values else math.nan
    return max(float(row["test_accuracy"]) for row in rows) if rows else math.nan


def get_judged_arms(result: dict[str, Any]) -> dict[str, Any]:
    """The runs of each arm; at 200 epochs those of the seeds that are judged."""
    if "selected" not in result:
        return dict(result["arms"])
    arms = result["arms"]
    seeds, of_sgd = get_seeds_of_look(arms)[0], get_seeds_of_look(arms, SGD_ARMS)[0]
    return {
        arm: {seed: row[seed] for seed in (of_sgd if arm == "sgd" else seeds) if seed in row}
        for arm, row in arms.items()
    }


def get_accuracies(arms: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Keys none and floor -> optimizer -> accuracy."""
    return {
        kind: {name: get_accuracy(arms, f"{cell}-{kind}") for name, cell in OPTIMIZERS.items()}
        for kind in ("none", "floor")
    }


def describe_runs(result: dict[str, Any]) -> str:
    """Empty if an arm has no run, or fewer than three at 200 epochs."""
    arms = get_judged_arms(result)
    fewest = min(len(arms.get(arm, ())) for arm in GRID_ARMS)
    if "selected" not in result:
        return "30 epochs, seed 0, the best of 17 settings" if fewest else ""
    of_sgd, lost = len(arms.get("sgd", ())), [name_arm(arm) for arm, row in arms.items() if None in row.values()]
    sgd = f", SGD {of_sgd}" if 0 < of_sgd < fewest else ""
    diverged = f", without diverged runs of {' and '.join(lost)}" if lost else ""
    return f"200 epochs, {fewest} seeds{sgd}{diverged}" if fewest > 2 else ""


def describe(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """What the floor does; at 200 epochs, once that is judged, and not in the grid any more."""
    arms, main = get_judged_arms(result), verdicts["floor-main"]
    accuracies, sgd = get_accuracies(arms), get_accuracy(arms, "sgd")
    if not (runs := describe_runs(result)) or ("selected" in result) != (main.status != NOT_RUN):
        return ""
    low, high = (f"{min(of.values()):.1f} to {max(of.values()):.1f}%" for of in accuracies.values())
    with_sgd = f", SGD {sgd:.1f}%" if math.isfinite(sgd) else ""
    numbers = (
        f"all four reach {low} without one, {high} with one of 1e-3{with_sgd} (CIFAR-100, batch "
        f"1024, coupled decay, {runs})"
    )
    if "selected" not in result:
        words = "**An epsilon floor, the smallest possible divisor, seems to matter more than the optimizer**"
        return f"{words}, but one seed decides nothing: {numbers}."
    lead, *others = _describe_effects(verdicts)
    if (strip := verdicts["floor-batch-128"].strip) is not None and (row := strip.rows[0]).interval is not None:
        interval = "{:.1f} to {:.1f}".format(*row.interval)
        others.append(
            f"at batch 128 a floor adds {row.value:.1f} points (95%: {interval}; Adam and MVN-Grad, {row.n} seeds)"
        )
    return " ".join(f"{_capitalize(sentence)}." for sentence in (f"{lead}: {numbers}", *others))


def _capitalize(sentence: str) -> str:
    """The sentence with a capital letter, also if it begins with bold text.

    >>> _capitalize("**decay** counts")
    '**Decay** counts'
    """
    first = len(sentence) - len(sentence.lstrip("*"))
    return sentence[:first] + sentence[first].upper() + sentence[first + 1 :]


def _describe_effects(verdicts: Mapping[str, Verdict]) -> list[str]:
    """What the rules about the floor, the variance and the order say, and no more, as sentences."""
    statuses = {claim: verdict.status for claim, verdict in verdicts.items()}
    if statuses["floor-main"] == NOT_REPRODUCED:
        return ["An epsilon floor is worth **less than 1 point**"]
    if statuses["floor-main"] != REPRODUCED:
        return ["It is **undecided** whether an epsilon floor is worth more than 1 point"]
    equal = {"the variance": "floor-variance-equal", "momentum last": "floor-order-equal"}
    same, different, undecided = (
        [name for name, claim in equal.items() if statuses[claim] in some]
        for some in ((REPRODUCED, CAVEAT), (NOT_REPRODUCED,), (UNDECIDED,))
    )
    differs_by_cell = statuses["floor-interactions"] == NOT_REPRODUCED
    published = _describe_published([verdicts[claim] for claim in equal.values()])
    if not (different or undecided or differs_by_cell or published or _explain_by_decay(verdicts)):
        return ["**The epsilon floor does the work**, not the variance or the order of momentum"]
    strip = verdicts["floor-each-cell"].strip
    assert strip is not None  # judged with the same runs as floor-main
    gains = [row.value for row in strip.rows]
    parts = [f"**An epsilon floor adds {min(gains):.1f} to {max(gains):.1f} points**"]
    if same:
        makes = "each make" if len(same) > 1 else "makes"
        parts.append(
            f"averaged over runs with and without a floor, at the settings chosen at 30 epochs, {' and '.join(same)} "
            f"{makes} less than {MARGIN} points of difference"
        )
    if different:
        parts.append(_describe_estimates(verdicts, equal, different))
    if undecided:
        effects = {name: _get_estimate(verdicts[equal[name]]).value for name in undecided}
        change, sizes = "change" if len(effects) > 1 else "changes", " and ".join(f"{x:.2f}" for x in effects.values())
        parts.append(
            f"at the settings chosen at 30 epochs {' and '.join(effects)} {change} accuracy by {sizes} points, not yet "
            f"shown to be less than {MARGIN}"
        )
    return [*parts, published] if published else parts


def _describe_published(verdicts: Sequence[Verdict]) -> str:
    """What the effects are with the paper's settings, if one of them is beyond the margin then."""
    rows = [row for each in verdicts if each.strip for row in each.strip.rows if row.label.endswith(PAPERS_SETTINGS)]
    if not any(abs(row.value) > MARGIN for row in rows):
        return ""
    effects = {row.label.removesuffix(PAPERS_SETTINGS): f"{row.value:+.2f}" for row in rows}
    texts = ", ".join(f"{name} {text}" for name, text in effects.items())
    return f"with the paper's settings where it has some (not planned, {rows[0].n} seeds): {texts}"


def describe_decay(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """What weight decay has to do with the floor, once the floor's effect is shown."""
    if verdicts["floor-main"].status != REPRODUCED:
        return ""
    return _explain_by_decay(verdicts)


def _explain_by_decay(verdicts: Mapping[str, Verdict]) -> str:
    """A sentence, or nothing if decay explains less than half of the gap."""
    decoupled, strength, floor = (verdicts[f"floor-decay-{name}"] for name in ("decoupled", "strength", "floor"))
    if decoupled.status == NOT_REPRODUCED:
        return "**Decoupled weight decay closes the gap without a floor**, so that decay and not epsilon explains it."
    if decoupled.status != UNDECIDED or decoupled.strip is None:
        return ""
    gap, still_open = decoupled.strip.rows
    if still_open.value >= gap.value / 2:
        return ""
    sentences = [
        f"**Decoupled weight decay gives most of what a floor adds** (Adam and MVN-Grad, {gap.n} seeds).",
        decoupled.note,
    ]
    if strength.strip is not None:
        share = 1 - (still_open.value + strength.strip.rows[0].value) / gap.value
        sentences.append(f"Tuned coupled decay: {share:.0%}.")
    if floor.strip is not None and floor.status in (REPRODUCED, CAVEAT):
        limits = "with caveats" if floor.status == CAVEAT else "at other betas"
        gain = floor.strip.rows[0].value
        sentences.append(f"A floor adds {gain:.1f} points to decoupled decay, {limits}.")
    return " ".join([*sentences, "The cause is **undecided**."])


def describe_language(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """What a floor costs a language model, if the rule says that it does."""
    verdict = verdicts["floor-dial-language"]
    if verdict.strip is None or verdict.status not in (REPRODUCED, CAVEAT):
        return ""
    low, *_, high = sorted(row.value for row in verdict.strip.rows)
    return (
        f"**A floor that helps images hurts a language model**: one of 1e-3 costs GPT-2 30M {low:.2f} to {high:.2f} "
        "nats (1,000 steps, one seed)."
    )


def _describe_estimates(verdicts: Mapping[str, Verdict], claims: Mapping[str, str], names: Sequence[str]) -> str:
    """What each of these adds, or costs if that is shown."""
    parts = []
    for name in names:
        row = _get_estimate(verdicts[claims[name]])
        assert row.interval is not None
        verb, sign = ("costs", -1) if max(row.interval) < 0 else ("adds", 1)
        parts.append(f"{name} {verb} {sign * row.value:.2f} points")
    return " and ".join(parts)


def _get_estimate(verdict: Verdict) -> Estimate:
    """The first estimate of a verdict that has some."""
    assert verdict.strip is not None
    return verdict.strip.rows[0]


def draw_lead(result: dict[str, Any]) -> Figure | None:
    """Each optimizer with and without a floor; what the paper compares is filled. None without enough runs."""
    arms = get_judged_arms(result)
    accuracies, sgd = get_accuracies(arms), get_accuracy(arms, "sgd")
    if not (runs := describe_runs(result)):
        return None
    by_arm = result.get("decoupled", {})
    decoupled = {name: get_accuracy(by_arm, f"{cell}w-none") for name, cell in OPTIMIZERS.items()}
    decoupled = {name: value for name, value in decoupled.items() if math.isfinite(value)}
    at = make_axes("test accuracy with coupled weight decay, %", "", size=(4.7, 2.9), left=0.86)
    for row, name in enumerate(OPTIMIZERS):
        _draw_ends(at, row, name, [by_name[name] for by_name in accuracies.values()])
        if name in decoupled:
            _draw_decoupled(at, row, name, decoupled[name])
    values = [*(value for by_name in accuracies.values() for value in by_name.values()), *decoupled.values(), sgd]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite) - 0.7, max(finite) + 0.7
    at.set_xlim(low, high)
    if math.isfinite(sgd):
        draw_vertical(at, sgd, f"SGD {sgd:.2f}", y=0.955, side="left" if sgd > (low + high) / 2 else "right")
    _label_kinds(at, accuracies, sgd)
    label_rows(at, list(OPTIMIZERS), top=0.95)
    diverged = any(None in row.values() for row in arms.values() if isinstance(row, dict))
    title, caption = _describe_lead(accuracies, runs, diverged)
    parts = [
        f"{TITLES[kind]}: {', '.join(f'{n} {v:.2f}' for n, v in by_name.items())}"
        for kind, by_name in accuracies.items()
    ]
    parts += [f"{n}W, decoupled decay, no floor: {v:.2f}" for n, v in decoupled.items()]
    if decoupled:
        seeds, names = min(map(len, by_arm.values())), ", ".join(f"{name}W" for name in decoupled)
        caption += f" Vertical bars: decoupled weight decay ({names}) without a floor, {seeds} seeds."
    return Figure(title, caption, (make_panel(at, title, "; ".join(parts)),))


BOX = {"facecolor": LIGHT["paper"], "edgecolor": "none", "pad": 0.5}
"""Behind labels that may cross a line."""


def _draw_ends(at: Axes, row: int, name: str, ends: Sequence[float]) -> None:
    """Draw an optimizer's accuracy without and with a floor, joined by a line; the paper's choice is filled."""
    mark = MARKS[name]
    at.plot(ends, [row, row], color=LIGHT[mark.color], linewidth=1.6, zorder=1)
    sides = (-1, 1) if ends[0] <= ends[1] else (1, -1)
    for end, side, is_papers in zip(ends, sides, (name not in VARIANCE, name in VARIANCE), strict=True):
        fill = {} if is_papers else {"markerfacecolor": LIGHT["paper"]}
        at.plot(end, row, **{**mark.points, "markersize": 8, **fill})
        place: dict[str, Any] = {"textcoords": "offset points", "ha": "left" if side > 0 else "right"}
        at.annotate(f"{end:.2f}", (end, row), (8 * side, 0), va="center", bbox=BOX, **place)


def _draw_decoupled(at: Axes, row: int, name: str, accuracy: float) -> None:
    """Draw a vertical bar for decoupled decay without a floor."""
    at.plot(accuracy, row, color=LIGHT[MARKS[name].color], marker="|", markersize=12, markeredgewidth=2.2)
    below = row < len(OPTIMIZERS) / 2  # towards the middle, away from the labels at top and bottom
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "top" if below else "bottom"}
    at.annotate(f"decoupled decay {accuracy:.2f}", (accuracy, row), (5, -8 if below else 8), **place)


def _label_kinds(at: Axes, accuracies: Mapping[str, Mapping[str, float]], sgd: float) -> None:
    """Write "no floor" and "floor" above the outer ends of their accuracies, away from each other and from SGD."""
    left, right = sorted(accuracies, key=lambda kind: fmean(accuracies[kind].values()))
    words = {"none": "no floor", "floor": "floor of 10⁻³"}
    for kind, end, align in ((left, max, "right"), (right, min, "left")):
        place, offset = end(accuracies[kind].values()), 0
        if align == "left" and place < sgd:  # its label is at the left of its line
            place, offset = sgd, 4
        style: dict[str, Any] = {"ha": align, "va": "center", "color": LIGHT["muted"], "bbox": BOX}
        at.annotate(words[kind], (place, -0.62), (offset, 0), textcoords="offset points", **style)


def _describe_lead(accuracies: Mapping[str, Mapping[str, float]], runs: str, diverged: bool) -> tuple[str, str]:
    """The title and the caption of the lead figure; if runs diverged, means of the others are no finding."""
    spread = {kind: max(by_name.values()) - min(by_name.values()) for kind, by_name in accuracies.items()}
    gains = [accuracies["floor"][name] - accuracies["none"][name] for name in OPTIMIZERS]
    title = (
        f"A floor adds {min(gains):.1f} to {max(gains):.1f} points; the four differ by {spread['floor']:.1f} with one, "
        f"by {spread['none']:.1f} without"
    )
    title = "Accuracy with a floor and without, of runs that did not diverge" if diverged else title
    caption = (
        f"ResNet-18 on CIFAR-100, batch 1024, {runs}. Filled: as in the paper, with a floor for AdaBelief and "
        "MVN-Grad, without for Adam and LaProp; rates and betas are those that our grid selected."
    )
    return title, caption
