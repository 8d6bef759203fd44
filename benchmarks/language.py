"""Language models on one device: our loop compared with plain torch loops, and what each optimizer adds to a step.

    python -m benchmarks.language [--models 30M 124M] [--seconds 8] [--rounds 3] [--within 200] [--data FOLDER]

First tokens per second, then, on the model with decoupled decay, time and memory of every optimizer and state dtype.
Rewrites language-DEVICE.json and .md after each part, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.overhead import OVERHEAD, make_fused_adamw, measure_overhead
from benchmarks.report import RESULTS, get_environment, markdown_table, write
from benchmarks.rounds import Arm, reset_peak_memory, run_rounds
from benchmarks.targets import verdict
from benchmarks.timing import synchronize
from benchmarks.train import CapturedLoop
from mvngrad_lab.recipe import DECOUPLED
from mvngrad_lab.tasks.language.data import tokens
from mvngrad_lab.tasks.language.model import VOCABULARY
from mvngrad_lab.tasks.language.recipe import STAND_IN, Language, openwebtext, wikitext103
from mvngrad_lab.tasks.language.task import SHAPES, LanguageTask
from mvngrad_lab.training.step import DeviceTask
from mvngrad_lab.training.task import EpochPlan, Task, build_initial_model
from mvngrad_lab.training.train import configure_kernels

RECIPES = {  # epochs short enough that every round contains a whole one
    "30M": replace(wikitext103("mvngrad"), epoch_steps=50),
    "124M": replace(openwebtext("mvngradw"), micro_batch_size=160, epoch_steps=3),
    "tiny": replace(
        openwebtext("mvngradw"), model="tiny", batch_size=4, micro_batch_size=2, steps=20, warmup_steps=2, epoch_steps=2
    ),
}
OURS, PLAIN_COMPILED, PLAIN = "ours", "plain, compiled", "plain"
TARGETS = {"30M": 1.9e6, "124M": 0.57e6}
"""Tokens per second of our loop on one H200."""
RATIO = 1.00
"""The longest step with MVN-GradW relative to one with torch's fused AdamW, on the same machine."""
FOR_OVERHEAD = 60.0
"""Seconds that the throughput part leaves for the next part, which compiles a kernel for each optimizer and dtype."""
INTRODUCTION = """\
Measured by `python -m benchmarks.language`. *Ours* is the loop of `mvngrad_lab.training.train` with MVN-Grad: on a GPU
it is compiled, and a whole step, with micro-batches and clipping, is one CUDA graph. *Plain* is the loop most people
write: the same network and loss, bfloat16 autocast, clip_grad_norm_ and torch's fused AdamW, step by step in Python;
*compiled* adds torch.compile, with the same compiled code as ours. Tokens per second are medians over rounds, with the
slowest and fastest; *of plain* is the ratio to the compiled plain loop if there is one. *Projected* is a whole run of
the recipe at that rate, without evaluations. *Set-up* happens once: compilation, capture and an epoch or step; the
plain loop reuses what was compiled for ours. *Memory* is the most that an arm made torch reserve on the device."""


class RandomText(LanguageTask):
    """Uniform random tokens, drawn once: nothing to download. In real text, frequent tokens share embedding rows."""

    source = f"tokens drawn evenly of {VOCABULARY:,}"

    def __init__(self, recipe: Language, device: torch.device) -> None:
        self.device, self.steps_per_epoch, self.shape = device, recipe.epoch_steps, SHAPES[recipe.model]
        size = (recipe.epoch_steps, recipe.batch_size, self.shape.context + 1)
        self.drawn = torch.randint(VOCABULARY, size, generator=torch.Generator().manual_seed(0)).to(torch.int16)

    def plan_epoch(self, recipe: Language, epoch: int) -> EpochPlan:
        return {"tokens": self.drawn[:, : recipe.batch_size].contiguous()}


