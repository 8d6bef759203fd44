"""Accuracy against the learning rate, with a floor under the divisor and without; the effects; the dial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MultipleLocator

from mvngrad_lab.experiments.floor.arms import EPS_ARMS, GRID_ARMS, SGD_SCALE
from mvngrad_lab.experiments.floor.effects import (
    ORDER_EFFECT,
    SGD_ARMS,
    VARIANCE_EFFECT,
    compute_effects,
    compute_mnist_effects,
    find_obstacle,
    get_arms_with_published,
    get_seeds_of_look,
    get_whole_seeds,
)
from mvngrad_lab.experiments.floor.findings import (
    TITLES,
    describe,
    describe_decay,
    describe_language,
    draw_lead,
    get_judged_arms,
)
from mvngrad_lab.experiments.floor.judge import MNIST_MARGIN, SEEN, SEEN_LOSS, is_at_end
from mvngrad_lab.experiments.floor.rules import MARGIN
from mvngrad_lab.recipe import NAMES
from mvngrad_lab.report.figures.curves import Curve, draw_accuracies
from mvngrad_lab.report.figures.style import (
    BOUND,
    LIGHT,
    MARKS,
    SIZE,
    Mark,
    draw_curve,
    label_columns,
    make_axes,
    number,
    superscript,
)
from mvngrad_lab.report.figures.svg import Figure, Panel, Table, make_panel
from mvngrad_lab.report.statistics import Contrast, mean_and_deviation, mean_interval
from mvngrad_lab.report.tables import OPTIMIZERS

SGD = BOUND.with_label("SGD at 1,000 times the rate")


def draw(result: dict[str, Any]) -> list[Figure]:
    arms = result["arms"]
    caption = (
        f"ResNet-18 on CIFAR-100, batch 1024, 30 epochs, seed 0: the best of four pairs of betas at each rate, "
        f"{result['done']} of {result['of']} runs. The floor is ε for Adam and LaProp and √(ε_s/(1−β₂)) for AdaBelief "
        "and MVN-Grad, where it is 3.2×10⁻³ at β₂ = 0.999. The paper's settings are Adam and LaProp without a floor "
        "against AdaBelief and MVN-Grad with one."
    )
    if result["done"] < result["of"]:
        caption += " Nothing is judged before all runs are done."
    panels = tuple(_panel(arms, kind) for kind in TITLES)
    return [Figure("Variance or epsilon", caption, panels, (*MARKS.values(), SGD), _table(arms))]


def _panel(arms: dict[str, list[dict[str, Any]]], kind: str) -> Panel:
    at = make_axes("learning rate", "test accuracy, %", log="x")
    parts = []
    for arm, cell in GRID_ARMS.items():
        if arm.endswith(f"-{kind}") and arms[arm]:
            _draw_best(at, MARKS[NAMES[cell]], arms[arm], 1.0)
            parts.append(f"{NAMES[cell]} {_best(arms[arm])['test_accuracy']:.2f}")
    if kind == "floor" and arms["sgd"]:
        _draw_best(at, SGD, arms["sgd"], 1 / SGD_SCALE)
        parts.append(f"SGD {_best(arms['sgd'])['test_accuracy']:.2f}")
    at.set_ylim(60, 76)
    return make_panel(at, TITLES[kind], f"Best: {', '.join(parts)}.")


def _draw_best(at: Any, mark: Mark, rows: list[dict[str, Any]], scale: float) -> None:
    rates = sorted({row["lr"] for row in rows})
    best = [max(row["test_accuracy"] for row in rows if row["lr"] == lr) for lr in rates]
    draw_curve(at, mark, [lr * scale for lr in rates], best)


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return max(rows, key=lambda row: row["test_accuracy"])


def _table(arms: dict[str, list[dict[str, Any]]]) -> Table:
    rows = []
    for arm in (*GRID_ARMS, "sgd"):
        if not arms[arm]:
            continue
        best = _best(arms[arm])
        accuracy, runs = f"{best['test_accuracy']:.2f}", f"{len(arms[arm])} of 17"
        rows.append((*_name_arm(arm), accuracy, number(best["lr"]), _format_betas(arm, best), runs))
    head = ("optimizer", "floor", "best test accuracy", "learning rate", "betas or momentum", "runs done")
    return Table("Best of each arm", head, tuple(rows))


def draw_effects(result: dict[str, Any]) -> list[Figure]:
    """The forest plot of all effects, and the nine arms as a table."""
    effects, arms, judged = compute_effects(result), result["arms"], get_judged_arms(result)
    panels = (_draw_forest(effects, MARGIN),) if effects else ()
    planned = {seed for row in arms.values() for seed in row}
    seeds = sorted(planned.union(*result["published"].values()))
    rows = []
    for arm in (*GRID_ARMS, "sgd"):
        values = arms[arm]
        settings = result["selected"][arm]
        known = [value for value in (judged[arm] or values).values() if value is not None]
        cells = [_format_value(values[s]) if s in values else "to come" if s in planned else "" for s in seeds]
        mean = mean_and_deviation(known) if known else ""
        rows.append((*_name_arm(arm), mean, *cells, number(settings["lr"]), _format_betas(arm, settings)))
    for arm, values in result["published"].items():
        known = [value for value in values.values() if value is not None]
        text = mean_and_deviation(known) if known else "to come"
        cells = [_format_value(values[seed]) if seed in values else "" for seed in seeds]
        rows.append((*_name_arm(arm), text, *cells, "the paper's", "the paper's"))
    head = ("optimizer", "floor", "mean ± deviation", *(f"seed {seed}" for seed in seeds), "learning rate", "betas")
    caption = (
        f"ResNet-18 on CIFAR-100, batch 1024, 200 epochs; {result['done']} of {result['of']} runs are done. Each "
        "effect is a difference of means, seeds as blocks; an interaction (x) is a difference of differences. Variance "
        "is less second moment, momentum last less first, SGD less the four arms with a floor. The "
        "shaded band is ±0.3 points, within which two arms are called equal."
    )
    caption += f" {_describe_seeds(result)}"
    table = Table("Test accuracy of each arm as selected, %", head, tuple(rows))
    forest = Figure("What the floor, the variance and the order are worth", caption, panels, (), table)
    published = _make_published_table(effects, result)
    return [forest, *published, *_make_analysis(effects), *_draw_curves(result["curves"])]


def _draw_forest(effects: Mapping[str, Contrast], margin: float) -> Panel:
    """The effects with their intervals, one below the other, and the band within which arms are called equal."""
    at = make_axes("points of test accuracy", "effect, with 95% interval", size=(5.0, 5.0), left=2.2)
    at.axvspan(-margin, margin, color=LIGHT["line"], alpha=0.6, linewidth=0)
    at.axvline(0, color=LIGHT["muted"], linewidth=0.8)
    for row, (name, effect) in enumerate(effects.items()):
        color = LIGHT["mvngrad" if name.startswith("floor") and " x " not in name else "ink"]
        at.plot(effect.interval(), [row, row], color=color, linewidth=1.6)
        at.plot([effect.estimate], [row], color=color, marker="D" if row == 0 else "o", markersize=5)
    at.set_yticks(range(len(effects)), list(effects))
    at.set_ylim(len(effects) - 0.5, -0.5)
    at.xaxis.set_major_locator(MultipleLocator(0.5))
    at.grid(visible=False, axis="y")
    words = "; ".join(f"{name} {effect}" for name, effect in effects.items())
    return make_panel(at, "Effects", f"{words}.")


def _make_published_table(effects: Mapping[str, Contrast], result: dict[str, Any]) -> list[Figure]:
    """The effects next to those with the paper's settings in the arms that the paper ran."""
    published = compute_effects(result, published=True) if result["published"] else {}
    rows = [
        (name, str(effect), str(published[name]), f"{published[name].p_different():.2g}")
        for name, effect in effects.items()
        if name in published
    ]
    if not rows:
        return []
    seeds, _ = get_whole_seeds(get_arms_with_published(result))
    caption = (
        "Settings were chosen at 30 epochs, which may choose badly for 200. Here the four arms that the paper ran have "
        f"its settings, as in Table 1 (seeds {', '.join(seeds)}); the other four have no second setting. This was not "
        "planned, and p are not corrected for their number."
    )
    head = ("effect", "as selected", "the paper's settings", "p with the paper's settings")
    table = Table("Effects in points, with 95% intervals", head, tuple(rows))
    return [Figure("The effects with the paper's settings", caption, (), (), table)]


