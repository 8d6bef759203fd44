"""Train the four arms of each seed, and write what is compared to one file.

    python -m mvngrad_lab.experiments.switch.run --data FOLDER --export results/switch-gpt2.json --stop-after 560

FOLDER holds tokens/wikipedia_en. Runs that the store has are skipped, so the same command continues.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, ClassVar

import torch

from mvngrad import from_adamw
from mvngrad_lab import store
from mvngrad_lab.errors import MissingFile
from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.switch.records import AFTER, FILE, SEEDS, Switched, find_bump, make_arms
from mvngrad_lab.store import read_rows
from mvngrad_lab.tasks.language.task import LanguageTask
from mvngrad_lab.training import checkpoint
from mvngrad_lab.training.events import Message
from mvngrad_lab.training.loop import Observer
from mvngrad_lab.training.optimizers import make_optimizer
from mvngrad_lab.training.step import OPTIMIZER_PREFIX, TrainingStep, flatten_optimizer_state, unflatten_optimizer_state
from mvngrad_lab.training.task import build_initial_model
from mvngrad_lab.training.train import require_gpu, train

HALF = "half.pt"
"""In the folder of AdamW's run: model and optimizer after half of the steps."""


class SwitchTask(LanguageTask):
    """The arms share what is compiled."""

    outside_step: ClassVar[tuple[str, ...]] = (*LanguageTask.outside_step, "state")


def save_half(recipe: Switched, folder: Path) -> Observer:
    """The `observe` of `train` that saves everything at half of the steps."""

    def observe(epoch: int, training_step: TrainingStep) -> None:
        if epoch * recipe.epoch_steps == recipe.half:
            torch.save({name: value.cpu() for name, value in training_step.state_dict().items()}, folder / HALF)

    return observe


def start_at_half(recipe: Switched, adamw: Switched, root: Path, data: Path | None) -> None:
    """Write AdamW's half as the first checkpoint of a run that continues it, if that has none yet."""
    folder = root / recipe.key / checkpoint.FOLDER
    if checkpoint.list_checkpoints(folder):
        return
    path = root / adamw.key / HALF
    if not path.is_file():
        raise MissingFile(f"{path} is missing; delete the folder {path.parent} to train AdamW again")
    saved = torch.load(path, weights_only=True)
    model = build_initial_model(LanguageTask(recipe, data, torch.device("cpu")), recipe.seed)
    before, after = (make_optimizer(each, model, torch.zeros(())) for each in (adamw, recipe))
    state = {name: value for name, value in saved.items() if name.startswith(OPTIMIZER_PREFIX)}
    before.load_state_dict(unflatten_optimizer_state(state, before.state_dict()))
    if recipe.state == "converted":
        after.load_state_dict(from_adamw(after, before.state_dict()))  # type: ignore[arg-type]
    own = {name: value for name, value in saved.items() if name not in state}
    new = flatten_optimizer_state(after.state_dict())
    notes = {
        "seconds": 0.0,
        "nonfinite_in_a_row": 0,
        "evaluation_pending": False,
        "environments": [{"from_step": 0, "commit": "unknown"}],  # AdamW's run has it
    }
    checkpoint.save(folder, recipe.half, notes, {**own, **new}, keep=1)


def train_seed(seed: int, root: Path, data: Path | None, on_event: OnEvent, settings: Any, options: Any) -> None:
    """Train what is not stored of a seed's four arms."""
    arms = make_arms(seed, **settings)
    for arm, recipe in arms.items():
        folder = root / recipe.key
        if store.read_run(folder) is None and recipe.state != "own":
            start_at_half(recipe, arms["AdamW"], root, data)
        observe = save_half(recipe, folder) if arm == "AdamW" else None
        run = train(recipe, root=root, data=data, on_event=on_event, observe=observe, task=SwitchTask, **options)
        on_event(Message(recipe.key, f"{arm} seed {seed}: {run.result.get('validation_loss')}"))


def read_losses(recipe: Switched, root: Path) -> list[float]:
    """The training losses of the steps after the switch."""
    rows = [row for row in read_rows(root / recipe.key / "metrics.jsonl") if row["step"] > recipe.half]
    return [loss for row in rows for loss in row["losses"]][:AFTER]


def export(path: Path, root: Path, settings: Any) -> int:
    """Write the seeds whose four arms are all finished; return how many."""
    seeds, environment, data = [], {}, ""
    for seed in SEEDS:
        arms = make_arms(seed, **settings)
        runs = {arm: store.read_run(root / recipe.key) for arm, recipe in arms.items()}
        done = {arm: run for arm, run in runs.items() if run is not None and run.result["status"] == "finished"}
        if len(done) < len(arms):
            continue
        losses = {arm: read_losses(recipe, root) for arm, recipe in arms.items()}
        environment, data = done["AdamW"].environment, done["AdamW"].result["data"]
        seeds.append(
            {
                "seed": seed,
                "validation_loss": {arm: run.result["validation_loss"] for arm, run in done.items()},
                "bump": {arm: find_bump(losses[arm], losses["AdamW"]) for arm in ("converted", "fresh")},
                "losses": {arm: [round(loss, 4) for loss in values] for arm, values in losses.items()},
                "seconds": {arm: run.result["seconds"] for arm, run in done.items()},
            }
        )
    if seeds:
        recipe = {name: value for name, value in make_arms(0, **settings)["AdamW"].settings.items() if name != "seed"}
        content = {"environment": environment, "recipe": recipe, "data": data, "made": store.timestamp()}
        store.write_atomic(path, json.dumps({**content, "seeds": seeds}) + "\n")
    return len(seeds)


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    """Train all seeds and write the file of results into the store."""
    require_gpu("switch", "trains 12 networks of 30M parameters")
    for number, seed in enumerate(SEEDS, start=1):
        train_seed(seed, root, data, on_event, {}, {"device": "cuda", "compile": True})
        tick(number / len(SEEDS))
    export(root / FILE, root, {})


def print_message(event: Any) -> None:
    if isinstance(event, Message):
        print(store.timestamp(), event.text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=store.ROOT, help="the store")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--export", type=Path, default=store.RESULTS / FILE)
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds; starts no seed that may not fit")
    parser.add_argument("--seed-seconds", type=float, default=270.0, help="how long one seed takes at most")
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of the recipes, as JSON")
    args = parser.parse_args()
    deadline = time.monotonic() + args.stop_after
    options = {"device": args.device, "compile": args.device != "cpu"}
    for seed in SEEDS:
        arms = make_arms(seed, **args.settings).values()
        if all(store.read_run(args.runs / recipe.key) is not None for recipe in arms):
            continue
        if time.monotonic() + args.seed_seconds > deadline:
            print("stopped before seed", seed, flush=True)
            break
        train_seed(seed, args.runs, args.data, print_message, args.settings, options)
    print(export(args.export, args.runs, args.settings), "of", len(SEEDS), "seeds in", args.export, flush=True)


if __name__ == "__main__":
    main()
