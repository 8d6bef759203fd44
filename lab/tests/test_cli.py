"""The command `mvngrad`: what is wrong is one line on stderr that says what to do, and nothing is begun before."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("tyro")
pytest.importorskip("rich")

from mvngrad_lab import cli, store
from mvngrad_lab.cli import train
from mvngrad_lab.errors import UserError
from mvngrad_lab.tasks.cifar100 import recipe as cifar100
from mvngrad_lab.tasks.language.data import prepare
from mvngrad_lab.tasks.language.recipe import openwebtext, wikitext103
from mvngrad_lab.tasks.language.task import LanguageTask
from mvngrad_lab.training.train import SMALL_IMAGES, SMALL_TEXT

WORDS = (
    "train wikitext103 --model tiny --batch-size 2 --micro-batch-size 2 --steps 2 --epoch-steps 1 --warmup-steps 1 "
    "--eval-every 2 --precision float32 --device cpu"
)
LANGUAGE = WORDS.split()


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path, no_data, letters):
    """An empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """A folder of text whose name is no name of a text."""
    mine = tmp_path / "my texts"
    mine.mkdir()
    (mine / "a.txt").write_text("a text to train on " * 50)
    (mine / "validation.txt").write_text("and another to validate on " * 10)
    return mine


def refused(capsys, *words):
    """What a command says that does not go."""
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line.removeprefix("mvngrad: ")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("data", "get", "--help"), ("data", "list"), ("--version",)])
def test_who_stops_reading_ends_it_without_a_word(words, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    command, environment = [sys.executable, "-m", "mvngrad_lab", *words], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_pipe_that_breaks_is_an_error(monkeypatch, capsys):
    def broken(self):
        raise BrokenPipeError("of a child")

    monkeypatch.setattr(cli.Report, "__call__", broken)
    assert refused(capsys, "report") == "of a child"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_training_that_is_stopped_says_where_and_ends_as_shells_expect(monkeypatch, capsys, folder, number):
    name, _ = prepare.prepare_folder_tokens(folder, folder.parent / "data", workers=1)
    words = [*LANGUAGE, "--text", name, "--data", "data"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "mvngrad_lab.training.train.make_monitor_observer",
            lambda folder: lambda *epoch: signal.raise_signal(number),
        )
        assert cli.main([*words, "--monitored"]) == 128 + number
    assert f"stopped by {number.name} after step 1;" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert "resumes after step 1 of 2" in capsys.readouterr().out


# What is given


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lr -1", "lr=-1.0 is invalid; it must be at least 0"),
        ("--lr nan", "lr=nan is invalid; it must be finite"),
        ("--train-limit -3", "train_limit=-3 is invalid; it must be at least 1"),
        ("--checkpoint-every -5", "--checkpoint-every -5.0 is invalid; it must be at least 0"),
        ("--checkpoint-every nan", "--checkpoint-every nan is invalid; it must be at least 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(capsys, tmp_path, words, says):
    assert refused(capsys, "train", "cifar100", *words.split()) == says
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    says = "--device cuda: this torch sees no GPU; use --device cpu"
    assert refused(capsys, "train", "cifar100", "--device", "cuda") == says


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ("cifar100", cifar100.paper("mvngrad", 128)),
        ("cifar100 --optimizer adam", cifar100.paper("adam", 128)),
        ("cifar100 --batch-size 1024 --optimizer=laprop", cifar100.paper("laprop", 1024)),
        ("cifar100 --optimizer adabeliefw", replace(cifar100.paper("adabelief", 128), optimizer="adabeliefw")),
        ("wikitext103 --optimizer laprop", wikitext103("laprop")),
        ("openwebtext --optimizer adamw --seed 1", openwebtext("adamw", seed=1)),
        ("openwebtext --optimizer adam", replace(openwebtext("adamw"), optimizer="adam")),
    ],
)
def test_a_recipe_begins_with_what_the_paper_selected_for_the_optimizer(monkeypatch, words, recipe):
    asked = []
    monkeypatch.setattr(train.Train, "__call__", lambda self: asked.append(self.recipe) or 0)
    assert cli.main(["train", *words.split()]) == 0
    assert asked == [recipe]


@pytest.mark.parametrize("optimizer", ["torch:SGD", "torch:SGD,momentum=0.9"])
def test_an_optimizer_that_no_monitor_can_read_is_refused_before_it_trains(capsys, tmp_path, optimizer):
    says = f"optimizer={optimizer!r} cannot be monitored; ours, torch:Adam and torch:AdamW can"
    assert refused(capsys, "train", "cifar100", "--optimizer", optimizer, "--monitored") == says
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("optimizer", ["mvngrad", "torch:Adam,amsgrad=True", "torch:AdamW"])
def test_others_can_be_monitored(capsys, optimizer):
    """There is no data, and nothing else is in the way."""
    assert refused(capsys, "train", "cifar100", "--optimizer", optimizer, "--monitored").startswith("CIFAR-100 is not")


