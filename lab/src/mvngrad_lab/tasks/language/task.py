"""GPT-2 on the tokens of a text, which stay on the disk: a plan holds the windows of its steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from mvngrad_lab.tasks.language.data import tokens
from mvngrad_lab.tasks.language.data.tokens import Tokens
from mvngrad_lab.tasks.language.model import GPT2, GPT2_30M, GPT2_124M, GPT2_TINY
from mvngrad_lab.tasks.language.recipe import Language
from mvngrad_lab.training import parallel
from mvngrad_lab.training.task import EpochPlan, StepPlan, Task

SHAPES = {"tiny": GPT2_TINY, "30M": GPT2_30M, "124M": GPT2_124M}
OFFICIAL = ("wikitext103", "wikitext103-validation")
"""Texts that have WikiText-103's own validation text: beside what is trained on, one to know a model by."""


class LanguageTask(Task):
    """Windows of a text, drawn for each step; the loss of each token in them given those before.

    Which windows a step sees depends on the seed and the number of the step in the run alone. Each of several
    processes reads its share of them.
    """

    supports_parallel = True

    def __init__(self, recipe: Language, folder: Path | None, device: torch.device) -> None:
        self.device, self.steps_per_epoch = device, recipe.epoch_steps
        self.shape = SHAPES[recipe.model]
        self.eval_windows, self.at_once = recipe.eval_windows, recipe.micro_batch_size
        place = tokens.located(recipe.text, folder)
        self.train = Tokens.open(place, "train")
        self.validation = {"validation": Tokens.open(place, "validation")}
        official = next(filter(None, (tokens.found(text, folder) for text in OFFICIAL)), None)
        if official is not None and recipe.text not in OFFICIAL:
            self.validation["wikitext103"] = Tokens.open(official, "validation")
        for split, part in (("train", self.train), ("validation", self.validation["validation"])):
            if len(part) <= self.shape.context:
                raise ValueError(
                    f"text={recipe.text!r} has {len(part)} tokens in {split}.bin, and model={recipe.model!r} needs "
                    f"{self.shape.context + 1}; prepare more text, or put what to validate on into its validation.txt"
                )
        manifest = self.train.manifest
        self.source = f"{manifest.source} ({len(self.train):,} tokens, sha256 {manifest.train.sha256[:12]})"

    def build_model(self) -> nn.Module:
        return GPT2(self.shape)

    def plan_epoch(self, recipe: Language, epoch: int) -> EpochPlan:
        """The windows of this process, as they lie in the file."""
        context, first = self.shape.context, epoch * self.steps_per_epoch
        mine = tokens.share(parallel.get_rank(), parallel.get_world_size(), recipe.batch_size)
        steps = [
            tokens.offsets(recipe.seed, step, recipe.batch_size, context, len(self.train))[mine]
            for step in range(first, first + self.steps_per_epoch)
        ]
        return {"tokens": torch.stack([tokens.packed(self.train.data, starts, context + 1) for starts in steps])}

    def make_batch(self, row: StepPlan) -> tuple[Tensor, ...]:
        numbers = tokens.numbers(row["tokens"])
        return numbers[:, :-1], numbers[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        inputs, targets = batch
        loss: Tensor = model(inputs, targets)
        return loss

    def evaluate(self, model: Callable[..., Tensor], final: bool) -> dict[str, float]:
        """Mean loss of a token and its exponential on validation texts; at the end also on as much of what was trained
        on, drawn alike for every run.
        """
        found: dict[str, float] = {}
        for name, part in self.validation.items():
            loss = self._mean_loss(model, part, self._spaced(part))
            found |= {f"{name}_loss": loss.item(), f"{name}_perplexity": loss.exp().item()}
        if final:
            count = len(self._spaced(self.validation["validation"]))
            starts = tokens.offsets(0, -1, count, self.shape.context, len(self.train))  # no step of a run is -1
            found["train_loss"] = self._mean_loss(model, self.train, starts).item()
        return found

    def _spaced(self, part: Tokens) -> Tensor:
        """Where windows that do not overlap begin: of all, or evenly of some."""
        there = (len(part) - 1) // self.shape.context
        count = min(there, self.eval_windows or there)
        return torch.arange(count) * there // count * self.shape.context

    def _mean_loss(self, model: Callable[..., Tensor], part: Tokens, starts: Tensor) -> Tensor:
        """Over all processes. Each calls the model equally often, because a sharded model needs them all; who has no
        windows left calls it with one that does not count.
        """
        rank, ranks, size = parallel.get_rank(), parallel.get_world_size(), self.at_once
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(0, len(starts), size * ranks):
            mine = starts[first + rank * size : first + (rank + 1) * size]
            windows = tokens.windows(part.data, mine if len(mine) else starts[:1], self.shape.context + 1)
            windows = windows.to(self.device)
            total += len(mine) * model(windows[:, :-1], windows[:, 1:])
        return parallel.all_reduce_mean(total) * ranks / len(starts)


task = LanguageTask
