"""Training of a user's own task: seeds, resuming, evaluation, and what is refused."""

import signal
import sys
from dataclasses import replace
from functools import partial
from types import FunctionType

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from mvngrad_lab.cli.train import format_result
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.store import read_rows
from mvngrad_lab.sweep import Sweep
from mvngrad_lab.tasks.own import task
from mvngrad_lab.tasks.own.task import OwnTask, OwnTaskTraining, make_recipe
from mvngrad_lab.training.step import TrainingStep, clear_cache, get_training_step
from mvngrad_lab.training.task import build_initial_model, seed_evaluation
from mvngrad_lab.training.train import Interrupted, train


class Noisy(Dataset):
    """Samples that are drawn as they are read."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.full((3,), index / 40) + 0.1 * torch.randn(3)
        return {"x": x, "y": x.sum()}


def squared(model, batch):
    return (model(batch["x"]).squeeze(1) - batch["y"]).square().mean()


def noisy():
    settings = {"batch_size": 8, "epochs": 2, "optimizer": "adamw", "max_norm": 1.0}
    return OwnTask(
        model=lambda: torch.nn.Linear(3, 1), loss=squared, train=Noisy(), validation=Noisy(), settings=settings
    )


class Smoothed(torch.nn.Linear):
    """Training changes a buffer that is not in its state_dict."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("size", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.size.lerp_(x.detach().abs().mean(), 0.1)
        return super().forward(x) * self.size


def smoothed():
    return replace(noisy(), model=lambda: Smoothed(3, 1))


class Late(Smoothed):
    """The first forward pass registers one buffer and gives another its shape."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("late", None, persistent=False)

    def forward(self, x):
        if self.late is None:
            self.register_buffer("late", x.detach().abs().mean(0), persistent=False)
            self.size = self.size.expand(self.out_features).clone()
        return super().forward(x * self.late)


def late():
    return replace(noisy(), model=lambda: Late(3, 1))


class Partly(torch.nn.Linear):
    """A part of its weights is not in its state_dict."""

    def state_dict(self, *args, **kwargs):
        return {"bias": self.bias.detach()}


def partly():
    return replace(noisy(), model=lambda: Partly(3, 1))


@pytest.mark.parametrize("function", [noisy, smoothed, late, partly])
def test_numbers_that_a_dataset_draws_and_all_buffers_are_as_before_after_a_resume(tmp_path, function):
    recipe = make_recipe(function)
    whole = train(recipe, root=tmp_path / "whole", on_event=lambda event: None).result
    stop = iter([False, False, True])

    def interrupt(event):
        if next(stop, False):
            signal.raise_signal(signal.SIGTERM)

    clear_cache()  # as in a new process
    with pytest.raises(Interrupted):
        train(recipe, root=tmp_path / "parts", checkpoint_every=0, on_event=interrupt, observe=lambda *_: interrupt(0))
    clear_cache()
    parts = train(recipe, root=tmp_path / "parts", on_event=lambda event: None).result
    assert parts["weights"] == whole["weights"]
    assert parts["validation_loss"] == whole["validation_loss"]


class Annealed(torch.nn.Linear):
    """Training changes a number, and replaces a tensor, that no checkpoint has."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.temperature, self.average = 1.0, torch.zeros(())

    def forward(self, x):
        self.temperature, self.average = 0.9 * self.temperature, self.average + x.detach().mean()
        return super().forward(x) / self.temperature


def annealed():
    return replace(noisy(), model=lambda: Annealed(3, 1))


def test_attributes_that_training_changes_and_no_checkpoint_has_are_named(tmp_path, capsys):
    train(make_recipe(annealed), root=tmp_path, checkpoint_every=0)
    assert capsys.readouterr().out.count("training changes temperature, average of the model, which no checkpoint") == 1
    with pytest.raises(InvalidInput, match="has a tensor average, which is random or changes in training"):
        train(make_recipe(annealed, seed=1), root=tmp_path)