def test_a_folder_of_data_that_is_not_there(capsys):
    said = refused(capsys, *LANGUAGE, "--data", "nowhere")
    assert said == "'nowhere', given as --data or folder, is not a folder; name one that holds tokens/ or its files"


@pytest.mark.parametrize(
    "words", ["report", "data prepare .", "train cifar100 --device cpu", "diagnose monitor.jsonl"], ids=lambda w: w
)
def test_ctrl_c_is_one_word_and_130(capsys, monkeypatch, tmp_path, words):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    (tmp_path / "monitor.jsonl").touch()
    monkeypatch.setattr(store, "load_runs", interrupted)
    monkeypatch.setattr(store.RunFolder, "run", property(interrupted))
    monkeypatch.setattr(prepare, "prepare_folder_tokens", interrupted)
    monkeypatch.setattr("mvngrad.diagnostics.read_records", interrupted, raising=False)
    assert cli.main(words.split()) == 130
    assert capsys.readouterr().err == "Interrupted\n"


# A text of one's own


@pytest.mark.parametrize("words", [["--text", "my texts"], ["--text=my texts"], ["--text", "./my texts"]], ids=str)
def test_a_folder_of_text_is_named_and_prepared_in_every_spelling(folder, monkeypatch, words):
    """Also that of --data, where the tokens go."""
    seen = []
    monkeypatch.setattr("mvngrad_lab.training.train.train", lambda recipe, **options: seen.append(recipe) or refuse())
    monkeypatch.setattr("mvngrad_lab.pool.count_cores", lambda: 1)

    def refuse():
        raise UserError("enough")

    assert cli.main([*LANGUAGE, *words, "--data=d2"]) == 2
    (recipe,) = seen
    name, _ = prepare.prepare_folder_tokens(folder, folder.parent / "d2", workers=1)
    assert recipe.text == name
    assert name.startswith("my-texts-")
    assert (folder.parent / "d2" / "tokens" / name / "manifest.json").is_file()
    assert not (folder.parent / "cache").exists()


def test_nothing_is_tokenized_for_a_command_that_is_not_carried_out(folder, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "prepare_folder_tokens", None)
    words = [*LANGUAGE, "--text", "my texts"]
    assert refused(capsys, *words, "--lr", "-1").startswith("lr=-1.0 is invalid")
    for last in ("--help", "--nonsense"):
        with pytest.raises(SystemExit):
            cli.main([*words, last])


@pytest.mark.parametrize("given", ["./nope", "no such texts", ""])
def test_a_folder_of_text_that_is_not_there(capsys, given):
    said = refused(capsys, *LANGUAGE, "--text", given)
    assert said == f"--text {given!r} is not a folder, and no name that `mvngrad data prepare` prints"


