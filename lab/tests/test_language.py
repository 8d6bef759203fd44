"""Language models: the paper's settings, windows that depend on seed and step alone, and correct losses."""

import dataclasses
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from texts import write_text
from tiny import killed_after
from torch.nn.functional import cross_entropy

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments.language import records
from mvngrad_lab.store import read_rows
from mvngrad_lab.tasks.language import recipe as language
from mvngrad_lab.tasks.language.data import tokens
from mvngrad_lab.tasks.language.data.prepare import prepare_folder_tokens, write_tokens
from mvngrad_lab.tasks.language.data.text import Corpus
from mvngrad_lab.tasks.language.data.tokens import Tokens
from mvngrad_lab.tasks.language.recipe import openwebtext, wikitext103
from mvngrad_lab.tasks.language.task import LanguageTask
from mvngrad_lab.training import parallel, step
from mvngrad_lab.training.optimizers import make_optimizer
from mvngrad_lab.training.task import build_initial_model
from mvngrad_lab.training.train import train

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs"


pytestmark = pytest.mark.usefixtures("no_data", "letters")


@pytest.fixture
def data(tmp_path):
    """A folder of data with the tokens of two real texts: this project's own pages, and the official validation."""
    home = tmp_path / "data"
    first, second, *pages = [path.read_bytes().decode("ascii", "ignore") for path in sorted(DOCS.rglob("*.md"))]
    write_text(tmp_path / "pages" / "a.txt", *pages)
    write_text(tmp_path / "pages" / "validation.txt", second[:1500])
    name, _ = prepare_folder_tokens(tmp_path / "pages", home, workers=1)
    (home / "tokens" / name).rename(home / "tokens" / "pages")
    official = Corpus("official", (write_text(tmp_path / "official.txt", first[:700]),), share=1.0)
    write_tokens(official, home / "tokens" / "wikitext103-validation")
    return home


def small(**settings):
    defaults = {
        "text": "pages", "model": "tiny", "batch_size": 4, "micro_batch_size": 2, "steps": 8, "epoch_steps": 4,
        "warmup_steps": 2, "eval_every": 1, "precision": "float32",
    }  # fmt: skip
    return dataclasses.replace(wikitext103("mvngrad"), **{**defaults, **settings})


def as_rank(monkeypatch, rank, ranks):
    monkeypatch.setattr(parallel, "get_rank", lambda: rank)
    monkeypatch.setattr(parallel, "get_world_size", lambda: ranks)


# The recipes


def test_settings_are_the_papers():
    """As in subsec:lm, tab:hparams-gpt-wiki and tab:hparams-gpt-owt."""
    table = """
        wikitext103 adam 1e-3 0.95 0.99 -
        wikitext103 laprop 1e-3 0.95 0.99 -
        wikitext103 adabelief 1e-3 0.95 0.99 0
        wikitext103 mvngrad 1e-3 0.95 0.99 0
        openwebtext adamw 1e-4 0.6 0.99 -
        openwebtext lapropw 1e-4 0.6 0.999 -
        openwebtext adabeliefw 1e-4 0.6 0.999 0
        openwebtext mvngradw 1e-4 0.6 0.999 0
    """
    keys = set()
    for line in table.strip().splitlines():
        name, optimizer_name, *numbers = line.split()
        recipe = getattr(language, name)(optimizer_name, seed=3)
        assert (recipe.name, recipe.text, recipe.optimizer, recipe.seed) == (name, name, optimizer_name, 3)
        assert [recipe.lr, recipe.beta1, recipe.beta2, recipe.eps_s] == [
            None if number == "-" else float(number) for number in numbers
        ]
        keys.add(recipe.key)
    assert len(keys) == 8
    wiki, owt = wikitext103("adam"), openwebtext("adamw")
    assert (wiki.model, wiki.batch_size, wiki.steps, wiki.epochs) == ("30M", 128, 100_000, 1000)
    assert (owt.model, owt.batch_size, owt.micro_batch_size, owt.steps) == ("124M", 480, 12, 120_000)
    assert (owt.warmup_steps, owt.clip, owt.weight_decay, owt.precision) == (2000, 1.0, 0.1, "bf16")