def _describe_seeds(result: dict[str, Any]) -> str:
    """Which seeds the effects are of, or why there is no effect."""
    seeds, values = get_seeds_of_look(result["arms"])
    of_sgd, sgd_values = get_seeds_of_look(result["arms"], SGD_ARMS)
    if obstacle := find_obstacle(values, len(seeds)):
        return f"No effect is shown. {obstacle.note}"
    text = f"Effects, and means at selected settings, are of seeds {', '.join(seeds)}"
    if obstacle := find_obstacle(sgd_values, len(of_sgd)):
        return f"{text}. SGD's is not shown. {obstacle.note}"
    return f"{text}." if of_sgd == seeds else f"{text}; SGD's of seeds {', '.join(of_sgd)}."


def _make_analysis(effects: Mapping[str, Contrast]) -> list[Figure]:
    """The analysis of variance of the eight arms, as a table."""
    rows = [
        (name, str(effect), f"{(effect.estimate / effect.error) ** 2:.1f}", f"{effect.p_different():.2g}")
        for name, effect in effects.items()
        if name in ("floor", VARIANCE_EFFECT, ORDER_EFFECT) or " x " in name
    ]
    if not rows:
        return []
    head = ("effect", "points", f"F(1, {effects['floor'].freedom})", "p")
    caption = "Three factors and all their interactions, seeds as blocks. These p are not corrected for their number."
    return [
        Figure("Analysis of variance", caption, (), (), Table("Of the eight arms at 200 epochs", head, tuple(rows)))
    ]


