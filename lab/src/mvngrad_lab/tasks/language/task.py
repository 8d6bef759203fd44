"""GPT-2 on the tokens of a text. They stay on the disk; a plan holds the windows of its steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mvngrad_lab.errors import InvalidInput, MissingFile
from mvngrad_lab.tasks.language.data import tokens
from mvngrad_lab.tasks.language.data.tokens import Tokens
from mvngrad_lab.tasks.language.model import GPT2, GPT2_30M, GPT2_124M, GPT2_TINY
from mvngrad_lab.tasks.language.recipe import Language
from mvngrad_lab.training import parallel
from mvngrad_lab.training.task import EpochPlan, StepPlan, Task

SHAPES = {"tiny": GPT2_TINY, "30M": GPT2_30M, "124M": GPT2_124M}
OFFICIAL = ("wikitext103", "wikitext103-validation")
"""Texts with WikiText-103's validation text, on which a model trained on another text is evaluated as well."""


class LanguageTask(Task):
    """The mean loss of each token in windows of a text, given the tokens before it.

    The windows of a step are a function of the seed and the number of the step. Each of several processes reads its
    share of them.
    """

    supports_parallel = True
    outside_step: ClassVar[tuple[str, ...]] = ("steps", "warmup_steps", "lr_end", "nonfinite_limit", "decayed")

    def __init__(self, recipe: Language, folder: Path | None, device: torch.device) -> None:
        self.device, self.steps_per_epoch = device, recipe.epoch_steps
        self.shape = SHAPES[recipe.model]
        self.eval_windows, self.at_once = recipe.eval_windows, recipe.micro_batch_size
        token_folder = tokens.require_tokens(recipe.text, folder)
        self.train = Tokens.open(token_folder, "train")
        self.validation = {"validation": Tokens.open(token_folder, "validation")}
        official = next(filter(None, (tokens.find_tokens(text, folder) for text in OFFICIAL)), None)
        if official is not None and recipe.text not in OFFICIAL:
            self.validation["wikitext103"] = Tokens.open(official, "validation")
        for split, part in (("train", self.train), ("validation", self.validation["validation"])):
            if len(part) <= self.shape.context:
                raise InvalidInput(
                    f"text={recipe.text!r} has {len(part)} tokens in {split}.bin, and model={recipe.model!r} needs "
                    f"{self.shape.context + 1}; prepare more text, or put what to validate on into its validation.txt"
                )
        if (recipe.eval_windows or 0) > (available := self._count_windows(self.validation["validation"])):
            raise InvalidInput(
                f"eval_windows={recipe.eval_windows} is more than the {available} windows of the validation text "
                f"{recipe.text!r}; make it at most {available}, or None for all"
            )
        manifest = self.train.manifest
        self.source = f"{manifest.source} ({len(self.train):,} tokens, sha256 {manifest.train.sha256[:12]})"

    @classmethod
    def prepare_recipe(cls, recipe: Any, data: Path | None, progress: Callable[[str], Any]) -> Any:
        """Replace a folder in `text` by the name of its tokens, which are made if they are missing."""
        from mvngrad_lab.tasks.language.data import prepare, text as texts

        text, folder = recipe.text, Path(recipe.text)
        if text in texts.TEXTS or (tokens.is_text_name(text) and not folder.is_dir()):
            return recipe
        if not text or not folder.is_dir():
            raise MissingFile(f"--text {text!r} is not a folder, and no name that `mvngrad data prepare` prints")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InvalidInput(f"--text {text!r}: not by several processes at once; `mvngrad data prepare` it before")
        name, _ = prepare.prepare_folder_tokens(folder, data, on_progress=progress("tokens"))
        return replace(recipe, text=name)

    def build_model(self) -> nn.Module:
        return GPT2(self.shape)

    def plan_epoch(self, recipe: Language, epoch: int) -> EpochPlan:
        """The windows of this process, as int16."""
        context, first = self.shape.context, epoch * self.steps_per_epoch
        own = tokens.rank_slice(parallel.get_rank(), parallel.get_world_size(), recipe.batch_size)
        steps = [
            tokens.window_starts(recipe.seed, step, recipe.batch_size, context, len(self.train))[own]
            for step in range(first, first + self.steps_per_epoch)
        ]
        return {"tokens": torch.stack([tokens.read_windows(self.train.data, starts, context + 1) for starts in steps])}

    def make_batch(self, row: StepPlan) -> tuple[Tensor, ...]:
        ids = tokens.token_ids(row["tokens"])
        return ids[:, :-1], ids[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        inputs, targets = batch
        loss: Tensor = model(inputs, targets)
        return loss

    def evaluate(self, model: Callable[..., Tensor], final: bool) -> dict[str, float]:
        """Mean loss of a token and perplexity on validation texts; if `final`, also the loss on as many windows of the
        training text, the same for every run.
        """
        metrics: dict[str, float] = {}
        for name, part in self.validation.items():
            loss = self._mean_loss(model, part, self._evaluation_starts(part))
            metrics |= {f"{name}_loss": loss.item(), f"{name}_perplexity": loss.exp().item()}
        if final:
            count = len(self._evaluation_starts(self.validation["validation"]))
            starts = tokens.window_starts(0, -1, count, self.shape.context, len(self.train))  # -1 is no step of a run
            metrics["train_loss"] = self._mean_loss(model, self.train, starts).item()
        return metrics

    def _count_windows(self, part: Tokens) -> int:
        """Windows of a text that do not overlap."""
        return (len(part) - 1) // self.shape.context

    def _evaluation_starts(self, part: Tokens) -> Tensor:
        """Where the windows to evaluate begin: all that do not overlap, or `eval_windows` of them, evenly spaced."""
        available = self._count_windows(part)
        count = min(available, self.eval_windows or available)
        return torch.arange(count) * available // count * self.shape.context

    def _mean_loss(self, model: Callable[..., Tensor], part: Tokens, starts: Tensor) -> Tensor:
        """Averaged over all processes. Each calls the model equally often, because a sharded model needs them all; one
        without windows left calls it with a window that does not count.
        """
        rank, ranks, size = parallel.get_rank(), parallel.get_world_size(), self.at_once
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(0, len(starts), size * ranks):
            own = starts[first + rank * size : first + (rank + 1) * size]
            windows = tokens.read_windows(part.data, own if len(own) else starts[:1], self.shape.context + 1)
            ids = tokens.token_ids(windows).to(self.device)
            total += len(own) * model(ids[:, :-1], ids[:, 1:])
        return parallel.all_reduce_mean(total) * ranks / len(starts)


TASK = LanguageTask
