"""Table 2 on the stand-in: 44 trainings of GPT-2, each stored as a run of its own."""

from __future__ import annotations

from pathlib import Path

from mvngrad_lab.errors import MissingFile
from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.language.recipes import on_stand_in, shortened, table2
from mvngrad_lab.tasks.language.data import tokens
from mvngrad_lab.tasks.language.recipe import STAND_IN
from mvngrad_lab.training.train import SMALL_TEXT, require_gpu, train_missing


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    """Train what is not stored, with a Monitor for seed 0 of the runs that are compared."""
    require_gpu("table2", "trains 40 networks of 30M parameters and 4 of 124M", SMALL_TEXT)
    if tokens.find_tokens(STAND_IN, data) is None:
        raise MissingFile(
            f"table2 trains on the tokens of {STAND_IN}, which are not in data={data}: make them with "
            f"`mvngrad data get {STAND_IN} --data FOLDER`, where FOLDER has the text, and pass the same FOLDER here"
        )
    watched = {recipe.key for recipe in (*table2(), *shortened()) if recipe.seed == 0}
    train_missing(on_stand_in(), root, data, tick, on_event, is_monitored=lambda recipe: recipe.key in watched)