class Cooled(torch.nn.Linear):
    """Training changes a number, and an average that starts without a value."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.temperature, self.average = 1.0, None

    def forward(self, x):
        x = super().forward(x)
        self.temperature *= 0.99
        self.average = x.detach().mean() if self.average is None else self.average.lerp(x.detach().mean(), 0.1)
        return (x + self.average) / self.temperature


def cooled():
    return replace(noisy(), model=lambda: Cooled(3, 1))


def test_each_run_starts_with_the_numbers_of_a_new_model(tmp_path):
    weights = []
    for seeds in ((0, 1), (1,)):
        clear_cache()
        runs = [train(make_recipe(cooled, seed=seed), root=tmp_path / str(len(seeds))) for seed in seeds]
        weights.append(runs[-1].result["weights"])
    assert weights[0] == weights[1]


def test_a_second_run_of_a_model_whose_forward_pass_makes_a_buffer_is_refused(tmp_path):
    train(make_recipe(late), root=tmp_path)
    with pytest.raises(InvalidInput, match="buffer 'size' was made or resized by a forward pass"):
        train(make_recipe(late, seed=1), root=tmp_path)


def with_dropout():
    """In memory, so that a GPU captures its step."""
    x = torch.randn(40, 3)
    model = lambda: torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))  # noqa: E731
    loss = lambda model, x, y: squared(model, {"x": x, "y": y})  # noqa: E731
    return replace(noisy(), model=model, loss=loss, train=(x, x.sum(1)), validation=(x, x.sum(1)))


def stop_after(step):
    """An `on_step` that asks the training to stop once."""
    taken = iter(range(1, 99))
    return lambda: next(taken) == step and signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dropout_draws_the_same_numbers_in_every_run_of_a_seed(tmp_path, monkeypatch, device):
    """Also if other runs came before it in the process, and after a resume; of another seed, others."""

    def run(name, seed=0):
        recipe = make_recipe(with_dropout, seed=seed, lr=0.1)
        return train(recipe, root=tmp_path / name, device=device, on_event=lambda event: None).result["weights"]

    before, whole = torch.get_rng_state(), run("whole")
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert run("again") == whole
    step, ask = TrainingStep.step, stop_after(3)
    monkeypatch.setattr(TrainingStep, "step", lambda self, *samples: (step(self, *samples), ask()))
    with pytest.raises(Interrupted):
        run("parts")
    assert run("parts") == whole
    assert run("other", seed=1) != whole


def test_a_validation_set_that_draws_numbers_is_the_same_in_every_run_of_a_seed(tmp_path):
    def get_losses(name, **settings):
        recipe = make_recipe(noisy, lr=0.0, **settings)
        train(recipe, root=tmp_path / name, on_event=lambda event: None)
        return [row["validation_loss"] for row in read_rows(tmp_path / name / recipe.key / "metrics.jsonl")]

    before = torch.get_rng_state()
    first = get_losses("first", seed=1)
    assert torch.equal(torch.get_rng_state(), before), "the training's own draws are not disturbed"
    torch.rand(1)
    assert get_losses("second", seed=1) == first
    assert first[0] != first[1], "an epoch has draws of its own"


class WithOffset(torch.nn.Linear):
    """A random buffer that is not in its state_dict."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("offset", torch.randn(1), persistent=False)

    def forward(self, x):
        return super().forward(x) + self.offset


def with_offset():
    return replace(noisy(), model=lambda: WithOffset(3, 1))


def test_a_checkpoint_of_a_module_that_was_renamed_does_not_fit():
    recipe = make_recipe(with_offset)
    training_step = get_training_step(recipe, None, torch.device("cpu"), compiled=False, captured=False)
    saved = training_step.state_dict()
    renamed = {name.replace(".offset", ".old.offset").replace(".weight", ".old.weight"): saved[name] for name in saved}
    with pytest.raises(ValueError, match=r"model\.weight does not fit"):
        training_step.load_state_dict(renamed)


