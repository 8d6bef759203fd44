"""Verdicts on the floor: contrasts of arms with t-tests, equivalence by two one-sided ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from mvngrad_lab.experiments.floor.arms import BATCH_128_ARMS, BATCH_128_RATES, MNIST_SEEDS, MNIST_TABLE_SEEDS
from mvngrad_lab.experiments.floor.effects import (
    LOOKS,
    ORDER_EFFECT,
    SGD_ARMS,
    VARIANCE_AT_EPS,
    VARIANCE_EFFECT,
    Effects,
    compare_sgd,
    compute_effects,
    compute_mnist_effects,
    find_obstacle,
    get_arms_with_published,
    get_seeds_of_look,
    get_whole_seeds,
    make_weights,
    name_arm,
)
from mvngrad_lab.experiments.floor.rules import (
    GAIN_LEVEL,
    MARGIN,
    describe_seeds,
    judge_equivalence,
    judge_gain,
    judge_gains,
    make_effect_strip,
)
from mvngrad_lab.recipe import COUPLED, NAMES
from mvngrad_lab.report.claims import find_values
from mvngrad_lab.report.statistics import OUR_LEVEL, adjust_by_holm, estimate_contrast, estimate_ratio
from mvngrad_lab.report.verdicts import (
    CAVEAT,
    COMPARED,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    Estimate,
    Judge,
    Strip,
    Verdict,
    decide,
    judges,
)  # fmt: skip

SEEN = 1.0
"""Points by which two runs must differ to count as different: twice the deviation of their difference."""
SEEN_LOSS = 0.03
"""The same for the loss of a language model, in nats."""
LANGUAGE_LOSS, NO_LANGUAGE_LOSS = 0.1, 0.05
"""Nats that a floor of 1e-3 is said to cost a language model at least, and below which it is called not reproduced; in
between it is undecided."""
MNIST_FLOOR = "0.01"
"""The floor on MNIST that is compared with none."""
MNIST_MARGIN = 0.2
"""Points on MNIST within which two arms are called equal, and that a floor is said to be worth at least."""
MNIST_EPS_MARGIN = 0.1
"""The same for the variance with eps in all four."""
TYPICAL_GRADIENT = 1e-2
"""A floor of 1e-3 is hardly one if the root mean square of the gradient is above this."""
PAPERS_SETTINGS = ", the paper's settings"
"""Ends the label of an effect with Table 1's runs in the four arms that the paper ran."""
ONE_SEED = "A comparison, not a verdict: one seed."


def of_whole_seeds(judge: Callable[[list[str], Effects], Verdict]) -> Judge:
    """Call a judge with the seeds that all eight arms have and the effects, unless there is an obstacle."""

    def judge_result(result: dict[str, Any]) -> Verdict:
        seeds, values = get_seeds_of_look(result["arms"])
        return find_obstacle(values, len(seeds)) or judge(seeds, compute_effects(result))

    return judge_result


# 200 epochs at batch 1024


@judges("floor-main")
@of_whole_seeds
def judge_main(seeds: list[str], effects: Effects) -> Verdict:
    return judge_gain(effects["floor"], len(seeds), describe_seeds(seeds, effects["floor"]), GAIN_LEVEL / len(LOOKS))


@judges("floor-each-cell")
@of_whole_seeds
def judge_each_cell(seeds: list[str], effects: Effects) -> Verdict:
    return judge_gains(effects, f"seeds {', '.join(seeds)}", len(seeds), OUR_LEVEL / len(LOOKS))


def judge_equal(result: dict[str, Any], name: str) -> Verdict:
    """Whether the effect of a factor is within the margin, at equal floor."""
    seeds, values = get_seeds_of_look(result["arms"])
    if obstacle := find_obstacle(values, len(seeds)):
        return obstacle
    effects = {each: of for each, of in compute_effects(result).items() if each.partition(",")[0] == name}
    if name not in (published := compute_effects(result, published=True)) or not result.get("published"):
        return judge_equivalence(effects, seeds)
    last = f"{name}{PAPERS_SETTINGS}"
    counts = {last: len(get_whole_seeds(get_arms_with_published(result))[0])}
    return judge_equivalence({**effects, last: published[name]}, seeds, counts)


judges("floor-variance-equal")(partial(judge_equal, name=VARIANCE_EFFECT))
judges("floor-order-equal")(partial(judge_equal, name=ORDER_EFFECT))


