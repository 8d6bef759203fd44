"""The command `mvngrad`: an error is one line on stderr with the remedy, and nothing is started before it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tyro")
pytest.importorskip("rich")

from mvngrad_lab import cli, store
from mvngrad_lab.cli import train
from mvngrad_lab.errors import UserError
from mvngrad_lab.report.figures.style import number
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
    """An empty folder, and text tokenized in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mvngrad_lab.pool.count_cores", lambda: 1)


@pytest.fixture
def folder(tmp_path):
    """A folder of text whose name cannot be that of a text."""
    mine = tmp_path / "my texts"
    mine.mkdir()
    (mine / "a.txt").write_text("a text to train on " * 50)
    (mine / "validation.txt").write_text("and another to validate on " * 10)
    return mine


def get_error(capsys, *words):
    """The error of a command that is refused."""
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line.removeprefix("mvngrad: ")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("data", "get", "--help"), ("data", "list"), ("--version",)])
def test_a_closed_pipe_ends_the_command_without_a_message(words, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    command, environment = [sys.executable, "-m", "mvngrad_lab", *words], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_any_other_broken_pipe_is_an_error(monkeypatch, capsys):
    def broken(self):
        raise BrokenPipeError("of a child")

    monkeypatch.setattr(cli.Report, "__call__", broken)
    assert get_error(capsys, "report") == "of a child"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_training_names_its_step_and_exits_as_shells_expect(monkeypatch, capsys, folder, number):
    name, _ = prepare.prepare_folder_tokens(folder, folder.parent / "data", workers=1)
    words = [*LANGUAGE, "--text", name, "--data", "data"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "mvngrad_lab.training.train.make_monitor_observer",
            lambda folder: lambda *epoch: signal.raise_signal(number),
        )
        assert cli.main([*words, "--monitored"]) == 128 + number
    assert f"stopped by {number.name} after step 1;" in capsys.readouterr().err
    assert cli.main([*words, "--monitored"]) == 0
    output = capsys.readouterr().out
    assert "resumes after step 1 of 2" in output
    assert "was started without --monitored: monitor.jsonl will lack its epochs so far" in output


# Arguments


CIFAR100 = ["train", "cifar100"]
NO_TASK = (
    "there is no task 'spirals'; choose from cifar100, wikitext103, openwebtext, mnist, or package.module:function"
)
NO_TEXT = "--text {!r} is not a folder, and no name that `mvngrad data prepare` prints"
NO_OPTIMIZER = "torch.optim has no optimizer {!r}; names are as there: torch:RAdam, torch:Muon"
NO_NAME = (
    "optimizer='sgd' is invalid; choose from mvngrad, mvngradw, adabelief, adabeliefw, laprop, lapropw, adam, adamw, "
    "torch:NAME such as torch:SGD, zoo:NAME and package.module:CLASS"
)
NO_MONITOR = (
    "{} does not exist; train with --monitored, or attach a Monitor, whose first record is written after `every` steps "
    "or by record()"
)
NOT_MONITORED = "optimizer={!r} cannot be monitored; ours, torch:Adam and torch:AdamW can"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*CIFAR100, "--lr", "-1"], "lr=-1.0 is invalid; it must be at least 0"),
        ([*CIFAR100, "--lr", "nan"], "lr=nan is invalid; it must be finite"),
        ([*CIFAR100, "--train-limit", "-3"], "train_limit=-3 is invalid; it must be from 1 to 50000"),
        ([*CIFAR100, "--checkpoint-every", "-5"], "--checkpoint-every -5.0 is invalid; it must be at least 0"),
        ([*CIFAR100, "--checkpoint-every", "nan"], "--checkpoint-every nan is invalid; it must be at least 0"),
        ([*CIFAR100, "--device", "cuda"], "--device cuda: this torch sees no GPU; use --device cpu"),
        *(
            ([*CIFAR100, "--optimizer", name, "--monitored"], NOT_MONITORED.format(name))
            for name in ("torch:SGD", "torch:SGD,momentum=0.9")
        ),
        *(
            (
                [*CIFAR100, "--optimizer", f"torch:SGD,{option}"],
                f"{option} does not fit torch:SGD; its default is {default}",
            )
            for option, default in (("momentum='x'", "0"), ("nesterov=2", "False"))
        ),
        ([*CIFAR100, "--optimizer", "torch:SGDD"], NO_OPTIMIZER.format("SGDD")),
        ([*CIFAR100, "--optimizer", "sgd"], NO_NAME),
        (
            [*CIFAR100, "--batch-size", "1000000000000"],
            "batch_size=1000000000000 is invalid; it must be less than 2**31",
        ),
        ([*LANGUAGE, "--steps", f"{10**20}"], f"steps={10**20} is invalid; it must be less than 2**31"),
        *(([*LANGUAGE, "--text", text], NO_TEXT.format(text)) for text in ("./nope", "no such texts", "")),
        (["diagnose", "."], NO_MONITOR.format("monitor.jsonl")),
        (["diagnose", "none.jsonl"], NO_MONITOR.format("none.jsonl")),
        (["diagnose", "a.jsonl", "b.jsonl"], "diagnose takes one file, or one folder with a monitor.jsonl"),
        (["diagnose"], "diagnose takes one file, or one folder with a monitor.jsonl"),
        (["report", "--out", "."], "--out . is a folder; name the page, such as report.html"),
        (
            ["sweep", "status", "foo"],
            "no sweep 'foo': there is no sweep in sqlite:///sweeps.db; make one with `mvngrad sweep init`",
        ),
        (
            ["train", "mnist", "--optimizer", "adam", "--eps-s", "1e-8"],
            "eps_s=1e-08 does not go with optimizer='adam'; it belongs to adabelief, mvngrad: leave it None, and set "
            "eps instead",
        ),
        (
            ["train", "spirals"],
            NO_TASK,
        ),
        (["report", "--runs=~/rnus"], "--runs ~/rnus is not a folder; name the one that has your results"),
        (["report", "--runs", "rnus"], "--runs rnus is not a folder; name the one that has your results"),
    ],
    ids=lambda part: " ".join(part[-3:]) if isinstance(part, list) else "",
)
def test_invalid_arguments_are_refused_by_name_and_nothing_is_written(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert get_error(capsys, *words) == message.replace("~", os.path.expanduser("~"))
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}  # of matplotlib