@pytest.mark.parametrize("seed", [0, 7])
def test_buffers_outside_the_state_dict_are_those_of_the_runs_seed(seed):
    recipe = replace(make_recipe(with_offset), seed=seed)
    training_step = get_training_step(recipe, None, torch.device("cpu"), compiled=False, captured=False)
    training_step.reset(seed)
    torch.manual_seed(seed)
    assert torch.equal(training_step.model.offset, WithOffset(3, 1).offset)


class Scaled(torch.nn.Linear):
    def forward(self, x, scale=1.0):
        return scale * super().forward(x)

    def penalty(self):
        return sum(param.square().sum() for param in self.parameters())


def penalized(model, batch):
    """Uses its model as code that was written for a module does."""
    return (model(batch["x"], scale=2.0).squeeze(1) - batch["y"]).square().mean() + 1e-3 * model.penalty()


def with_penalty():
    return replace(noisy(), model=lambda: Scaled(3, 1), loss=penalized)


def layer_by_layer(model, batch):
    """A loss that holds for the module itself alone, in evaluation too."""
    assert isinstance(model, torch.nn.Sequential)
    values = batch["x"]
    for layer in model:
        values = layer(values)
    return (model[-1](batch["x"]).squeeze(1) - batch["y"]).square().mean() + values.square().mean()


def with_layers():
    model = lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))  # noqa: E731
    return replace(noisy(), model=model, loss=layer_by_layer)


