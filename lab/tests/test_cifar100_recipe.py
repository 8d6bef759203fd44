"""The CIFAR-100 recipe: the paper's settings, and a task that does what the recipe says."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from tiny import killed_after
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks import train as benchmark
from mvngrad_lab.experiments.cifar100 import gap as cifar_gap
from mvngrad_lab.tasks.cifar100 import augment, task as cifar100
from mvngrad_lab.tasks.cifar100.recipe import Cifar100, paper
from mvngrad_lab.training import step
from mvngrad_lab.training.events import EpochEnd
from mvngrad_lab.training.task import build_initial_model
from mvngrad_lab.training.train import train

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before any test's first product on a GPU
CPU = torch.device("cpu")
SMALL = {"epochs": 2, "warmup_epochs": 1, "eval_every": 1, "precision": "float32"}


@pytest.fixture(autouse=True)
def _small_data(monkeypatch):
    """200 images whose class shows in their brightness, and a network that sees it."""

    def load(folder):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(250) % 4
        noise = torch.randint(0, 30, (250, 3, 32, 32), generator=generator)
        images = (noise + 60 * labels[:, None, None, None]).to(torch.uint8)
        return cifar100.data.Cifar100(images[:200], labels[:200], images[200:], labels[200:], source="brightness")

    def network(classes):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, classes),
        )  # fmt: skip

    monkeypatch.setattr(cifar100.data, "load", load)
    monkeypatch.setattr(cifar100, "resnet18", network)
    cifar100._load.cache_clear()
    yield
    cifar100._load.cache_clear()


def small(batch_size=32, **settings):
    return dataclasses.replace(paper("mvngrad", 1024), batch_size=batch_size, **{**SMALL, **settings})


# The recipe


def test_settings_are_the_papers():
    """As in tab:hparams-cifar-bs128 and tab:hparams-cifar-bs1024."""
    table = """
        laprop 128 5e-4 0.7 0.999 -
        adabelief 128 1e-3 0.9 0.99 1e-8
        adam 128 5e-4 0.8 0.999 -
        mvngrad 128 1e-3 0.95 0.99 1e-8
        adabelief 1024 4e-3 0.7 0.99 1e-8
        adam 1024 1e-3 0.8 0.999 -
        laprop 1024 1e-3 0.95 0.999 -
        mvngrad 1024 4e-3 0.7 0.99 1e-8
    """
    keys = set()
    for line in table.strip().splitlines():
        optimizer, batch_size, *numbers = line.split()
        recipe = paper(optimizer, int(batch_size), seed=2)
        assert [recipe.lr, recipe.beta1, recipe.beta2, recipe.eps_s] == [
            None if number == "-" else float(number) for number in numbers
        ]
        assert (recipe.epochs, recipe.eps, recipe.weight_decay, recipe.seed) == (200, 1e-8, 5e-4, 2)
        keys.add(recipe.key)
    assert len(keys) == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(paper, "adamw", 128), "the paper selected nothing for optimizer='adamw', batch_size=128"),
        (partial(small, eps_s=None), "eps_s=None does not go with optimizer='mvngrad'"),
        (
            partial(small, optimizer="adam"),
            "eps_s=1e-08 does not go with optimizer='adam'; it belongs to adabelief, mvngrad",
        ),
        (partial(small, optimizer="adabelief", beta_mean=0.9), "beta_mean=0.9 does not go with.*belongs to mvngrad"),
        (partial(small, beta_mean=1.0), "beta_mean=1.0 is invalid"),
        (partial(small, optimizer="adabelief", lean=True), "lean=True does not go with.*mvngrad: leave it False"),
        (partial(small, lean=True, beta_mean=0.9), "beta_mean=0.9 does not go with lean"),
        (partial(small, optimizer="sgd"), "optimizer='sgd' is invalid; choose from mvngrad"),
        (partial(small, optimizer="mvngrad,lean=True"), "options of ours are settings of their own, as --lean"),
        (partial(small, warmup_epochs=2), "warmup_epochs=2 does not fit epochs=2"),
        (partial(small, precision="float16"), "precision='float16' is invalid; choose from bf16, float32"),
        (partial(small, batch_size=0), "batch_size=0 is invalid"),
    ],
)
def test_invalid_recipe_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_learning_rate_warms_up_and_falls_to_zero():
    recipe = paper("adam", 128)
    rates = [recipe.learning_rate(at, 390) for at in range(200 * 390)]
    assert rates.index(max(rates)) == 5 * 390 - 1
    assert max(rates) == recipe.lr
    assert rates == sorted(rates[: 5 * 390]) + sorted(rates[5 * 390 :], reverse=True)
    assert 0 < rates[-1] < 1e-6 * recipe.lr


def loaded_by(statement, names):
    code = f"import sys; {statement}; print([name for name in {names!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("task", ["cifar100", "language"])
def test_recipe_needs_no_torch_and_training_no_other_package(task):
    assert loaded_by(f"import mvngrad_lab.tasks.{task}.recipe", ["torch", "numpy"]) == "[]"
    others = ["tyro", "rich", "optuna", "matplotlib", "jinja2", "requests", "tiktoken", "torchvision"]
    assert loaded_by(f"import mvngrad_lab.training.train, mvngrad_lab.tasks.{task}.task", others) == "[]"


# The task


def test_plan_has_every_image_once_and_depends_on_seed_and_epoch_alone():
    recipe = small(drop_last=False)
    task = cifar100.Cifar100Task(recipe, None, CPU)
    assert (task.steps_per_epoch, task.last_batch_size) == (7, 8)
    plan = task.plan_epoch(recipe, 3)
    assert sorted(plan["order"].flatten()[:200].tolist()) == list(range(200))
    assert plan["uniforms"].shape == (7, 32, augment.UNIFORMS)
    assert ((plan["lam"] >= 0) & (plan["lam"] <= 1)).all()
    torch.rand(7)
    again = cifar100.Cifar100Task(recipe, None, CPU).plan_epoch(recipe, 3)
    assert all(torch.equal(plan[name], again[name]) for name in plan)
    for other in (task.plan_epoch(recipe, 4), task.plan_epoch(dataclasses.replace(recipe, seed=1), 3)):
        assert not any(torch.equal(plan[name], other[name]) for name in plan)


def test_lam_has_the_beta_distribution():
    """Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1))."""
    recipe = small(batch_size=1, mixup=0.2)
    task = cifar100.Cifar100Task(recipe, None, CPU)
    drawn = torch.cat([task.plan_epoch(recipe, epoch)["lam"] for epoch in range(20)])
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.02)
    assert drawn.var().item() == pytest.approx(1 / 5.6, abs=0.01)
    assert (task.plan_epoch(dataclasses.replace(recipe, mixup=0.0), 0)["lam"] == 1).all()


def test_last_partial_batch_is_dropped_or_used():
    dropped = cifar100.Cifar100Task(small(), None, CPU)
    assert (dropped.steps_per_epoch, dropped.last_batch_size) == (6, 0)
    assert len(set(dropped.plan_epoch(small(), 0)["order"].flatten().tolist())) == 192
    with pytest.raises(ValueError, match=r"batch_size=256 is more than the 200 training images"):
        cifar100.Cifar100Task(small(batch_size=256), None, CPU)
    assert cifar100.Cifar100Task(small(batch_size=256, drop_last=False), None, CPU).last_batch_size == 200


def test_train_limit_takes_the_same_shuffled_images_for_every_seed():
    first, second = (cifar100.Cifar100Task(small(train_limit=40, seed=seed), None, CPU) for seed in (0, 1))
    assert len(first.train_labels) == 40
    assert torch.equal(first.train_images, second.train_images)
    assert not torch.equal(first.train_labels, torch.arange(40) % 4)
    assert len(first.test_labels) == 50


def test_batch_is_augmented_normalized_and_mixed():
    plain = small(crop=0, flip=False, randaugment_operations=0, mixup=0.0)
    task = cifar100.Cifar100Task(plain, None, CPU)
    row = {name: value[0] for name, value in task.plan_epoch(plain, 0).items()}
    images, targets = task.make_batch(row)
    assert torch.equal(images, augment.normalize(task.train_images[row["order"]]))
    assert torch.equal(targets.argmax(1), task.train_labels[row["order"]])
    assert targets.shape == (32, 100)
    for changed in ({"crop": 4}, {"flip": True}, {"randaugment_operations": 2}):
        other, _ = cifar100.Cifar100Task(dataclasses.replace(plain, **changed), None, CPU).make_batch(row)
        assert not torch.equal(other, images), changed
    mixed, shares = task.make_batch({**row, "lam": torch.tensor(0.25)})
    assert not torch.equal(mixed, images)
    assert shares.sum(1).tolist() == pytest.approx([1.0] * 32)


def test_labels_are_smoothed():
    model, batch = nn.Flatten(), (torch.tensor([[[2.0, 0.0]]]), torch.tensor([[1.0, 0.0]]))
    sharp, smooth = (
        cifar100.Cifar100Task(small(label_smoothing=by), None, CPU).loss(model, batch) for by in (0.0, 0.1)
    )
    assert (smooth - sharp).item() == pytest.approx(0.05 * 2)


def test_mixed_accuracy_weighs_both_labels_by_their_share():
    """Four images mixed of classes a and b with lam = 0.75: predicted as a, as b, as neither, and a = b."""
    scores = torch.eye(3)[[0, 1, 2, 0]]
    targets = torch.tensor([[0.75, 0.25, 0.0], [0.75, 0.25, 0.0], [0.75, 0.25, 0.0], [1.0, 0.0, 0.0]])
    task = cifar100.Cifar100Task(small(), None, CPU)
    loss, correct = task.loss_and_correct(nn.Identity(), (scores, targets))
    assert correct.item() == 0.75 + 0.25 + 0 + 1
    assert torch.equal(loss, task.loss(nn.Identity(), (scores, targets)))


@pytest.mark.parametrize("drop_last", [True, False])
def test_mixed_accuracy_is_that_of_the_last_epochs_batches(tmp_path, monkeypatch, drop_last):
    """Recomputed from the plan, in an epoch at rate 0, which leaves the weights as they are."""
    monkeypatch.setattr(cifar100, "CLASSES", 4)
    recipe = small(epochs=1, warmup_epochs=0, lr=0.0, drop_last=drop_last)
    result = train(recipe, root=tmp_path).result
    task = cifar100.Cifar100Task(recipe, None, CPU)
    model, plan = build_initial_model(task, recipe.seed).train(), task.plan_epoch(recipe, 0)
    correct = samples = 0
    for at in range(task.steps_per_epoch):
        row = {name: value[at] for name, value in plan.items()}
        if task.last_batch_size and at + 1 == task.steps_per_epoch:
            row = {name: value[: task.last_batch_size] if value.dim() else value for name, value in row.items()}
        images, targets = task.make_batch(row)
        predicted = model(images).argmax(1)
        correct += sum(target[at].item() for target, at in zip(targets, predicted, strict=True))
        samples += len(images)
    assert samples == (192 if drop_last else 200)
    assert correct > 10
    assert result["train_accuracy_mixed"] == pytest.approx(100 * correct / samples, rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_counting_correct_samples_does_not_change_the_run(tmp_path, monkeypatch, device):
    monkeypatch.setattr(cifar100, "CLASSES", 4)
    recipe = small(deterministic=True, precision="bf16")
    counted = train(recipe, root=tmp_path / "counted", device=device).result
    step.clear_cache()

    def loss_alone(self, model, batch):
        images, targets = batch
        return cross_entropy(model(images), targets, label_smoothing=self.label_smoothing), None

    monkeypatch.setattr(cifar100.Cifar100Task, "loss_and_correct", loss_alone)
    plain = train(recipe, root=tmp_path / "plain", device=device).result
    assert counted["weights"] == plain["weights"]
    assert counted["train_accuracy_mixed"] > 10


def test_mixed_accuracy_survives_a_stop_within_the_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar100, "CLASSES", 4)
    recipe = small(epochs=1, warmup_epochs=0)
    whole = train(recipe, root=tmp_path / "whole").result
    step.clear_cache()
    with killed_after(1):
        train(recipe, root=tmp_path / "resumed", checkpoint_every=0)
    step.clear_cache()
    resumed = train(recipe, root=tmp_path / "resumed").result
    for name in ("weights", "train_accuracy_mixed"):
        assert resumed[name] == whole[name]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("optimizer", ["mvngrad", "adamw"])
def test_training_learns_small_data(tmp_path, optimizer, precision):
    recipe = small(optimizer=optimizer, eps_s=1e-8 if optimizer == "mvngrad" else None, lr=2e-2, epochs=15, mixup=0.0)
    recipe = dataclasses.replace(recipe, precision=precision, label_smoothing=0.0, randaugment_operations=0)
    result = train(recipe, root=tmp_path).result
    assert result["status"] == "finished"
    assert result["test_accuracy"] > 60  # chance is 25
    assert result["train_accuracy"] > 60
    assert result["data"] == "brightness"


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_run_on_the_gpu_equals_the_eager_one(tmp_path, deterministic):
    recipe = small(drop_last=False, deterministic=deterministic)
    eager, captured = (
        train(recipe, root=tmp_path / str(capture), device="cuda", capture=capture).result for capture in (False, True)
    )
    for name in ("test_loss", "train_loss"):
        assert eager[name] == pytest.approx(captured[name], rel=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_measuring_the_gap_does_not_change_the_run(tmp_path, device):
    """Through augmentation, MixUp and batch normalization, between captured steps on a GPU."""
    recipe = small(epochs=3, deterministic=True, precision="bf16")
    options = {"device": device, "on_event": lambda event: None}
    alone = train(recipe, root=tmp_path / "alone", **options).result
    step.clear_cache()
    gap_recipe = cifar_gap.GapRecipe(trainings=(recipe,), K=8, epochs=(1, 2))
    measured = cifar_gap.measure(gap_recipe, tmp_path / "measured", None, lambda share: None, **options).result
    (row,) = measured["trained_with"].values()
    assert len(row["gap"]) == 2
    assert min(row["before"]) > 0
    with_gap = json.loads((tmp_path / "measured" / recipe.key / "result.json").read_text())
    assert with_gap["weights"] == alone["weights"]


def test_command_trains_and_reports_to_all_sinks(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tyro")
    pytest.importorskip("rich")
    from mvngrad_lab import cli
    from mvngrad_lab.training import events

    calls = {"TensorBoard": [], "WandB": []}

    def sink(name):
        def make(where, recipe):
            def listen(event):
                if isinstance(event, EpochEnd):
                    calls[name].append(event.epoch)

            calls[name] += [str(where), recipe.epochs]
            listen.close = lambda: calls[name].append("closed")
            return listen

        return make

    for name in calls:
        monkeypatch.setattr(events, name, sink(name))
    words = (
        "train cifar100 --batch-size 32 --epochs 2 --warmup-epochs 1 --eval-every 2 --precision float32 --device cpu"
    )
    options = ["--runs", str(tmp_path), "--tensorboard", "board", "--wandb", "project"]
    assert cli.main([*words.split(), *options]) == 0
    assert calls == {"TensorBoard": ["board", 2, 1, 2, "closed"], "WandB": ["project", 2, 1, 2, "closed"]}
    lines = capsys.readouterr().out.splitlines()
    assert "starts: cifar100 with mvngrad, lr 0.001; 12 steps of 32, in " in lines[0]
    assert "epoch 2/2" in lines[1], "an evaluation is a line"
    assert "  finished in 0:" in lines[-2]


@pytest.mark.gpu
def test_deterministic_runs_on_the_gpu_are_equal_bit_for_bit(tmp_path):
    weights = set()
    for name in ("one", "other"):
        step.clear_cache()
        recipe = small(deterministic=True, precision="bf16")
        weights.add(train(recipe, root=tmp_path / name, device="cuda").result["weights"])
    assert len(weights) == 1


def test_benchmark_projects_a_run_from_its_measurements(tmp_path):
    options = ["--device", "cpu", "--seconds", "0", "--rounds", "2", "--workers", "0", "--train-limit", "100"]
    benchmark.main([*options, "--batch-sizes", "20", "--arms", "captured", "plain", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "train-cpu.json").read_text())
    row = result["batch_sizes"]["20"][0]
    assert row["name"] == "captured"
    assert row["projected_seconds"] == pytest.approx(200 * 100 / row["images_per_second"] + row["evaluation_seconds"])
    assert row["images_per_second_range"][0] <= row["images_per_second"] <= row["images_per_second_range"][1]
    measured = [row["name"] for row in result["batch_sizes"]["20"]] + [note.split(",")[0] for note in result["notes"]]
    assert measured == ["captured", "plain"]  # the latter with torchvision alone, and else a note
    page = (tmp_path / "train-cpu.md").read_text()
    assert "| captured |" in page
    assert "brightness" in page


def test_benchmark_states_the_cost_of_deterministic_mode(tmp_path):
    options = ["--device", "cpu", "--seconds", "0", "--rounds", "1", "--train-limit", "40", "--batch-sizes", "20"]
    benchmark.main([*options, "--arms", "captured", "captured, deterministic", "--out", str(tmp_path)])
    plain, exact = json.loads((tmp_path / "train-cpu.json").read_text())["batch_sizes"]["20"]
    assert exact["deterministic_cost"] == pytest.approx(plain["images_per_second"] / exact["images_per_second"])
    assert f"takes {exact['deterministic_cost']:.2f} times as long" in (tmp_path / "train-cpu.md").read_text()
    assert not torch.are_deterministic_algorithms_enabled()


def test_benchmark_ends_in_time_and_lists_what_it_skipped(tmp_path):
    options = ["--device", "cpu", "--seconds", "600", "--rounds", "2", "--train-limit", "40", "--arms", "captured"]
    start = time.perf_counter()
    benchmark.main([*options, "--batch-sizes", "20", "10", "--within", "2", "--out", str(tmp_path)])
    assert time.perf_counter() - start < 1200, "an arm took its 600 seconds twice"
    result = json.loads((tmp_path / "train-cpu.json").read_text())
    assert result["batch_sizes"].keys() == {"20", "10"}
    for size, rows in result["batch_sizes"].items():  # on a slow machine the first may leave the second nothing
        assert rows or f"captured, batch {size}: no time left of --within 2" in result["notes"]
    benchmark.main([*options, "--batch-sizes", "20", "--within", "0", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "train-cpu.json").read_text())
    assert result["batch_sizes"] == {"20": []}
    assert result["notes"] == ["captured, batch 20: no time left of --within 0"]


def test_targets_are_judged_on_their_machine_alone():
    rows = [{"name": "captured, compiled", "projected_seconds": 115.0, "ratio": 3.0}]
    assert [target["verdict"] for target in benchmark.judge_targets(1024, rows, "NVIDIA H200")] == ["met"]
    assert [target["verdict"] for target in benchmark.judge_targets(128, rows, "NVIDIA H200")] == ["met", "missed"]
    assert [target["verdict"] for target in benchmark.judge_targets(1024, [], "NVIDIA H200")] == ["not measured"]
    assert benchmark.judge_targets(1024, rows, "a laptop") == []


def test_every_setting_changes_the_key():
    recipe = small()
    changed = {"epochs": 3, "train_limit": 100, "drop_last": False, "flip": False, "state_dtype": "int8", "seed": 1}
    keys = {dataclasses.replace(recipe, **{name: value}).key for name, value in changed.items()}
    assert len(keys | {recipe.key}) == 1 + len(changed)
    assert isinstance(recipe, Cifar100)


def test_an_optimizer_may_be_named_as_in_python():
    assert small(optimizer="MVNGradW") == small(optimizer="mvngradw")
