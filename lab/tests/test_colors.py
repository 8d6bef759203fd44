"""The colours of figures: any eye can tell the optimizers apart, on screens and in print."""

import itertools

import numpy as np
import pytest

from mvngrad_lab.report.figures import style

THEMES = ("light", "dark")


def linear(color):
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(first, second):
    low, high = sorted(float(linear(color) @ (0.2126, 0.7152, 0.0722)) for color in (first, second))
    return (high + 0.05) / (low + 0.05)


# Machado, Oliveira and Fernandes (2009), severity 1.
SIGHTS = {
    "full": np.eye(3),
    "protan": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "deutan": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    "tritan": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}


def oklab(light):
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]) @ light.clip(0, 1)
    axes = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return axes @ np.cbrt(cones)


@pytest.mark.parametrize("theme", THEMES)
def test_optimizers_can_be_distinguished_by_any_eye_and_in_print(theme):
    colors = {"light": style.LIGHT, "dark": style.DARK}[theme]
    marks = list(style.MARKS.values())
    assert len({mark.dash for mark in marks}) == len({mark.marker for mark in marks}) == 4
    for mark in marks:
        assert contrast(colors[mark.color], colors["paper"]) >= 3
    for first, second in itertools.combinations(marks, 2):
        for sight, matrix in SIGHTS.items():
            seen = [oklab(matrix @ linear(colors[mark.color])) for mark in (first, second)]
            assert np.linalg.norm(seen[0] - seen[1]) > 0.1, (first.label, second.label, sight)


# Pages