def test_runs_on_the_stand_in():
    table2, rates, shortened = records.table2(), records.rates(), records.shortened()
    assert [len(set(runs)) for runs in (table2, rates, shortened)] == [12, 16, 4]
    assert {recipe.text for recipe in records.on_stand_in()} == {"wikipedia_en"}
    assert {(recipe.optimizer, recipe.seed) for recipe in table2} == {
        (name, seed) for name in ("adam", "laprop", "adabelief", "mvngrad") for seed in range(3)
    }
    assert {(recipe.model, recipe.batch_size, recipe.steps, recipe.lr) for recipe in table2} == {
        ("30M", 128, 3000, 1e-3)
    }
    assert {(recipe.optimizer, recipe.lr) for recipe in rates} == {
        (name, lr) for name in ("adam", "laprop", "adabelief", "mvngrad") for lr in (3e-4, 1e-3, 3e-3, 1e-2)
    }
    assert [recipe.optimizer for recipe in shortened] == ["adamw", "lapropw", "adabeliefw", "mvngradw"]
    assert {(recipe.model, recipe.batch_size, recipe.lr) for recipe in shortened} == {("124M", 480, 1e-4)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(wikitext103, "adamw"), "nothing for optimizer='adamw' on wikitext103; it has adam, laprop"),
        (partial(openwebtext, "adam"), "it has adamw, .*: make an OpenWebText with"),
        (partial(small, micro_batch_size=3), "batch_size=4 is not a multiple of micro_batch_size=3; .*=1 would fit"),
        (partial(small, steps=10), "steps=10 is not a multiple of epoch_steps=4; epoch_steps=2 would fit"),
        (partial(small, epoch_steps=0), "epoch_steps=0 is invalid"),
        (partial(small, warmup_steps=8), "warmup_steps=8 does not fit steps=8"),
        (partial(small, eval_windows=0), "eval_windows=0 is invalid"),
        (partial(small, model="1B"), "model='1B' is invalid; choose from 30M, 124M, tiny"),
        (partial(small, decayed="none"), "decayed='none' is invalid"),
    ],
)
def test_invalid_recipe_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("recipe", [wikitext103("adam"), openwebtext("adamw")], ids=lambda recipe: recipe.name)
def test_learning_rate_warms_up_and_falls_to_its_end(recipe):
    rates = [recipe.learning_rate(at, recipe.epoch_steps) for at in range(recipe.steps + 1)]
    warmup = recipe.warmup_steps
    assert rates[0] == recipe.lr / warmup
    assert rates[warmup - 1] == rates[warmup] == max(rates) == recipe.lr
    assert rates == sorted(rates[:warmup]) + sorted(rates[warmup:], reverse=True)
    assert rates[-1] == pytest.approx(recipe.lr / 10)
    assert dataclasses.replace(recipe, warmup_steps=0).learning_rate(0, 1) == recipe.lr


@pytest.mark.parametrize(("decayed", "names"), [("matrices", {"weight"}), ("all", {"weight", "bias", "norm"})])
def test_weight_decay_of_matrices_or_all(data, decayed, names):
    recipe = small(decayed=decayed, weight_decay=0.5)
    model = build_initial_model(LanguageTask(recipe, data, CPU), 0)
    groups = make_optimizer(recipe, model, torch.zeros(())).param_groups
    decays = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    decayed_names = [name for name, parameter in model.named_parameters() if id(parameter) in decays]
    assert {"norm" if "norm" in name else name.split(".")[-1] for name in decayed_names} == names
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


# The task


def test_task_names_its_text_and_refuses_missing_or_short_ones(data):
    task = LanguageTask(small(), data, CPU)
    assert task.source.startswith("text of the folder pages (")
    assert task.train.manifest.train.sha256[:12] in task.source
    with pytest.raises(FileNotFoundError, match=r"text='mine' are in .*tokens.mine, .*`mvngrad data prepare FOLDER`"):
        LanguageTask(small(text="mine"), data, CPU)
    with pytest.raises(ValueError, match=r"text='\.\./mine' is not the name of a text; .*data prepare FOLDER"):
        LanguageTask(small(text="../mine"), data, CPU)
    with pytest.raises(ValueError, match=r"has 0 tokens in train\.bin, and model='tiny' needs 65"):
        LanguageTask(small(text="wikitext103-validation"), data, CPU)