def with_script():
    return replace(noisy(), model=lambda: torch.jit.script(torch.nn.Linear(3, 1)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("function", [with_penalty, with_layers, with_script])
def test_a_loss_may_use_the_model_as_a_module(tmp_path, function):
    result = train(make_recipe(function), root=tmp_path, on_event=lambda event: None).result
    assert result["status"] == "finished"
    assert result["validation_loss"] > 0


def test_settings_of_a_task_are_defaults_and_unknown_ones_are_refused():
    assert make_recipe(noisy, "mvngrad").eps_s == 1e-16
    assert make_recipe(noisy, "torch:SGD", lr=0.1).beta1 is None
    with pytest.raises(InvalidInput, match="epoch is no setting"):
        make_recipe(noisy, epoch=3)


def make_function(function, name):
    """A copy of a function, named as if it were at the top level of this module."""
    copy = FunctionType(function.__code__, globals(), name, None, function.__closure__)
    copy.__qualname__ = name
    return copy


def make_task(width):
    def task():
        return replace(noisy(), model=lambda: torch.nn.Linear(width, 1))

    return task


@pytest.mark.parametrize("function", [make_task(3), partial(noisy), lambda: noisy()])
def test_functions_without_a_name_of_their_own_are_refused(function):
    with pytest.raises(InvalidInput, match="is not a function at the top level of a module"):
        make_recipe(function)


def test_the_function_of_a_module_that_was_loaded_again_is_trained(monkeypatch):
    make_recipe(noisy)
    again = make_function(noisy, "noisy")
    monkeypatch.setattr(sys.modules[__name__], "noisy", again)
    make_recipe(again)
    assert task._functions[f"{__name__}:noisy"].__wrapped__ is again


@pytest.mark.parametrize("warmup", [2, 3])
def test_a_warm_up_that_never_ends_is_refused(warmup):
    assert make_recipe(noisy, epochs=2, warmup_epochs=1).warmup_epochs == 1
    with pytest.raises(InvalidInput, match=f"warmup_epochs={warmup} does not fit epochs=2"):
        make_recipe(noisy, epochs=2, warmup_epochs=warmup)


def undefined(model, batch):
    return float("nan")


def without_a_metric():
    return replace(noisy(), metrics={"accuracy": undefined})


def test_a_metric_that_is_not_finite_is_named(tmp_path, toy):
    recipe = make_recipe(without_a_metric)
    run = train(recipe, root=tmp_path / "runs", on_event=lambda event: None)
    assert (run.result["status"], run.result["nonfinite_metrics"]) == ("diverged", ["validation_accuracy"])
    assert format_result(run) == f"{recipe.key}  diverged at step 10 of 10, validation_accuracy not finite"
    toy.init(Sweep(stages=([recipe],), metric="validation_loss", higher=False))
    toy.work()
    (record,) = toy.queue.records()
    assert record.outcome["reason"] == "diverged at step 10, validation_accuracy not finite"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"train": (torch.ones(4, 3), torch.ones(5))}, r"the tensors of train have \[4, 5\] samples"),
        ({"train": (np.ones((9, 3)), np.ones(9))}, "train has an array that is no tensor; convert each with torch"),
        ({"train": [1.0]}, "batch_size=8 is more than the 1 training samples"),
        ({"train": {"x": torch.zeros(8, 3)}}, "train is a dict; it must be a tuple of tensors, or a Dataset"),
        ({"validation": iter([])}, "validation is a list_iterator; it must be a tuple of tensors, or a Dataset"),
        ({"model": lambda: 3}, r"model\(\) of '.*broken' returned a int; it must return a torch.nn.Module"),
        ({"model": torch.nn.ReLU}, r"model\(\) of '.*broken' returned a ReLU without parameters"),
        ({"loss": lambda model, batch: 0.5}, r"loss\(\) of '.*broken' returned a float; it must return the mean loss"),
        (
            {"loss": lambda model, batch: model(batch["x"])},
            r"loss\(\) of '.*broken' returned a tensor of shape \(8, 1\); it must return the mean loss of the batch",
        ),
        (
            {"loss": lambda model, batch: model(batch["x"]).detach().mean()},
            r"loss\(\) of '.*broken' does not depend on a parameter that requires a gradient",
        ),
        (
            {"metrics": {"error": lambda model, batch: model(batch["x"])}},
            r"metrics\['error'\] of '.*broken' returned a tensor of shape \(8, 1\); it must return one number",
        ),
        ({"metrics": {"error": lambda model, batch: None}}, r"metrics\['error'\] of '.*broken' returned a NoneType"),
    ],
)
def test_unsuitable_parts_of_a_task_are_named(monkeypatch, tmp_path, change, problem):
    monkeypatch.setattr("mvngrad_lab.tasks.own.task._functions", {})
    unsuitable = replace(noisy(), **change)
    broken = make_function(lambda: unsuitable, "broken")
    monkeypatch.setattr(sys.modules[__name__], "broken", broken, raising=False)
    with pytest.raises(InvalidInput, match=problem):
        train(make_recipe(broken), root=tmp_path)


def test_a_metric_cannot_take_the_place_of_the_loss():
    with pytest.raises(InvalidInput, match="metrics has 'loss'"):
        replace(noisy(), metrics={"loss": squared})


def test_seeding_is_undone_on_gpus_too(monkeypatch):
    """torch.manual_seed seeds GPUs as well; without one, those of this test are made up."""
    states, seeds = {0: torch.tensor(5), 1: torch.tensor(6)}, []

    def seed_all(seed):
        states.update(dict.fromkeys(states, torch.tensor(seed)))
        seeds.append(seed)

    fakes = {
        "is_initialized": lambda: True,
        "device_count": lambda: len(states),
        "get_rng_state": lambda gpu: states[gpu],
        "set_rng_state": lambda state, gpu: states.update({gpu: state}),
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": seed_all,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    task = OwnTaskTraining(make_recipe(noisy), None, torch.device("cpu"))
    task.make_batch({"order": torch.arange(2), "seed": torch.tensor(3)})
    build_initial_model(task, seed=4)
    with seed_evaluation(1, 0):
        torch.rand(1)
    assert {0, 3, 4} < {*seeds}
    assert {gpu: state.item() for gpu, state in states.items()} == {0: 5, 1: 6}