class PlainLanguageLoop:
    """The same recipe in the loop most people write."""

    def __init__(self, recipe: Language, task: Task, loss: Callable[..., Tensor]) -> None:
        self.recipe, self.device, self.loss, self.steps = recipe, task.device, loss, 0
        self.model = build_initial_model(task, recipe.seed).to(task.device)
        self.optimizer = make_fused_adamw(self.model, recipe)
        self.windows = task.plan_epoch(recipe, 0)["tokens"]
        self.step()
        synchronize(self.device)

    def step(self) -> None:
        recipe, windows = self.recipe, tokens.token_ids(self.windows[self.steps % len(self.windows)])
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate(self.steps % recipe.steps, recipe.epoch_steps)
        self.optimizer.zero_grad()
        for part in windows.split(recipe.micro_batch_size):
            tokens_here = (part.pin_memory() if self.device.type == "cuda" else part).to(self.device, non_blocking=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
                loss = self.loss(self.model, (tokens_here[:, :-1], tokens_here[:, 1:]))
            (loss * (len(part) / len(windows))).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        self.steps += 1

    def train(self, seconds: float) -> float:
        """Train for about `seconds` and return the windows per second."""
        synchronize(self.device)
        start, before = time.perf_counter(), self.steps
        while time.perf_counter() - start < seconds or self.steps == before:
            self.step()
        synchronize(self.device)
        return (self.steps - before) * self.recipe.batch_size / (time.perf_counter() - start)


def measure_throughput(
    recipe: Language, task: Task, args: argparse.Namespace, notes: list[str], end: float
) -> tuple[list[dict[str, Any]], DeviceTask | None]:
    """A table row for each loop, and the task that our loop compiled. No loop starts after `end`."""
    on_gpu, context = task.device.type == "cuda", task.shape.context
    compiled_tasks: list[DeviceTask] = []

    def ours() -> Arm:
        loop = CapturedLoop(recipe, task, compiled=on_gpu)
        compiled_tasks.append(loop.training_step.device_task)
        return loop

    def compiled() -> Arm:
        if not compiled_tasks:
            raise RuntimeError("needs what our loop has compiled")
        return PlainLanguageLoop(recipe, task, lambda *arguments: compiled_tasks[0].loss_and_correct(*arguments)[0])

    makers: dict[str, Callable[[], Arm]] = {OURS: ours}
    if on_gpu:
        makers[PLAIN_COMPILED] = compiled
    if recipe.model != "124M":
        makers[PLAIN] = partial(PlainLanguageLoop, recipe, task, task.loss)
    running = run_rounds(makers, task.device, f"{recipe.model}, {{}}", args, notes, end)
    medians = {name: context * statistics.median(each.rates) for name, each in running.items()}
    reference = next((name for name in (PLAIN_COMPILED, PLAIN) if name in medians), None)
    for name, each in running.items():
        each.row["tokens_per_second"] = medians[name]
        each.row["tokens_per_second_range"] = [context * min(each.rates), context * max(each.rates)]
        each.row["projected_seconds"] = recipe.steps * recipe.batch_size * context / medians[name]
        if reference:
            each.row["ratio"] = medians[name] / medians[reference]
    return [each.row for each in running.values()], compiled_tasks[0] if compiled_tasks else None


def judge_targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets and their verdicts, on the machine they were set for."""
    if "H200" not in result["environment"]["device"]:
        return []
    targets = []
    for model, least in TARGETS.items():
        rows = result["throughput"].get(model, [])
        rate = next((row["tokens_per_second"] for row in rows if row["name"] == OURS), None)
        targets.append({"what": f"{model}: tokens a second of our loop", "target": f"at least {least:,.0f}"})
        targets[-1] |= {"measured": "" if rate is None else f"{rate:,.0f}", "verdict": verdict(rate, least, True)}
    ratio = result["overhead"].get("124M", {}).get("whole_ratio")
    what = "124M: a whole step with MVN-GradW over one with torch's fused AdamW"
    targets.append({"what": what, "target": f"at most {RATIO:.2f}"})
    targets[-1] |= {"measured": "" if ratio is None else f"{ratio:.4f}", "verdict": verdict(ratio, RATIO, False)}
    return targets


def markdown(result: dict[str, Any]) -> str:
    where = result["environment"]
    text = [f"# Language-model training on {where['device']}", INTRODUCTION]
    text += [", ".join(f"{key} {value}" for key, value in where.items()), f"Data: {result['data']}."]
    if result["targets"]:
        head = ["what", "target", "measured", "verdict"]
        text += ["## Targets", markdown_table(head, [[each[key] for key in head] for each in result["targets"]])]
    for model, rows in result["throughput"].items():
        recipe, body = RECIPES[model], []
        for row in rows:
            low, high = row["tokens_per_second_range"]
            rate = f"{row['tokens_per_second']:,.0f} ({low:,.0f}-{high:,.0f})"
            body.append([row["name"], rate, f"{row['ratio']:.2f}" if "ratio" in row else ""])
            body[-1] += [f"{row['projected_seconds'] / 3600:.2f}", f"{row['setup_seconds']:.0f}"]
            body[-1].append(f"{row['memory_bytes'] / 2**30:.1f}")
        size = f"{recipe.batch_size} x {SHAPES[model].context:,} tokens per step in parts of {recipe.micro_batch_size}"
        head = ["loop", "tokens/s", "of plain", f"projected, h of {recipe.steps:,} steps", "set-up, s", "memory, GiB"]
        text += [f"## Throughput, {model}, {size}", markdown_table(head, body)]
    for model, each in result["overhead"].items():
        text.append(f"## Memory and time of an optimizer, {model}, {RECIPES[model].batch_size} windows per step")
        text.append(OVERHEAD.format(shared=each["shared_seconds"], count=each["whole_steps"]))
        head = ["optimizer, state", "optimizer, ms", "step, s", "of torch", "paper", "state", "of model", "peak, GiB"]
        body = []
        for row in each["rows"]:
            body.append([row["name"], f"{1e3 * row['optimizer_seconds']:.3f}", f"{row['step_seconds']:.4f}"])
            body[-1] += [f"{row['ratio']:.4f}", f"{row['paper']:.3f}" if row["paper"] else ""]
            body[-1] += [f"{row['state_bytes']:.2f}", f"{2 + row['state_bytes'] / 4:.2f}"]
            body[-1].append(f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "")
        text += [markdown_table(head, body)] if body else []
        whole = ", ".join(f"{name} {seconds:.4f} s" for name, seconds in each["whole"].items())
        ratio = "{:.4f} ({:.4f}-{:.4f})".format(each["whole_ratio"], *each["whole_ratio_range"])
        text.append(f"Whole steps side by side, in turns: {whole}; median ratio of two in turn {ratio}.")
    if result["notes"]:
        text += ["## Not measured", "\n".join(f"- {note}" for note in result["notes"])]
    return "\n\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help=f"folder with the tokens of {STAND_IN}; random tokens if omitted")
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=["30M", "124M"])
    parser.add_argument("--seconds", type=float, default=8.0, help="training time of each loop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--within", type=float, default=math.inf, help="seconds for everything; what has started is finished"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(arguments)

    end, device = time.perf_counter() + args.within, torch.device(args.device)
    notes: list[str] = []
    result: dict[str, Any] = {"environment": get_environment(args.device), "data": "", "targets": [], "notes": notes}
    result |= {"throughput": {}, "overhead": {}}

    def save() -> None:
        result["targets"] = judge_targets(result)
        write(result, args.out / f"language-{args.device}", markdown(result))

    for model in args.models:
        recipe = RECIPES[model]
        stand_in = replace(recipe, text=STAND_IN)
        task = LanguageTask(stand_in, args.data, device) if args.data else RandomText(recipe, device)
        result["data"] = task.source
        last = end - FOR_OVERHEAD * any(RECIPES[each].optimizer in DECOUPLED for each in args.models)
        result["throughput"][model], compiled_task = measure_throughput(recipe, task, args, notes, last)
        save()
        if compiled_task is None or recipe.optimizer not in DECOUPLED:
            continue
        if time.perf_counter() >= end:
            notes.append(f"{model}, memory and time of optimizers: no time left of --within {args.within:g}")
            continue
        reset_peak_memory(device)  # frees what the loops had
        with configure_kernels(recipe, device):
            for result["overhead"][model] in measure_overhead(recipe, compiled_task, args, notes, end):
                save()
    save()
    print(markdown(result))


if __name__ == "__main__":
    main()