@pytest.mark.parametrize(
    "words",
    [
        ["cifar100", "--optimizer", "AdaBelief"],
        ["mnist", "--optimizer", "AdamW"],
        ["cifar100", "--optimizer", "mvngrad", "--batch-size", "1_024"],
    ],
)
def test_defaults_do_not_depend_on_how_a_name_or_number_is_written(words):
    plain = [*words[:2], words[2].lower(), *(word.replace("_", "") for word in words[3:])]
    written, usual = (train.parse_training(each, "", cli.CONFIG).recipe for each in (words, plain))
    assert written == usual
    assert written.lr == (4e-3 if len(words) > 3 else usual.lr)


def test_a_model_that_no_memory_can_hold_is_refused_in_one_line(capsys):
    assert cli.main(["train", "mnist", "--digits", "mnist-5k", "--device", "cpu", "--hidden", str(2**31 - 1)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not fit the memory of cpu; make batch_size=128 smaller" in line


def test_what_the_encoding_of_the_terminal_lacks_is_escaped():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "mvngrad_lab", "train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2022 cifar100" in done.stdout


def test_a_missing_folder_of_data_is_named(capsys):
    message = "'nowhere', given as --data or folder, is not a folder; name one that holds tokens/ or its files"
    assert get_error(capsys, *LANGUAGE, "--data", "nowhere") == message


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
def test_options_default_to_what_the_paper_selected_for_the_optimizer(monkeypatch, words, recipe):
    recipes = []
    monkeypatch.setattr(train.Train, "__call__", lambda self: recipes.append(self.recipe) or 0)
    assert cli.main(["train", *words.split()]) == 0
    assert recipes == [recipe]


@pytest.mark.parametrize("optimizer", ["mvngrad", "torch:Adam,amsgrad=True", "torch:AdamW"])
def test_optimizers_that_can_be_monitored(capsys, optimizer):
    """The only error is that there is no data."""
    assert get_error(capsys, "train", "cifar100", "--optimizer", optimizer, "--monitored").startswith(
        "CIFAR-100 is not"
    )


@pytest.mark.parametrize(
    "words", ["report", "data prepare .", "train cifar100 --device cpu", "diagnose monitor.jsonl"], ids=lambda w: w
)
def test_ctrl_c_prints_one_word_and_exits_with_130(capsys, monkeypatch, tmp_path, words):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    (tmp_path / "monitor.jsonl").touch()
    monkeypatch.setattr(store, "load_runs", interrupted)
    monkeypatch.setattr(store.RunFolder, "run", property(interrupted))
    monkeypatch.setattr(prepare, "prepare_folder_tokens", interrupted)
    monkeypatch.setattr("mvngrad.diagnostics.read_records", interrupted, raising=False)
    assert cli.main(words.split()) == 130
    assert capsys.readouterr().err == "Interrupted\n"


# A folder of text


@pytest.mark.parametrize("words", [["--text", "my texts"], ["--text=my texts"], ["--text", "./my texts"]], ids=str)
def test_a_folder_of_text_is_named_and_prepared_in_every_spelling(folder, monkeypatch, words):
    """Also that of --data, where the tokens go."""
    seen = []
    monkeypatch.setattr("mvngrad_lab.training.train.train", lambda recipe, **options: seen.append(recipe) or refuse())

    def refuse():
        raise UserError("enough")

    assert cli.main([*LANGUAGE, *words, "--data=d2"]) == 2
    (recipe,) = seen
    name, _ = prepare.prepare_folder_tokens(folder, folder.parent / "d2", workers=1)
    assert recipe.text == name
    assert name.startswith("my-texts-")
    assert (folder.parent / "d2" / "tokens" / name / "manifest.json").is_file()
    assert not (folder.parent / "cache").exists()


def test_nothing_is_tokenized_for_an_invalid_command(folder, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "prepare_folder_tokens", None)
    words = [*LANGUAGE, "--text", "my texts"]
    assert get_error(capsys, *words, "--lr", "-1").startswith("lr=-1.0 is invalid")
    for last in ("--help", "--nonsense"):
        with pytest.raises(SystemExit):
            cli.main([*words, last])


def test_several_processes_cannot_prepare_one_text(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--text 'my texts': not by several processes at once; `mvngrad data prepare`"):
        LanguageTask.prepare_recipe(replace(wikitext103("adam"), text="my texts"), None, print)


def test_a_text_of_the_paper_is_not_a_folder_that_has_its_name(tmp_path):
    (tmp_path / "wikitext103").mkdir()
    for text in ("wikitext103", "mine-0123456789ab"):
        recipe = replace(wikitext103("adam"), text=text)
        assert LanguageTask.prepare_recipe(recipe, None, print) == recipe


def test_a_finished_run_is_reported_and_a_monitored_one_can_be_diagnosed(folder, capsys):
    words = [*LANGUAGE, "--text", "my texts", "--monitored"]
    assert cli.main(words) == 0
    first = capsys.readouterr().out.splitlines()
    assert not any("already finished" in line for line in first)
    assert cli.main(words) == 0
    again = capsys.readouterr().out.splitlines()
    run = first[-1].removeprefix("results: ")
    key = run.removeprefix("runs/")
    assert re.fullmatch(rf"{key}  finished in 0:\d\d: validation_loss [\d.]+, validation_perplexity .*", first[-2])
    assert again == [f"{key}  already finished", *first[-2:]], "each number once"
    assert cli.main(["diagnose", run]) == 0
    html = Path(capsys.readouterr().out.splitlines()[-1])
    assert html.name == "monitor.html"
    first, last = (number(row["loss"]) for row in store.read_rows(Path(run, "metrics.jsonl")))
    assert f"From {first} to {last}." in html.read_text(), "the training loss is drawn"


def test_a_finished_run_without_a_monitor_file_cannot_be_monitored(folder, capsys):
    assert cli.main([*LANGUAGE, "--text", "my texts"]) == 0
    capsys.readouterr()
    error = get_error(capsys, *LANGUAGE, "--text", "my texts", "--monitored")
    assert error.endswith(" is finished, without monitor.jsonl; train it again with another --runs FOLDER")


@pytest.mark.parametrize(
    ("options", "said"),
    [("adamw", True), ("mvngradw", True), ("adamw --weight-decay 0.1", False), ("adam", False), ("torch:AdamW", False)],
)
def test_a_decoupled_decay_of_0_is_pointed_out(capsys, options, said):
    words = f"train mnist --digits mnist-5k --epochs 1 --device cpu --optimizer {options}".split()
    assert cli.main(words) == 0
    first = capsys.readouterr().out.splitlines()[0]
    name = options.split()[0]
    assert (first == f"weight_decay=0: {name} is the same as {name[:-1]}; set --weight-decay") == said


def test_a_diverged_run_exits_with_1(folder, capsys):
    words = [*LANGUAGE, "--text", "my texts", "--lr", "1e30", "--clip", "1e30", "--nonfinite-limit", "1"]
    assert cli.main(words) == 1
    assert re.search(r"  diverged at step \d of 2\n", capsys.readouterr().out)
    assert cli.main(words) == 1, "also when it is read from the store"


def test_the_small_trainings_that_errors_recommend_run(folder, capsys):
    words = SMALL_TEXT.strip("`").removeprefix("mvngrad ").replace("FOLDER", folder.name.replace(" ", "_")).split()
    folder.rename(folder.with_name(folder.name.replace(" ", "_")))
    assert cli.main([*words, "--steps", "2", "--epoch-steps", "1", "--warmup-steps", "1", "--device", "cpu"]) == 0
    capsys.readouterr()
    words = SMALL_IMAGES.strip("`").removeprefix("mvngrad ").split()
    assert get_error(capsys, *words).startswith("CIFAR-100 is not"), "only the data is missing"


def test_without_a_terminal_prepare_prints_its_result_and_no_empty_line(folder, capsys):
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
    assert "name a file that a Monitor wrote" in get_error(capsys, "diagnose", "record")
    assert not list(tmp_path.glob("*.html"))


@pytest.fixture
def monitor(tmp_path):
    """The file of a Monitor, from the stored results."""
    stored = Path(__file__).parents[2] / "results" / "cifar100-start-monitor.jsonl"
    return Path(shutil.copy(stored, tmp_path / "adamw.jsonl"))


@pytest.mark.parametrize("out", ["adamw.jsonl", "./adamw.jsonl", "link.html"])
def test_a_diagnosis_does_not_replace_its_monitor_file(capsys, tmp_path, monitor, out):
    (tmp_path / "link.html").symlink_to(monitor)
    before = monitor.read_bytes()
    error = get_error(capsys, "diagnose", "adamw.jsonl", "--out", out)
    assert error == f"--out {Path(out)} is the monitor file itself; name another file, such as adamw.html"
    assert monitor.read_bytes() == before


def test_a_page_replaces_only_pages(capsys, tmp_path, monitor):
    for name in ("notes.txt", "page.html"):
        (tmp_path / name).write_text("old")
    for words in (["diagnose", "adamw.jsonl"], ["report"]):
        error = get_error(capsys, *words, "--out", "notes.txt")
        assert error == "--out notes.txt exists and is not an HTML page; name another file, such as notes.html"
        assert get_error(capsys, *words, "--out", ".").startswith("--out . is a folder; name the page, such as ")
    assert cli.main(["diagnose", "adamw.jsonl", "--out", "page.html"]) == 0
    assert (tmp_path / "notes.txt").read_text() == "old"
    assert (tmp_path / "page.html").read_text() != "old"


def test_a_folder_without_a_monitor_file_names_those_in_it(capsys, tmp_path, monitor):
    for name in ("mvn8.jsonl", "metrics.jsonl", "runs/mnist-1/monitor.jsonl", "runs/mnist-2/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    error = get_error(capsys, "diagnose", ".")
    assert error == "no monitor.jsonl in .; it has adamw.jsonl, mvn8.jsonl: name one of them"
    error = get_error(capsys, "diagnose", "runs")
    assert error == "no monitor.jsonl in runs; it has runs/mnist-1/monitor.jsonl: name one of them"
    assert get_error(capsys, "diagnose", "runs/mnist-2") == NO_MONITOR.format("runs/mnist-2/monitor.jsonl")


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


def get_help(capsys, *words):
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    return " ".join(word for word in capsys.readouterr().out.split() if word != "│")


def test_help_describes_commands_and_flags(capsys):
    assert "`mvngrad --version`" in get_help(capsys)
    assert "examples: mvngrad train mnist" in get_help(capsys, "train")
    work = get_help(capsys, "sweep", "work")
    assert work.count("Run what is left of a sweep") == 1, "each description once"
    assert "examples: mvngrad sweep work mnist-5k" in work
    with pytest.raises(SystemExit) as end:
        cli.main(["sweep"])
    assert (end.value.code, "examples:" in capsys.readouterr().out) == (0, True), "no command is a request for help"
    images = get_help(capsys, "train", "cifar100")
    assert "--no-drop-last Whether an epoch's last batch is skipped" in images
    assert "--no-flip Whether half of the images, at random, are flipped horizontally; --no-flip flips none." in images
    assert "else the cache)" in images
    assert "5,000" not in images.partition("--runs")[0]
    assert "--eps-s FLOAT" in images
    assert "the default is the same for both" in images
    reproduce = get_help(capsys, "reproduce")
    assert "5,000 digits of the package" in reproduce
    assert "spike 0.3 s CPU one gradient spike" in reproduce
    assert "table1 63 min GPU ResNet-18 on CIFAR-100" in reproduce
    assert "also takes the folder" in get_help(capsys, "train", "wikitext103").replace("command line ", "")