def _draw_curves(curves: Mapping[str, Sequence[Curve]]) -> list[Figure]:
    """Test accuracy along the 200 epochs, of each arm that has kept it."""
    panels = []
    for kind, title in TITLES.items():
        of_kind = {name: curves.get(f"{cell}-{kind}", ()) for name, cell in OPTIMIZERS.items()}
        of_kind |= {"SGD": curves.get("sgd", ())} if kind == "floor" else {}
        panels += draw_accuracies(f"{title}, 200 epochs", of_kind)
    seeds = sorted({len(of) for of in curves.values() if of})
    caption = (
        f"ResNet-18, batch 1024: mean over seeds, n = {' or '.join(map(str, seeds))} for each line, accuracy every 10 "
        "epochs. The runs of Table 1 did not keep their accuracy along the training."
    )
    if not all(curves.get(arm) for arm in (*GRID_ARMS, "sgd")):
        caption += " Arms without a line are to come."
    marks = (*MARKS.values(), *([SGD.with_label("SGD")] if curves.get("sgd") else []))
    return [Figure("Training curves on CIFAR-100", caption, tuple(panels), marks)] if panels else []


def _format_value(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.2f}"


def _name_arm(arm: str) -> tuple[str, str]:
    return ("SGD", "") if arm == "sgd" else (NAMES[GRID_ARMS[arm]], "yes" if arm.endswith("-floor") else "no")


def _format_betas(arm: str, settings: dict[str, Any]) -> str:
    return f"{settings['beta1']:g}" if arm == "sgd" else f"{settings['beta1']:g}, {settings['beta2']:g}"


class DialTask(NamedTuple):
    """What the figure of the dial says of a task."""

    y: str
    """The label of the axis."""
    name: str
    training: str
    seen: tuple[float, str]
    """The smallest difference that counts with one seed, as a number and as text."""


DIALS = {
    "images": DialTask(
        "test accuracy, % (higher is better)",
        "CIFAR-100",
        "ResNet-18 on CIFAR-100 after 30 epochs",
        (SEEN, f"{SEEN:g} point"),
    ),
    "language": DialTask(
        "validation loss, nats (lower is better)",
        "GPT-2 30M",
        "GPT-2 30M on the stand-in text after 1,000 steps",
        (SEEN_LOSS, f"{SEEN_LOSS:g} nats"),
    ),
}
"""By the name of the part of the result."""
HOLLOW = "A hollow point has the lowest or the highest of its rates: another may be better."