@judges("floor-interactions")
@of_whole_seeds
def judge_interactions(seeds: list[str], effects: Effects) -> Verdict:
    effects = {name: effect for name, effect in effects.items() if " x " in name}
    p = dict(zip(effects, adjust_by_holm([effect.p_different() for effect in effects.values()]), strict=True))
    text = f"p (Holm): {', '.join(f'{name} {value:.2g}' for name, value in p.items())}"
    present = [name for name in effects if p[name] < OUR_LEVEL / len(LOOKS)]
    status = NOT_REPRODUCED if any("floor" in name for name in present) else UNDECIDED
    note = f"Present: {', '.join(present)}." if present else "None shows; none is called absent."
    text += f"; {describe_seeds(seeds, effects['floor x order'])}"
    return Verdict(status, text, note, make_effect_strip(effects, len(seeds)))


@judges("floor-sgd")
def judge_sgd(result: dict[str, Any]) -> Verdict:
    seeds, values = get_seeds_of_look(result["arms"], SGD_ARMS)
    if obstacle := find_obstacle(values, len(seeds)):
        return obstacle
    return judge_equivalence({"SGD less the four with a floor": compare_sgd(values)}, seeds)


# Weight decay


@judges("floor-decay-decoupled")
def judge_decoupled(result: dict[str, Any]) -> Verdict:
    """Whether the gap stays open, without a floor, if weight decay is decoupled."""
    floor, none, decoupled = (
        ("adam-floor", "mvngrad-floor"),
        ("adam-none", "mvngrad-none"),
        ("adamw-none", "mvngradw-none"),
    )
    compared = [*floor, *decoupled]
    if unfinished := _find_unfinished_grid(result, compared):
        return unfinished
    seeds, values = get_whole_seeds(result["arms"], [*compared, *none])
    if obstacle := find_obstacle(values, len(seeds)):
        return obstacle
    gap, rest = _subtract_means(floor, none), _subtract_means(floor, decoupled)
    whole = estimate_contrast(values, gap)
    open_part = estimate_contrast({arm: values[arm] for arm in compared}, rest)
    excess = estimate_contrast(values, {arm: rest.get(arm, 0.0) - gap.get(arm, 0.0) / 2 for arm in values})
    epsilon, decay = excess.p_above(0), open_part.p_below(MARGIN)
    text = (
        f"tests for more than half left: p = {epsilon:.2g}; for less than half: p = {excess.p_below(0):.2g}; "
        f"for less than {MARGIN} points: p = {decay:.2g}; "
        f"n = {len(seeds)} seeds ({', '.join(seeds)}), {excess.freedom} and {open_part.freedom} degrees of freedom"
    )
    strip = make_effect_strip({"gap": whole, "gap to decoupled decay": open_part}, len(seeds))
    if whole.estimate <= 0:
        return Verdict(UNDECIDED, text, "No gap.", strip)
    if epsilon < GAIN_LEVEL and decay >= OUR_LEVEL:
        return Verdict(REPRODUCED, text, "The finding is about epsilon.", strip)
    if decay < OUR_LEVEL and epsilon >= GAIN_LEVEL:
        return Verdict(NOT_REPRODUCED, text, "The finding is about decay.", strip)
    share, interval = estimate_ratio(values, _subtract_means(decoupled, none), gap)
    within = f" (95%: {interval[0]:.0%} to {interval[1]:.0%})" if interval else ""
    return Verdict(UNDECIDED, text, f"Decoupled decay closes {share:.0%}{within} of the gap.", strip)


def _subtract_means(high: Sequence[str], low: Sequence[str]) -> dict[str, float]:
    """Weights of the mean of the arms `high` less that of the arms `low`."""
    return {arm: 1 / len(high) for arm in high} | {arm: -1 / len(low) for arm in low}


def _find_unfinished_grid(result: dict[str, Any], arms: Sequence[str]) -> Verdict | None:
    """A NOT_RUN verdict if a grid that selects the settings of these arms is not complete, else None."""
    counts = {arm: result["grid"][arm] for arm in arms if arm in result["grid"]}
    if left := [f"{name_arm(arm)} {done} of {of}" for arm, (done, of) in counts.items() if done < of]:
        return Verdict(NOT_RUN, "", f"The grid is not done: {', '.join(left)}.")
    return None


