"""Tasks, what a recipe trains, one folder for each; to add one is to add a folder, because nothing else lists them.

A folder mvngrad_lab/tasks/<name>/ is found here and in every other folder of sys.path. It holds

    __init__.py   empty
    recipe.py     the recipe classes (mvngrad_lab.recipe.TrainingRecipe) and PRESETS, the subcommands of `mvngrad train`
                  (mvngrad_lab.recipe.Preset). Standard library only: it is read to print help and to draw a report
    task.py       TASK, the class (mvngrad_lab.training.task.Task) that trains these recipes
    data.py       where the data is, how it is verified and downloaded; a folder data/ if one file is too long
    model.py      the network

Only `recipe.py` and `task.py` are required, and only their names matter.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mvngrad_lab.recipe import Preset, TrainingRecipe

__path__ = pkgutil.extend_path(__path__, __name__)


def find_presets() -> dict[str, Preset]:
    """The presets of all tasks, by the name of their recipe."""
    presets: dict[str, Preset] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        recipes = f"{__name__}.{module.name}.recipe"
        if module.ispkg and find_spec(recipes) is not None:
            presets |= {preset.recipe.name: preset for preset in import_module(recipes).PRESETS}
    return presets


def find_task_class(recipe: TrainingRecipe) -> Any:
    """The TASK of the folder that defines the recipe's class, or a class that it is derived from."""
    for kind in type(recipe).__mro__:
        folder, _, module = kind.__module__.rpartition(".")
        if folder.startswith(f"{__name__}.") and module == "recipe":
            return import_module(f"{folder}.task").TASK
    raise TypeError(f"{type(recipe).__name__} is not defined in a recipe.py of {__name__}; pass task= to train()")
