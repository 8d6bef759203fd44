"""An experiment is added by adding a folder, also outside the package."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from mvngrad_lab import report
from mvngrad_lab.discovery import find_experiments, find_topics

FILES = {
    "__init__.py": """
from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("coin", "how often a coin shows heads", (1, 1), f"{__name__}.run"),)
""",
    "run.py": """
from dataclasses import dataclass
from typing import ClassVar

from mvngrad_lab.recipe import Recipe


@dataclass(frozen=True)
class Coin(Recipe):
    name: ClassVar[str] = "coin"
    throws: int = 10


def make_recipe(quick, data):
    return Coin(4) if quick else Coin()


def run(recipe, data, tick):
    tick(1.0)
    return {"heads": recipe.throws // 2}
""",
    "judge.py": """
from mvngrad_lab.report.verdicts import decide, judges


@judges("coin-fair")
def judge_fair(result):
    return decide(result["heads"] == 5, f"{result['heads']} heads of 10")
""",
    "figure.py": """
from mvngrad_lab.report.figures.style import make_axes
from mvngrad_lab.report.figures.svg import Figure, make_panel


def draw(result):
    panel_axes = make_axes("throw", "heads")
    panel_axes.plot([0, 10], [0, result["heads"]])
    return [Figure("Heads of a coin", "A line.", (make_panel(panel_axes, "Heads", "They grow to 5."),))]


FIGURES = {"coin": draw}
""",
    "claims.toml": """
[[group]]
order = 5
name = "Coins"
target = "coin"

[[group.claim]]
id = "coin-fair"
says = "Ours: a coin is fair."
value = "5 of 10"
rule = "Reproduced if there are 5 heads in 10 throws."
""",
}


def test_an_experiment_outside_the_package_runs_and_is_judged_and_drawn(tmp_path):
    topic = tmp_path / "outside" / "mvngrad_lab" / "experiments" / "coin"
    topic.mkdir(parents=True)
    for name, text in FILES.items():
        (topic / name).write_text(text)
    paths = [str(tmp_path / "outside"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def mvngrad(*arguments):
        command = [sys.executable, "-m", "mvngrad_lab", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "coin" in mvngrad("reproduce", "--help")
    assert "done   coin" in mvngrad("reproduce", "coin")
    (result,) = tmp_path.glob("runs/coin-*/result.json")
    assert json.loads(result.read_text())["heads"] == 5
    page = (tmp_path / "runs" / "report.html").read_text()
    claim = page[page.index('id="coin-fair"') :].split("</li>")[0]
    assert 'data-verdict="reproduced"' in claim
    assert "5 heads of 10" in claim
    assert "Heads of a coin" in page
    assert page.index('id="coin-fair"') < page.index('id="spike-mvngrad"'), "order = 5 comes first"


def test_the_report_imports_no_experiment_by_name():
    """Experiments import the report; it finds them by `mvngrad_lab.discovery`."""
    for path in sorted(Path(report.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not any(f"{module}.{name}".count("mvngrad_lab.experiments") for name in names), path


def test_names_are_unique_and_short_experiments_come_first():
    experiments = list(find_experiments().values())
    assert {"cifar100", "language", "memory", "mnist", "spike", "sweeps"} <= set(find_topics())
    assert [each.gpu for each in experiments] == sorted(each.gpu for each in experiments)
    assert experiments[0].name == "spike"