def judge_any_gain(result: dict[str, Any], better: str, worse: str, what: str) -> Verdict:
    """Whether Adam and MVN-Grad in one form are better than in another; the endings name the arms."""
    compared = [f"{cell}{ending}" for ending in (better, worse) for cell in ("adam", "mvngrad")]
    if unfinished := _find_unfinished_grid(result, compared):
        return unfinished
    seeds, values = get_whole_seeds(result["arms"], compared)
    if obstacle := find_obstacle(values, len(seeds)):
        return obstacle
    effect = estimate_contrast(values, _subtract_means(compared[:2], compared[2:]))
    halves = {
        name: [fmean(pair) for pair in zip(*(values[arm] for arm in pair), strict=True)]
        for name, pair in (("better", compared[:2]), ("worse", compared[2:]))
    }
    by_seed = estimate_contrast(halves, {"better": 1.0, "worse": -1.0}).p_above(0)
    above, below = effect.p_above(0), effect.p_below(MARGIN)
    text = f"p for any gain {above:.2g}, for less than {MARGIN} points {below:.2g}; {describe_seeds(seeds, effect)}"
    status = REPRODUCED if above < GAIN_LEVEL else NOT_REPRODUCED if below < OUR_LEVEL else UNDECIDED
    note = ""
    if status == REPRODUCED and by_seed >= GAIN_LEVEL:
        status, note = CAVEAT, f"From one difference for each seed p is {by_seed:.2g}, not below {GAIN_LEVEL:g}."
    return Verdict(status, text, note, make_effect_strip({what: effect}, len(seeds)))


judges("floor-decay-strength")(
    partial(judge_any_gain, better="w-none", worse="-tuned", what="decoupled less tuned coupled decay, no floor")
)
judges("floor-decay-floor")(
    partial(judge_any_gain, better="w-floor", worse="w-none", what="floor less none, decoupled decay")
)


@judges("floor-decay-none")
def compare_without_decay(result: dict[str, Any]) -> Verdict:
    tried = {**result["no_decay"], **{f"{arm}, decayed": best for arm, best in result["with_decay"].items()}}
    if obstacle := _find_missing(tried):
        return obstacle
    rows, unseen, lost = list[Estimate](), list[str](), list[str]()
    for cell in ("adam", "mvngrad"):
        without, with_decay = (
            part[f"{cell}-floor"]["best"] - part[f"{cell}-none"]["best"]
            for part in (result["no_decay"], result["with_decay"])
        )
        rows.append(Estimate(NAMES[cell], without, None, 1, with_decay))
        if abs(without) <= SEEN:
            unseen.append(NAMES[cell])
        elif without < 0:
            lost.append(NAMES[cell])
    strip = Strip("points gained by the floor, without decay", tuple(rows), 2, "with decay")
    texts = [f"Not seen in {', '.join(unseen)}."] if unseen else []
    texts += [f"A floor loses with {' and '.join(lost)}."] if lost else []
    return Verdict(COMPARED, " ".join(texts), ONE_SEED, strip)


def _find_missing(tried: Mapping[str, Mapping[str, Any]]) -> Verdict | None:
    """Why the best of some rates is not known yet."""
    if missing := [
        f"{name} {best['done']} of {best['of']}" for name, best in tried.items() if best["done"] < best["of"]
    ]:
        return Verdict(NOT_RUN, "", f"Runs are to come; done: {', '.join(missing)}.")
    if lost := [name for name, best in tried.items() if best["best"] is None]:
        return Verdict(UNDECIDED, "", f"All runs diverged: {', '.join(lost)}.")
    return None


# The dial


@judges("floor-dial-images")
def judge_image_dial(result: dict[str, Any]) -> Verdict:
    """Whether the better of the floors 1e-3 and 1e-2 gains more than SEEN points, in each cell."""
    return _judge_dial(result["images"], ("0.001", "0.01"), SEEN, "points gained by a floor of 1e-3 or 1e-2")


@judges("floor-dial-language")
def judge_language_dial(result: dict[str, Any]) -> Verdict:
    """Whether a floor of 1e-3 costs more than LANGUAGE_LOSS, in each cell."""
    dial = result["language"]
    verdict = _judge_dial(dial, ("0.001",), LANGUAGE_LOSS, "loss added by a floor of 1e-3")
    if verdict.strip is None:
        return verdict
    if verdict.status == NOT_REPRODUCED:
        near = max(row.value for row in verdict.strip.rows) >= NO_LANGUAGE_LOSS
        return replace(verdict, status=UNDECIDED, note="In no cell.") if near else verdict
    if (size := dial["gradient_rms"]) is not None and size > TYPICAL_GRADIENT:
        note = f"{verdict.note} The gradient is so large that 1e-3 is hardly a floor.".strip()
        return replace(verdict, status=CAVEAT, note=note)
    return verdict


