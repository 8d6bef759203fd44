"""What an optimizer adds to a step of a language model: time, memory and state, compared with torch's fused AdamW."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn

from benchmarks.timing import synchronize
from benchmarks.traffic import state_bytes
from mvngrad_lab.recipe import DECOUPLED, StateDtype
from mvngrad_lab.tasks.language.recipe import Language, openwebtext
from mvngrad_lab.training.step import DeviceTask, TrainingStep

TORCH, MVNGRAD = "torch AdamW fused", "MVNGradW float32"
PAPER = {"adamw": 46.2, "mvngradw": 46.8, "lapropw": 47.4, "adabeliefw": 48.2}
"""Thousands of seconds of a run on OpenWebText; the paper does not name the hardware."""
OVERHEAD = """\
All rows step one model, with forward and backward compiled once and shared by all, not captured. *Optimizer* is the
time on the device from the start to the end of `optimizer.step`, in a step of two micro-batches, so that the queue is
as full as in training; medians over rounds in which the rows alternate. *Step* adds the rest of a step, which is the
same for all: {shared:.4f} s, the median over {count} whole steps. *Of torch* is its ratio to the first row; *paper* is
the paper's time of a whole run relative to AdamW. *State* is in bytes per parameter, *of model* is the size of
parameters, gradients and state relative to the parameters. *Peak* is the most memory that tensors held during a step of
two micro-batches (more micro-batches hold no more): parameters, gradients, state and activations."""


def make_groups(model: nn.Module, recipe: Language) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay."""
    params = list(model.parameters())
    return [
        {
            "params": [p for p in params if recipe.has_weight_decay(p.dim()) == decays],
            "weight_decay": decays * recipe.weight_decay,
        }
        for decays in (True, False)
    ]


def make_fused_adamw(model: nn.Module, recipe: Language) -> torch.optim.Optimizer:
    return torch.optim.AdamW(make_groups(model, recipe), lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), fused=True)


