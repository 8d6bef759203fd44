"""`mvngrad train NAME`: the paper's settings as defaults of all options, on one device or under torchrun."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, Union

from tyro.conf import arg, subcommand

from mvngrad_lab import store
from mvngrad_lab.cli.options import Data, Runs
from mvngrad_lab.recipe import CELLS, TrainingRecipe
from mvngrad_lab.tasks.cifar100 import recipe as cifar100
from mvngrad_lab.tasks.cifar100.recipe import Cifar100
from mvngrad_lab.tasks.language import recipe as language
from mvngrad_lab.tasks.language.recipe import Language, OpenWebText, WikiText103

R = TypeVar("R", bound=TrainingRecipe)


@dataclass
class Train(Generic[R]):
    """Train a network by a recipe of the paper, or with settings of your own. An interrupted run goes on."""

    recipe: Annotated[R, arg(name="")]
    data: Data = None
    runs: Runs = store.ROOT
    device: Annotated[Literal["auto", "cpu", "cuda"], arg(help="where to train")] = "auto"
    compile: Annotated[bool, arg(help="compile the model first: a minute that long runs earn back")] = False
    parallel: Annotated[
        Literal["ddp", "fsdp"] | None,
        arg(
            help="train on all processes of torchrun, with the whole model in each or a part",
            help_behavior_hint="(default: one process)",
        ),
    ] = None
    checkpoint_every: Annotated[float, arg(metavar="SECONDS", help="between checkpoints")] = 60.0
    monitored: Annotated[
        bool, arg(help="also write what `mvngrad diagnose` reads: the optimizer's regime, after each epoch")
    ] = False
    tensorboard: Annotated[
        Path | None, arg(metavar="FOLDER", help="also write TensorBoard's files there", help_behavior_hint="")
    ] = None
    wandb: Annotated[str | None, arg(metavar="PROJECT", help="also log to Weights & Biases", help_behavior_hint="")] = (
        None
    )

    def __call__(self) -> int:
        import torch
        from rich.console import Console

        from mvngrad_lab.cli.progress import TrainingBar
        from mvngrad_lab.training import sinks
        from mvngrad_lab.training.train import Interrupted, check_monitorable, make_monitor_observer, train

        processes, first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
        if processes > 1 and self.parallel is None:
            raise ValueError(f"{processes} processes would each train the whole; add --parallel ddp or --parallel fsdp")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: this torch sees no GPU; use --device cpu")
        if not self.checkpoint_every >= 0:
            raise ValueError(f"--checkpoint-every {self.checkpoint_every} is invalid; it must be at least 0")
        if self.monitored:
            check_monitorable(self.recipe)
        device = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        recipe: Any = self.recipe
        if isinstance(recipe, Language):
            recipe = replace(recipe, text=named(recipe.text, self.data))
        if first and store.RunFolder(recipe, self.runs).run is not None:
            record = self.runs / recipe.key / store.MONITOR
            why = (
                ""
                if record.exists() or not self.monitored
                else f", without {record.name}: train it anew in another --runs"
            )
            print(f"{recipe.key}  already finished{why}")
        with ExitStack() as stack:
            listeners: list[Any] = []
            if first and self.tensorboard is not None:
                listeners.append(stack.enter_context(closing(sinks.TensorBoard(self.tensorboard, recipe))))
            if first and self.wandb is not None:
                listeners.append(stack.enter_context(closing(sinks.WandB(self.wandb, recipe))))
            if first:
                listeners.append(stack.enter_context(TrainingBar(Console())))
            try:
                run = train(
                    recipe,
                    root=self.runs,
                    data=self.data,
                    device=device,
                    compile=self.compile,
                    parallel=self.parallel,
                    checkpoint_every=self.checkpoint_every,
                    on_event=lambda event: [listen(event) for listen in listeners],
                    observe=make_monitor_observer(self.runs / recipe.key) if first and self.monitored else None,
                )
            except Interrupted as stop:
                if first:
                    print(f"mvngrad: {stop}", file=sys.stderr)
                return 128 + stop.signal_number
        if first:
            for name, value in run.result.items():
                if not isinstance(value, list):  # what happened at every step is in the folder
                    print(f"{name}: {value}")
            print(self.runs / run.key)
        return int(run.result["status"] != "finished")


def named(text: str, data: Path | None) -> str:
    """A text by its name; of a folder it is that of its tokens, which are made where they are missing."""
    from mvngrad_lab.tasks.language.data import prepare, text as texts, tokens

    folder = Path(text)
    if text in texts.TEXTS or (tokens.is_text_name(text) and not folder.is_dir()):
        return text  # who looks for its tokens says which there are
    if not text or not folder.is_dir():
        raise FileNotFoundError(f"--text {text!r} is not a folder, and no name that `mvngrad data prepare` prints")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"--text {text!r}: not by several processes at once; `mvngrad data prepare` it before")
    from mvngrad_lab.cli.data import progress

    with progress() as bar:
        name, _ = prepare.prepare_folder_tokens(folder, data, on_progress=bar("tokens"))
    return name


def commands(given: Sequence[str]) -> Any:
    """The recipes by name, each with the defaults that the optimizer among the arguments has in the paper."""
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--optimizer")
    first.add_argument("--batch-size", default="128")
    known, _ = first.parse_known_args([part.replace("_", "-") if part.startswith("--") else part for part in given])
    size = int(known.batch_size) if known.batch_size.isdecimal() else 128

    def settings(usual: str, make: Callable[[Any], R]) -> R:
        """What the paper selected for this cell. A name that no recipe has is left for the parser proper to refuse."""
        asked = known.optimizer or usual
        cell = asked.removesuffix("w")
        if ":" in asked:
            return replace(make(usual), optimizer=asked, beta1=None, beta2=None, eps=None, eps_s=None)
        if cell not in CELLS:
            return make(usual)
        return replace(make(cell + "w" * usual.endswith("w")), optimizer=asked)

    return Union[  # noqa: UP007 (made at run time)
        Annotated[
            Train[Cifar100],
            subcommand(
                "cifar100",
                default=Train(settings("mvngrad", lambda name: cifar100.paper(name, 128 if size < 362 else 1024))),
                description="ResNet-18 on CIFAR-100, Table 1.",
            ),
        ],
        Annotated[
            Train[WikiText103],
            subcommand(
                "wikitext103",
                default=Train(settings("mvngrad", language.wikitext103)),
                description="GPT-2 30M on WikiText-103 with coupled decay, Table 2.",
            ),
        ],
        Annotated[
            Train[OpenWebText],
            subcommand(
                "openwebtext",
                default=Train(settings("mvngradw", language.openwebtext)),
                description="GPT-2 124M on OpenWebText with decoupled decay, Table 2.",
            ),
        ],
    ]
