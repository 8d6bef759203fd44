"""A task is a folder: one elsewhere on sys.path is trained by the same command."""

import json
import os
import subprocess
import sys

import pytest

from mvngrad_lab.tasks import find_presets, find_task_class

RECIPE = """
import dataclasses
from typing import ClassVar
from mvngrad_lab.recipe import Preset, TrainingRecipe

@dataclasses.dataclass(frozen=True, kw_only=True)
class Line(TrainingRecipe):
    name: ClassVar[str] = "line"
    batch_size: int = 8
    epochs: int = 2
    precision: str = "float32"

    def learning_rate(self, step, steps_per_epoch):
        return self.lr

def make(optimizer, batch_size):
    return Line(optimizer=optimizer, lr=0.1, beta1=0.9, beta2=0.99, eps_s=1e-8 if "a" != optimizer[0] else None)

PRESETS = (Preset(Line, make, "mvngrad", "A line through points."),)
"""
TASK = """
import torch
from mvngrad_lab.training.task import Task, make_generators

class LineTask(Task):
    source = "points on a line"

    def __init__(self, recipe, data, device):
        self.device, self.steps_per_epoch = device, 40

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def plan_epoch(self, recipe, epoch):
        _, generator = make_generators(recipe.seed, epoch)
        return {"x": torch.rand(self.steps_per_epoch, recipe.batch_size, 1, generator=generator)}

    def make_batch(self, row):
        return row["x"], 3 * row["x"] - 1

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(self, model, final):
        return {"slope_error": (model(torch.ones(1, 1)) - model(torch.zeros(1, 1)) - 3).abs().item()}

TASK = LineTask
"""


def test_a_task_outside_the_package_is_trained_by_name(tmp_path):
    folder = tmp_path / "elsewhere" / "mvngrad_lab" / "tasks" / "line"
    folder.mkdir(parents=True)
    for name, text in (("__init__.py", ""), ("recipe.py", RECIPE), ("task.py", TASK)):
        (folder / name).write_text(text)
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(tmp_path / "elsewhere")])

    def mvngrad(*arguments):
        command = [sys.executable, "-m", "mvngrad_lab", *arguments]
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert "A line through points." in mvngrad("train", "--help").stdout
    done = mvngrad("train", "line", "--lr", "0.05", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["steps"], result["data"]) == ("finished", 80, "points on a line")
    assert json.loads((run / "recipe.json").read_text())["lr"] == 0.05


@pytest.mark.parametrize("name", ["mnist", "cifar100", "wikitext103", "openwebtext"])
def test_every_preset_makes_recipes_of_its_class_for_all_optimizers(name):
    preset = find_presets()[name]
    suffix = "w" if preset.optimizer.endswith("w") else ""
    for cell in ("adam", "laprop", "adabelief", "mvngrad"):
        recipe = preset.make(cell + suffix, None)
        assert type(recipe) is preset.recipe
        assert recipe.optimizer == cell + suffix
    assert find_task_class(recipe).__module__.startswith("mvngrad_lab.tasks.")


def test_a_recipe_outside_a_task_folder_needs_a_task():
    from tiny import Tiny

    with pytest.raises(
        TypeError, match=r"Tiny is not defined in a recipe\.py of mvngrad_lab\.tasks; pass task= to train"
    ):
        find_task_class(Tiny())