def test_several_processes_do_not_prepare_one_text(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--text 'my texts': not by several processes at once; `mvngrad data prepare`"):
        LanguageTask.prepare_recipe(replace(wikitext103("adam"), text="my texts"), None, print)


def test_a_text_of_the_paper_is_not_a_folder_that_has_its_name(tmp_path):
    (tmp_path / "wikitext103").mkdir()
    for text in ("wikitext103", "mine-0123456789ab"):
        recipe = replace(wikitext103("adam"), text=text)
        assert LanguageTask.prepare_recipe(recipe, None, print) == recipe


def test_a_run_that_is_finished_says_so_and_one_with_a_monitor_can_be_diagnosed(folder, capsys, monkeypatch):
    monkeypatch.setattr("mvngrad_lab.pool.count_cores", lambda: 1)
    words = [*LANGUAGE, "--text", "my texts", "--monitored"]
    assert cli.main(words) == 0
    first = capsys.readouterr().out.splitlines()
    assert not any("already finished" in line for line in first)
    assert cli.main(words) == 0
    again = capsys.readouterr().out.splitlines()
    run = first[-1]
    assert again[0] == f"{run.removeprefix('runs/')}  already finished"
    assert set(again[1:]) <= set(first)
    assert cli.main(["diagnose", run]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("monitor.html")


def test_a_monitor_that_comes_too_late_is_said(folder, capsys, monkeypatch):
    monkeypatch.setattr("mvngrad_lab.pool.count_cores", lambda: 1)
    assert cli.main([*LANGUAGE, "--text", "my texts"]) == 0
    capsys.readouterr()
    assert cli.main([*LANGUAGE, "--text", "my texts", "--monitored"]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .endswith("already finished, without monitor.jsonl: train it again in another --runs")
    )


def test_a_run_that_diverges_is_no_success(folder, capsys, monkeypatch):
    monkeypatch.setattr("mvngrad_lab.pool.count_cores", lambda: 1)
    words = [*LANGUAGE, "--text", "my texts", "--lr", "1e30", "--clip", "1e30", "--nonfinite-limit", "1"]
    assert cli.main(words) == 1
    assert "status: diverged" in capsys.readouterr().out
    assert cli.main(words) == 1, "nor is it one later"


def test_the_small_trainings_that_errors_recommend_run(folder, capsys, monkeypatch):
    monkeypatch.setattr("mvngrad_lab.pool.count_cores", lambda: 1)
    words = SMALL_TEXT.strip("`").removeprefix("mvngrad ").replace("FOLDER", folder.name.replace(" ", "_")).split()
    folder.rename(folder.with_name(folder.name.replace(" ", "_")))
    assert cli.main([*words, "--steps", "2", "--epoch-steps", "1", "--warmup-steps", "1", "--device", "cpu"]) == 0
    capsys.readouterr()
    words = SMALL_IMAGES.strip("`").removeprefix("mvngrad ").split()
    assert refused(capsys, *words).startswith("CIFAR-100 is not"), "all but the data is there"


def test_off_a_terminal_preparing_prints_what_it_made_and_no_empty_line(folder, capsys, monkeypatch):
    monkeypatch.setattr("mvngrad_lab.pool.count_cores", lambda: 1)
    assert cli.main(["data", "prepare", "my texts"]) == 0
    described, name = capsys.readouterr().out.split("\n")[:-1]
    assert "tokens to train on" in described
    assert name.startswith("my-texts-")


# Diagnoses


@pytest.mark.parametrize(
    "content",
    [b"", b"import os\n1\n", b"\xff\xfe\n", b"[1]\n", b'{"step": 1, "loss": 2.0}\n', b'{"step": 1, "groups": []}\n3\n'],
    ids=["empty", "code", "no text", "lists", "metrics", "mixed"],
)
def test_a_file_that_no_monitor_wrote_is_refused(capsys, tmp_path, content):
    (tmp_path / "record").write_bytes(content)
    assert "name a file that a Monitor wrote" in refused(capsys, "diagnose", "record")
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(("given", "named"), [("run", "run/monitor.jsonl"), ("none.jsonl", "none.jsonl")])
def test_a_run_without_a_monitor(capsys, tmp_path, given, named):
    (tmp_path / "run").mkdir()
    says = f"{named} does not exist; train with --monitored, or attach a Monitor"
    assert refused(capsys, "diagnose", given) == says


@pytest.mark.parametrize("bug", [ValueError, RuntimeError, KeyError])
def test_a_bug_keeps_its_traceback(monkeypatch, bug):
    def broken(self):
        raise bug("in our code")

    monkeypatch.setattr(cli.Report, "__call__", broken)
    with pytest.raises(bug, match="in our code"):
        cli.main(["report"])


def test_on_request_an_error_is_a_traceback(monkeypatch, tmp_path):
    monkeypatch.setenv("MVNGRAD_DEBUG", "1")
    with pytest.raises(FileNotFoundError, match="rnus is not a folder"):
        cli.main(["report", "--runs", "rnus"])


# Reports, and help


def test_a_report_on_a_folder_that_is_not_there_is_refused(capsys, tmp_path):
    assert refused(capsys, "report", "--runs", "rnus").startswith("--runs rnus is not a folder")
    assert list(tmp_path.iterdir()) == []


def test_a_report_on_nothing_is_written_with_a_warning(capsys, tmp_path):
    (tmp_path / "nowhere").mkdir()
    assert cli.main(["report", "--runs", "nowhere"]) == 0
    assert "there is no result in nowhere; name a folder" in capsys.readouterr().err
    recipe = {"recipe": {"name": "x"}, "environment": {}, "result": {}}
    (tmp_path / "somewhere" / "x-1").mkdir(parents=True)
    for part, content in recipe.items():
        (tmp_path / "somewhere" / "x-1" / f"{part}.json").write_text(json.dumps(content))
    assert cli.main(["report", "--runs", "somewhere"]) == 0
    assert capsys.readouterr().err == ""


def test_a_page_that_cannot_be_written_is_named(capsys, tmp_path):
    (tmp_path / "folder").mkdir()
    assert cli.main(["report", "--runs", "folder", "--out", "folder"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(": 'folder'")


def helped(capsys, *words):
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    return " ".join(word for word in capsys.readouterr().out.split() if word != "│")


def test_help_says_what_there_is_and_what_a_flag_does(capsys):
    assert "`mvngrad --version`" in helped(capsys)
    assert "Train a network by a recipe of the paper" in helped(capsys, "train")
    images = helped(capsys, "train", "cifar100")
    assert "--no-drop-last Whether an epoch's last batch is skipped" in images
    assert "--no-flip Whether half of the images, at random, are flipped horizontally; --no-flip flips none." in images
    assert "else the cache)" in images
    assert "sample" not in images.partition("--runs")[0]
    assert "a small sample" in helped(capsys, "reproduce")
    assert "also takes the folder" in helped(capsys, "train", "wikitext103").replace("command line ", "")