def draw_dial(result: dict[str, Any]) -> list[Figure]:
    """From no floor to SGD, on images and on language. A point whose rates are not all done is left out."""
    shown = {part: task for part, task in DIALS.items() if has_points(result[part])}
    panels, changes = [], []
    for part, task in shown.items():
        panels.append(draw_dial_panel(result[part], task.y, f"{part.capitalize()}: {task.name}", task.seen))
        if change := _describe_gradient(result[part]["gradient_rms_by_floor"]):
            changes.append(f"{change} on {task.name}")
    trainings = ", ".join(task.training for task in shown.values())
    caption = (
        f"The best of three or four rates at each floor, seed 0: {trainings}. "
        "The floor itself is below its ratio to the gradient; at a floor far above every gradient all four are SGD "
        f"with momentum, the last point. The bar is the smallest difference that counts with one seed. {HOLLOW}"
    )
    if changes:
        caption += (
            " All ratios of a panel are to one size of the gradient, at the lowest floor at which runs recorded it; at "
            f"higher floors the gradient {' and '.join(changes)}."
        )
    if result["done"] < result["of"]:
        done = f"{result['done']} of {result['of']} runs of both tasks are done"
        caption += f" {done}; a point with a run to come is left out."
    return [Figure("The dial: from a normalized gradient to SGD", caption, tuple(panels), tuple(MARKS.values()))]


def _describe_gradient(sizes: Mapping[str, float]) -> str:
    """How the gradient's size changes from the lowest floor on; empty if it is known at one floor at most.

    >>> _describe_gradient({"0": 4.0, "0.01": 3.0, "1": 1.0}), _describe_gradient({"0": 4.0, "0.01": 3.0, "1": 5.0})
    ('falls to 0.25 of it', 'is 0.75 to 1.25 of it')
    """
    ratios = [size / next(iter(sizes.values())) for size in sizes.values()]
    if len(ratios) < 2:
        return ""
    if ratios[-1] < 1 and ratios == sorted(ratios, reverse=True):
        return f"falls to {ratios[-1]:.2f} of it"
    return f"is {min(ratios[1:]):.2f} to {max(ratios[1:]):.2f} of it"


def has_points(part: dict[str, Any]) -> bool:
    """Whether two floors or more of some cell are done: one is no curve."""
    return any(sum(row["done"] == row["of"] for row in rows.values()) > 1 for rows in part["cells"].values())


def draw_dial_panel(part: dict[str, Any], y: str, title: str, seen: tuple[float, str] | None = None) -> Panel:
    """One task: the best value of each cell against the floor, relative to the gradient where that is known.

    A point of several seeds has its 95% interval. `seen` is the length of a bar, and how the panel names it.
    """
    size, cells = part["gradient_rms"], part["cells"]
    x = "floor / root mean square of the gradient, and the floor" if size else "floor (the gradient was not recorded)"
    at = make_axes(x, y, size=(SIZE[0], SIZE[1] + 0.2), bottom=0.64)  # labels of two lines
    floors = [*cells["mvngrad"], *cells["sgd"]]
    labels = [_label_floor(float(floor), size) for floor in floors]
    last, words = len(floors) - 1, []
    for index, (cell, name) in enumerate(NAMES.items()):
        rows = {**cells[cell], **cells["sgd"]}
        points = {column: rows[floor] for column, floor in enumerate(floors) if _is_known(rows[floor])}
        # Side by side, so that equal points are all visible; at SGD the four are one run.
        places = [column + 0.12 * (index - 1.5) * (column < last) for column in points]
        draw_curve(at, MARKS[name], places, [row["best"] for row in points.values()])
        for place, (column, row) in zip(places, points.items(), strict=True):
            if column < last:
                _draw_point(at, place, row, MARKS[name].points)
        if points:
            values = (f"{row['best']:.4g} at {labels[column].splitlines()[0]}" for column, row in points.items())
            words.append(f"{name} {', '.join(values)}")
    if _is_known(sgd := cells["sgd"][floors[-1]]):
        _draw_point(at, last, sgd, {"color": LIGHT["ink"], "marker": "o", "markersize": 8})
    else:
        at.annotate("to come", (last, 0.5), xycoords=("data", "axes fraction"), ha="center", color=LIGHT["muted"])
    if seen:
        _draw_seen(at, *seen)
    label_columns(at, labels)
    return make_panel(at, title, f"{'; '.join(words)}.")