class TimedSteps:
    """Steps of a recipe on a shared model, with the time of the whole step and of the optimizer."""

    def __init__(self, recipe: Language, compiled_task: DeviceTask, torch_adamw: bool = False) -> None:
        self.training_step, self.device = TrainingStep(recipe, compiled_task, captured=False), compiled_task.task.device
        self.marks: list[Any] = []
        if torch_adamw:
            self.training_step.optimizer = make_fused_adamw(compiled_task.model, recipe)
            self.training_step.optimizer.register_step_pre_hook(_drop_found_inf)
        self.optimizer = self.training_step.optimizer
        self.optimizer.register_step_pre_hook(self._mark)
        self.optimizer.register_step_post_hook(self._mark)
        plan = compiled_task.task.plan_epoch(recipe, 0)
        self.training_step.set_plan({**plan, "lr": torch.full((len(plan["tokens"]),), recipe.lr)}, at=0)
        for _ in range(2):  # compile kernels, create state and tables
            self.step()

    def step(self) -> tuple[float, float]:
        """Step and return the seconds of the whole step and of the optimizer."""
        self.marks.clear()
        self._mark()
        self.training_step.step_index.zero_()
        self.training_step.step()
        self._mark()
        synchronize(self.device)
        start, before, after, end = self.marks
        return self._between(start, end), self._between(before, after)

    def peak_bytes(self) -> int | None:
        """The most bytes that tensors hold in a step; None without a GPU."""
        if self.device.type != "cuda":
            return None
        gc.collect()  # frees an optimizer that was replaced
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return torch.cuda.max_memory_allocated()

    def _mark(self, *_: Any) -> None:
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    @staticmethod
    def _between(start: Any, end: Any) -> float:
        return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def _drop_found_inf(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Our loop makes an optimizer skip steps that are not finite. Plain loops do not, and it costs launches."""
    vars(optimizer).pop("found_inf", None)


def other_bytes(compiled_task: DeviceTask) -> int:
    """Bytes of all tensors between steps except the model and its gradients."""
    compiled_task.model.zero_grad()
    gc.collect()
    allocated = torch.cuda.memory_allocated() if compiled_task.task.device.type == "cuda" else 0
    return allocated - sum(p.nbytes for p in compiled_task.model.parameters())


def optimizers(recipe: Language) -> Iterator[tuple[str, Language]]:
    """All cells with decoupled decay and every state dtype, with the paper's settings, and torch's AdamW."""
    sizes = {name: getattr(recipe, name) for name in ("model", "batch_size", "micro_batch_size", "steps")}
    sizes |= {name: getattr(recipe, name) for name in ("warmup_steps", "epoch_steps")}
    yield TORCH, replace(openwebtext("adamw"), **sizes)
    titles = {"adamw": "AdamW", "lapropw": "LaPropW", "adabeliefw": "AdaBeliefW", "mvngradw": "MVNGradW"}
    for cell in DECOUPLED:
        for state in get_args(StateDtype):
            yield f"{titles[cell]} {state}", replace(openwebtext(cell), **sizes, state_dtype=state)


def time_whole_steps(recipe: Language, compiled_task: DeviceTask, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Times of whole steps and of their optimizer, alternating MVN-GradW and torch's AdamW."""
    both = {
        name: TimedSteps(each, compiled_task, name == TORCH)
        for name, each in optimizers(recipe)
        if name in (TORCH, MVNGRAD)
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
    for _ in range(rounds):
        for name, timed in both.items():
            times[name].append(timed.step())
    return times


def measure_overhead(
    recipe: Language, compiled_task: DeviceTask, args: argparse.Namespace, notes: list[str], end: float
) -> Iterator[dict[str, Any]]:
    """Measure what optimizers add to a step: first MVN-GradW and torch's AdamW by whole steps, then all of them."""
    times = time_whole_steps(
        recipe, compiled_task, 3 * args.rounds
    )  # the steps of one optimizer vary more than the two differ
    shared = [step - own for both in times.values() for step, own in both]
    ratios = [ours[0] / torchs[0] for ours, torchs in zip(times[MVNGRAD], times[TORCH], strict=True)]
    result: dict[str, Any] = {
        "shared_seconds": statistics.median(shared),
        "whole_steps": len(shared),
        "whole": {name: statistics.median(step for step, _ in both) for name, both in times.items()},
        "whole_ratio": statistics.median(ratios),
        "whole_ratio_range": [min(ratios), max(ratios)],
        "rows": [],
    }
    yield result
    running: dict[str, TimedSteps] = {}
    for name, each in optimizers(replace(recipe, batch_size=2 * recipe.micro_batch_size)):
        if time.perf_counter() >= end:
            notes.append(f"{recipe.model}, {name}: no time left of --within {args.within:g}")
            continue
        before = other_bytes(compiled_task)
        running[name] = timed = TimedSteps(each, compiled_task, name == TORCH)
        size, peak = sum(p.numel() for p in compiled_task.model.parameters()), timed.peak_bytes()
        row = {"name": name, "state_bytes": state_bytes(timed.optimizer) / size}
        row["peak_bytes"] = None if peak is None else peak - before
        as_paper = name != TORCH and each.state_dtype == "float32"
        row["paper"] = PAPER[each.optimizer] / PAPER["adamw"] if as_paper else None
        result["rows"].append(row)
    own: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(5 * args.rounds):
        if time.perf_counter() >= end and all(own.values()):
            break
        for name, timed in running.items():
            own[name].append(timed.step()[1])
    for row in result["rows"]:
        row["optimizer_seconds"] = statistics.median(own[row["name"]])
        row["step_seconds"] = result["shared_seconds"] + row["optimizer_seconds"]
        row["ratio"] = row["step_seconds"] / result["rows"][0]["step_seconds"]
        row["rounds"] = len(own[row["name"]])
    yield result