def _judge_dial(dial: Mapping[str, Any], floors: Sequence[str], limit: float, what: str) -> Verdict:
    """Whether the metric at one of the floors is above that without a floor by more than the limit, in each cell."""
    cells = {NAMES[cell]: dial["cells"][cell] for cell in COUPLED}
    tried = {f"{name} at floor {floor}": rows[floor] for name, rows in cells.items() for floor in ("0", *floors)}
    if obstacle := _find_missing(tried):
        return obstacle
    changes = {name: max(rows[floor]["best"] - rows["0"]["best"] for floor in floors) for name, rows in cells.items()}
    strip = Strip(what, tuple(Estimate(name, by, None, 1, limit) for name, by in changes.items()), 2, "needed")
    size = dial["gradient_rms"]
    text = f"root mean square of the gradient {'not kept' if size is None else format(size, '.2g')}"
    failed = [name for name, by in changes.items() if by <= limit]
    return decide(len(failed) < len(changes), text, f"Not in {', '.join(failed)}." if failed else "", strip)


# Batch 128, train accuracy on mixed images, beta_mean


@judges("floor-batch-128")
def judge_batch_128(result: dict[str, Any]) -> Verdict:
    if unfinished := _find_unfinished_grid(result, BATCH_128_ARMS):
        return unfinished
    arms = result["arms"]
    if waiting := [arm for arm in BATCH_128_ARMS if len(arms[arm]) < 3]:
        return Verdict(NOT_RUN, "", f"Fewer than three seeds are done of {', '.join(map(name_arm, waiting))}.")
    seeds, values = get_whole_seeds(arms, BATCH_128_ARMS)
    if obstacle := find_obstacle(values, len(seeds)):
        return obstacle
    effect = estimate_contrast(values, make_weights("floor", among=BATCH_128_ARMS))
    reached = ", ".join(
        f"{name_arm(arm)} {fmean(row):.2f} at rate {result['rates'][arm]:g}" for arm, row in values.items()
    )
    limits = min(BATCH_128_RATES), max(BATCH_128_RATES)
    ends = [name_arm(arm) for arm, rate in result["rates"].items() if rate in limits]
    verdict = judge_gain(effect, len(seeds), f"{describe_seeds(seeds, effect)}; {reached}")
    return replace(verdict, note=f"The best rate is at an end of its grid: {', '.join(ends)}." if ends else "")


def judge_mixed(result: dict[str, Any], batch: str, far: float) -> Verdict:
    """Whether train accuracy on mixed images is the paper's, up to what the draws of lam may do."""
    rows = result["batches"][batch]
    paper = find_values(f"floor-train-mixed-{batch}")
    if waiting := [NAMES[cell] for cell, row in rows.items() if not row["done"]]:
        return Verdict(NOT_RUN, "", f"Runs to come: {', '.join(waiting)}.")
    if lost := [NAMES[cell] for cell, row in rows.items() if row["mixed"] is None]:
        return Verdict(UNDECIDED, "", f"No train accuracy on mixed images, or diverged: {', '.join(lost)}.")
    off = {NAMES[cell]: row["mixed"] - paper[NAMES[cell]] for cell, row in rows.items()}
    text = "on clean images: " + ", ".join(f"{NAMES[cell]} {row['clean']:.2f}" for cell, row in rows.items())
    mixed = (Estimate(NAMES[cell], row["mixed"], None, 1, paper[NAMES[cell]]) for cell, row in rows.items())
    strip = Strip("train accuracy on mixed images, %", tuple(mixed))
    spread, shift = max(off.values()) - min(off.values()), fmean(off.values())
    text += f"; less the paper's {min(off.values()):+.2f} to {max(off.values()):+.2f}, mean {shift:+.2f}"
    near = [cell for cell, by in off.items() if abs(by) <= 1]
    if len(near) >= 3:
        outside = [cell for cell in off if cell not in near]
        return decide(True, text, f"Outside 1 point: {outside[0]}." if outside else "", strip)
    note = f"A shift of {shift:+.2f} of all four." if spread <= 1 else ""
    wrong = sum(abs(by) > far for by in off.values()) >= 2
    return Verdict(NOT_REPRODUCED if wrong else UNDECIDED, text, note, strip)


judges("floor-train-mixed-1024")(partial(judge_mixed, batch="1024", far=3.4))
judges("floor-train-mixed-128")(partial(judge_mixed, batch="128", far=1.2))