def test_windows_depend_on_the_number_of_the_step_in_the_run(data):
    short, long = small(seed=5), small(seed=5, epoch_steps=8)
    task = LanguageTask(short, data, CPU)
    plans = [task.plan_epoch(short, epoch)["tokens"] for epoch in (0, 1)]
    assert plans[0].shape == (4, 4, 65)
    assert plans[0].dtype == torch.int16
    assert torch.equal(torch.cat(plans), LanguageTask(long, data, CPU).plan_epoch(long, 0)["tokens"])
    assert not torch.equal(plans[0], task.plan_epoch(small(seed=6), 0)["tokens"])
    inputs, targets = task.make_batch({"tokens": plans[1][2]})
    starts = tokens.window_starts(5, 6, 4, 64, len(task.train))
    for at, start in enumerate(starts.tolist()):
        assert torch.equal(inputs[at], tokens.token_ids(task.train.data[start : start + 64]))
        assert torch.equal(targets[at], tokens.token_ids(task.train.data[start + 1 : start + 65]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_of_all_ranks_make_up_the_batch(data, monkeypatch, ranks):
    recipe = small(batch_size=7, micro_batch_size=1)
    task = LanguageTask(recipe, data, CPU)
    whole, parts = task.plan_epoch(recipe, 1)["tokens"], []
    for rank in range(ranks):
        as_rank(monkeypatch, rank, ranks)
        parts.append(task.plan_epoch(recipe, 1)["tokens"])
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert {part.shape[1] for part in parts} <= {7 // ranks, 7 // ranks + 1}


def plain(model, part, starts):
    """The mean loss of the windows from `starts` on, one by one and with the logits of the whole."""
    losses = []
    for start in starts:
        window = tokens.token_ids(part.data[start : start + 65])
        losses.append(cross_entropy(model(window[None, :-1])[0], window[1:]))
    return torch.stack(losses).double().mean().item()


@torch.no_grad()
def test_evaluation_is_the_mean_over_windows_that_do_not_overlap(data):
    task = LanguageTask(small(batch_size=3, micro_batch_size=3), data, CPU)
    model = build_initial_model(task, 1).eval()
    count = (len(task.validation["validation"]) - 1) // 64
    assert count % 3  # the last chunk is a smaller one
    metrics = task.evaluate(model, final=True)
    expected = plain(model, task.validation["validation"], range(0, 64 * count, 64))
    assert metrics["validation_loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["validation_perplexity"] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-5)
    official = Tokens.open(data / "tokens" / "wikitext103-validation", "validation")
    expected = plain(model, official, range(0, (len(official) - 1) // 64 * 64, 64))
    assert metrics["wikitext103_loss"] == pytest.approx(expected, rel=1e-6)
    drawn = tokens.window_starts(0, -1, count, 64, len(task.train)).tolist()
    assert metrics["train_loss"] == pytest.approx(plain(model, task.train, drawn), rel=1e-6)
    assert "train_loss" not in task.evaluate(model, final=False)


@torch.no_grad()
def test_evaluation_of_some_windows_evenly_spaced(data):
    task = LanguageTask(small(eval_windows=2), data, CPU)
    model = build_initial_model(task, 1).eval()
    part = task.validation["validation"]
    half = (len(part) - 1) // 64 // 2
    expected = plain(model, part, [0, 64 * half])
    assert task.evaluate(model, final=False)["validation_loss"] == pytest.approx(expected, rel=1e-6)


def test_more_windows_than_the_text_has_are_refused(data):
    with pytest.raises(InvalidInput, match="eval_windows=5 is more than the 4 windows of the validation text"):
        LanguageTask(small(eval_windows=5), data, CPU)


@torch.no_grad()
@pytest.mark.parametrize("ranks", [2, 3])
def test_evaluation_calls_the_model_equally_often_on_every_rank(data, monkeypatch, ranks):
    task = LanguageTask(small(eval_windows=3 if ranks == 2 else 4), data, CPU)  # which they cannot share evenly
    model, calls, parts = build_initial_model(task, 1).eval(), [], []
    whole = task.evaluate(model, final=False)["validation_loss"]
    monkeypatch.setattr(parallel, "all_reduce_mean", lambda total: total)  # it is taken below
    model.register_forward_hook(lambda *arguments: calls.append(arguments))
    counts = set()
    for rank in range(ranks):
        as_rank(monkeypatch, rank, ranks)
        parts.append(task.evaluate(model, final=False)["validation_loss"])
        counts.add(len(calls))
        calls.clear()
    assert len(counts) == 1
    assert sum(parts) / ranks == pytest.approx(whole, rel=1e-9)


def test_official_text_is_not_evaluated_twice(data):
    assert list(LanguageTask(small(), data, CPU).validation) == ["validation", "wikitext103"]
    shutil.copytree(data / "tokens" / "pages", data / "tokens" / "wikitext103")
    assert list(LanguageTask(small(text="wikitext103"), data, CPU).validation) == ["validation"]


# Training


def test_training_lowers_the_loss_and_resumes_exactly(data, tmp_path):
    recipe = small(steps=12, lr=5e-3, eval_windows=4)
    done = train(recipe, root=tmp_path / "whole", data=data)
    assert done.result["status"] == "finished"
    rows = read_rows(tmp_path / "whole" / recipe.key / "metrics.jsonl")
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert rows[0]["loss"] > 10  # chance is log(50304) = 10.8
    assert done.result["validation_loss"] < rows[0]["validation_loss"] < 10.8
    assert done.result["train_loss"] < 9
    assert done.result["data"] == LanguageTask(recipe, data, CPU).source
    with killed_after(3):
        train(recipe, root=tmp_path / "again", data=data, checkpoint_every=0)
    step.clear_cache()
    assert train(recipe, root=tmp_path / "again", data=data).result["weights"] == done.result["weights"]


def test_recipes_that_differ_outside_the_step_share_a_model(data):
    def shared(**settings):
        return step.get_training_step(small(**settings), data, CPU, compiled=False, captured=False).device_task

    first = shared()
    assert shared(steps=16, warmup_steps=1, lr_end=0.5, nonfinite_limit=3, lr=1.0, seed=2) is first
    assert shared(decayed="all", weight_decay=0.1) is first
    for settings in ({"epoch_steps": 8}, {"eval_windows": 1}, {"micro_batch_size": 4}):
        assert shared(**settings) is not first