def _is_known(row: Mapping[str, Any]) -> bool:
    """Whether all rates of a point are done, and one did not diverge."""
    return row["done"] == row["of"] and row["best"] is not None


def _label_floor(floor: float, size: float | None) -> str:
    """Of a column: the ratio of the floor, a power of ten, to the gradient, and below it the floor."""
    if not 0 < floor < 1:
        return "SGD" if floor else "none"
    itself = f"10{superscript(round(math.log10(floor)))}"
    return f"{number(floor / size, 2)}\n{itself}" if size else itself


def _draw_point(at: Axes, x: float, row: Mapping[str, Any], style: Mapping[str, Any]) -> None:
    """Draw a point, hollow if its rate is at an end of the grid, and its interval if it has several seeds."""
    fill = LIGHT["paper"] if is_at_end(row) else style["color"]
    at.plot(x, row["best"], **style, markerfacecolor=fill, zorder=2.5)
    if interval := mean_interval(row.get("test", ())):
        at.plot([x, x], interval, color=style["color"], linewidth=1.2, zorder=2.3)


def _draw_seen(at: Axes, length: float, label: str) -> None:
    """Draw a bar of this length in the upper left corner."""
    at.margins(y=0.08)
    low, high = at.get_ylim()
    top = high - 0.05 * (high - low)
    at.plot([-0.35, -0.35], [top - length, top], color=LIGHT["muted"], marker="_", markersize=7, linewidth=1.2)
    words = f"smallest difference\nthat counts: {label}"
    box = {"facecolor": LIGHT["paper"], "edgecolor": "none", "pad": 0.5}
    at.annotate(words, (-0.25, top - length / 2), va="center", color=LIGHT["muted"], bbox=box)


def draw_mnist(result: dict[str, Any]) -> list[Figure]:
    caption = (
        f"A two-layer network; mean over {len(result['seeds'])} seeds with its 95% interval, at the best rate by "
        f"validation accuracy at each floor. The floor itself is below its ratio to the gradient, whose size is that "
        f"without a floor. {HOLLOW} {result['data']}."
    )
    panel = draw_dial_panel(result, "test accuracy, % (higher is better)", "MNIST")
    return [Figure("The dial on MNIST", caption, (panel,), tuple(MARKS.values()))]


def draw_mnist_table(result: dict[str, Any]) -> list[Figure]:
    """The forest plot of the effects on MNIST, and the nine arms as a table."""
    rows = []
    for arm, by_seed in result["arms"].items():
        settings = result["selected"][arm]
        name = (NAMES[arm.removesuffix("-eps")], "by eps") if arm in EPS_ARMS else _name_arm(arm)
        rows.append((*name, mean_and_deviation([*by_seed.values()]), number(settings["lr"])))
    count = len(result["arms"]["sgd"])
    caption = (
        f"A two-layer network; test accuracy over {count} seeds, at the best of six rates by validation accuracy with "
        "other seeds. Floor: 1e-2. Effects are named as on CIFAR-100. In the last two "
        "AdaBelief and MVN-Grad have a floor by eps, as Adam and LaProp do, in place of eps_s. The shaded band is "
        f"±{MNIST_MARGIN} points. {result['data']}."
    )
    head = ("optimizer", "floor", "mean ± deviation", "learning rate")
    table = Table("Test accuracy of each arm, %", head, tuple(rows))
    panel = _draw_forest(compute_mnist_effects(result), MNIST_MARGIN)
    return [Figure("Variance or floor on MNIST", caption, (panel,), (), table)]


FINDINGS = {
    "floor": (10, describe),
    "floor-table": (10, describe),
    "floor-decay": (11, describe_decay),
    "floor-dial": (12, describe_language),
}
LEAD = {"floor-table": draw_lead, "floor": draw_lead}
FIGURES = {
    "floor-mnist": draw_mnist,
    "floor-mnist-table": draw_mnist_table,
    "floor": draw,
    "floor-table": draw_effects,
    "floor-dial": draw_dial,
}