@judges("floor-beta-mean")
def compare_beta_mean(result: dict[str, Any]) -> Verdict:
    tried = {f"{kind}, {which}": best for kind, pair in result["pairs"].items() for which, best in pair.items()}
    if obstacle := _find_missing(tried):
        return obstacle
    rows, texts = list[Estimate](), list[str]()
    for kind, pair in result["pairs"].items():
        limit, digits = (SEEN_LOSS, 3) if kind == "language" else (SEEN, 2)
        difference = pair["changed"]["best"] - pair["default"]["best"]
        rows.append(Estimate(kind, difference / limit, None, 1))
        texts.append(f"{kind} {difference:+.{digits}f}, to {pair['changed']['best']:.{digits}f}")
    what = f"difference from the default, of what counts as seen ({SEEN:g} point, {SEEN_LOSS} of loss)"
    return Verdict(COMPARED, "; ".join(texts), ONE_SEED, Strip(what, tuple(rows)))


@judges("floor-mnist")
def judge_mnist(result: dict[str, Any]) -> Verdict:
    if not {*result["seeds"]} <= {*MNIST_SEEDS}:
        return Verdict(NOT_RUN, "", "The stored run has seeds that were seen before the rule was written.")
    cells = {cell: {floor: result["cells"][cell][floor] for floor in ("0", MNIST_FLOOR)} for cell in COUPLED}
    gains = {
        f"floor, {NAMES[cell]}": estimate_contrast(
            {f: row["test"] for f, row in by_floor.items()}, {"0": -1, MNIST_FLOOR: 1}
        )
        for cell, by_floor in cells.items()
    }
    verdict = judge_gains(gains, f"gradient {result['gradient_rms']:.2g}; {result['data']}", len(result["seeds"]))
    rows = {f"{NAMES[cell]} at floor {f}": row for cell, by_floor in cells.items() for f, row in by_floor.items()}
    return _name_ends(verdict, rows)


def _name_ends(verdict: Verdict, rows: Mapping[str, Mapping[str, Any]]) -> Verdict:
    """The verdict with a caveat that names the rows whose best rate is at an end of its grid."""
    ends = [name for name, row in rows.items() if is_at_end(row)]
    if not ends:
        return verdict
    status = CAVEAT if verdict.status == REPRODUCED else verdict.status
    note = f"{verdict.note} The best rate is at an end of its grid: {', '.join(ends)}.".strip()
    return replace(verdict, status=status, note=note)


def is_at_end(best: Mapping[str, Any]) -> bool:
    """Whether the best rate is the lowest or the highest that was tried."""
    rates = [float(lr) for lr in best["rates" if "rates" in best else "validation"]]
    return best["lr"] in (min(rates), max(rates))


def judge_mnist_table(result: dict[str, Any], judge: Callable[[list[str], Effects], Verdict]) -> Verdict:
    """Call a judge with the seeds and the effects if all seeds are done."""
    seeds, _ = get_whole_seeds(result["arms"], (*result["arms"],))
    if seeds != [*map(str, MNIST_TABLE_SEEDS)]:
        return Verdict(NOT_RUN, "", f"{len(seeds)} of {len(MNIST_TABLE_SEEDS)} seeds are done.")
    verdict = judge(seeds, compute_mnist_effects(result))
    return _name_ends(verdict, {name_arm(arm): row for arm, row in result["selected"].items()})


def _judge_mnist_gain(seeds: list[str], effects: Effects) -> Verdict:
    return judge_gains(effects, describe_seeds(seeds, effects["floor"]), len(seeds), least=MNIST_MARGIN)


def _judge_mnist_equal(seeds: list[str], effects: Effects, name: str, margin: float = MNIST_MARGIN) -> Verdict:
    parts = {each: effect for each, effect in effects.items() if each.partition(",")[0] == name}
    return judge_equivalence(parts, seeds, margin=margin)


MNIST_JUDGES: dict[str, Callable[[list[str], Effects], Verdict]] = {
    "gain": _judge_mnist_gain,
    "variance": partial(_judge_mnist_equal, name=VARIANCE_EFFECT),
    "order": partial(_judge_mnist_equal, name=ORDER_EFFECT),
    "sgd": partial(_judge_mnist_equal, name="SGD"),
    "epsilon": partial(_judge_mnist_equal, name=VARIANCE_AT_EPS, margin=MNIST_EPS_MARGIN),
}
for _claim, _judge in MNIST_JUDGES.items():
    judges(f"floor-mnist-{_claim}")(partial(judge_mnist_table, judge=_judge))
