"""Which modules may import which, what an import costs, and that both wheels work in an empty environment."""

import ast
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "mvngrad"
LAB = ROOT / "lab" / "src" / "mvngrad_lab"

# Part of the library -> the parts of the library that it may import.
ALLOWED = {
    "__init__": {"optim"},
    "rule": set(),
    "optim": {"rule", "optim"},
    "optax": {"rule"},
    "diagnostics": {"rule", "optim", "diagnostics"},
    "integrations": {"rule", "optim", "optax", "diagnostics", "integrations"},
}
STANDARD_LIBRARY_ONLY = {"__init__", "rule"}

# Part of the lab -> what it must not import, directly or through another module.
ENGINE = {f"mvngrad_lab.sweep.{name}" for name in ("database", "queue", "stages", "summary", "worker", "local_workers")}
HEAVY = {"torch", "optuna", "tyro", "mvngrad.optim", "mvngrad_lab.training", *ENGINE}
FORBIDDEN = {
    "report/**/*.py": HEAVY,
    "experiments/*/*judge.py": HEAVY,
    "experiments/*/*figure.py": HEAVY,
    "experiments/*/records.py": HEAVY,
    "experiments/__init__.py": {"numpy", *HEAVY},
    "tasks/*/recipe.py": {"numpy", *HEAVY},
    "recipe.py": {"numpy", *HEAVY},
    "store/__init__.py": {"numpy", "mvngrad.diagnostics", *HEAVY},
}
# Part of the lab -> what it must not import directly.
FORBIDDEN_DIRECTLY = {
    "training/**/*.py": {"tyro", "rich", "matplotlib", "jinja2", "optuna", "mvngrad_lab.report", "mvngrad_lab.cli"},
}


def get_imports(path, top_level_only=False):
    """Names of the modules that a file imports, without those imported for type checking only."""
    nodes = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports, so that these tests can see them"
            # `from package import name`: the name may be a module of the package
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif not (top_level_only and isinstance(node, ast.FunctionDef)):
            nodes += ast.iter_child_nodes(node)


def is_in(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def find_modules(name):
    """Files of ours that `import name` runs: the packages above the module, and the module."""
    for source in (LIBRARY.parent, LAB.parent):
        path = source
        for part in name.split("."):
            path = path / part
            if path.is_dir():
                yield path / "__init__.py"
            elif path.with_suffix(".py").exists():
                yield path.with_suffix(".py")


@pytest.mark.parametrize("path", sorted(LIBRARY.rglob("*.py")), ids=lambda path: str(path.relative_to(LIBRARY)))
def test_library_imports_in_one_direction_and_nothing_of_the_lab(path):
    part = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
    for name in get_imports(path):
        package, *inside = name.split(".")
        assert package != "mvngrad_lab", f"{path} must not import {name}"
        if package == "mvngrad":
            imported = inside[0] if inside and inside[0] in ALLOWED else "__init__"
            assert imported in ALLOWED[part] | {"__init__"}, f"{path} must not import {name}"
        elif part in STANDARD_LIBRARY_ONLY:
            assert package in sys.stdlib_module_names, f"{path} must not import {name}"


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_light_parts_of_the_lab_import_nothing_heavy(pattern):
    """In these files imports inside functions count too, except train_all of a records.py; in the modules they import,
    only top-level imports.
    """
    waiting = [(path, path.name == "records.py", path) for path in sorted(LAB.glob(pattern))]
    assert waiting
    seen = set()
    while waiting:
        path, top_level_only, origin = waiting.pop()
        for name in get_imports(path, top_level_only):
            assert not is_in(name, FORBIDDEN[pattern]), f"{origin.relative_to(LAB)} imports {name} (in {path})"
            for module in find_modules(name):
                if module not in seen:
                    seen.add(module)
                    waiting.append((module, True, origin))


@pytest.mark.parametrize("pattern", FORBIDDEN_DIRECTLY)
def test_training_imports_neither_command_nor_report(pattern):
    for path in sorted(LAB.glob(pattern)):
        for name in get_imports(path):
            assert not is_in(name, FORBIDDEN_DIRECTLY[pattern]), f"{path} must not import {name}"


@pytest.mark.parametrize(
    "folder",
    sorted(path for path in (LAB / "experiments").iterdir() if (path / "__init__.py").exists()),
    ids=lambda path: path.name,
)
def test_experiments_do_not_import_each_other(folder):
    ours = f"mvngrad_lab.experiments.{folder.name}"
    others = {path.name for path in folder.parent.iterdir() if path.is_dir()} - {folder.name}
    for path in sorted(folder.rglob("*.py")):
        for name in get_imports(path):
            assert not is_in(name, {f"mvngrad_lab.experiments.{other}" for other in others}), f"{ours}: {name}"


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def get_imported(code, names):
    """The modules among `names` that a new process has imported after running `code`."""
    return run(sys.executable, "-c", f"import sys\n{code}\nprint([n for n in {names} if n in sys.modules])").strip()


def test_importing_the_library_imports_no_framework():
    assert get_imported("import mvngrad", ["torch", "numpy", "jax", "matplotlib"]) == "[]"


def test_the_optimizers_import_nothing_beyond_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import mvngrad; mvngrad.MVNGradW;"
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('mvngrad')))"
    )
    assert run(sys.executable, "-c", code).strip() == "[]"


def test_help_imports_no_torch():
    code = "from mvngrad_lab.cli import main\ntry: main(['--help'])\nexcept SystemExit: print()"
    assert get_imported(code, ["torch", "numpy", "optuna", "matplotlib"]).splitlines()[-1] == "[]"


WITHOUT_PRIVATE_NAMES = """
import sys, types, torch
real = sys.modules["torch.optim.optimizer"]
torch.optim.optimizer = types.SimpleNamespace(**{k: v for k, v in vars(real).items() if not k.startswith("_")})
for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
    hasattr(real.Optimizer, name) and delattr(real.Optimizer, name)
from torch._C._dynamo import guards
tensor_guards = guards.TensorGuards
del guards.TensorGuards
import mvngrad, mvngrad.diagnostics
from mvngrad.optim import private
guards.TensorGuards = tensor_guards  # torch itself needs it
assert all(value is None or value.__module__ == private.__name__ for name, value in vars(private).items() if name in (
    "TensorGuards", "use_grad_for_differentiable", "default_to_fused_or_foreach", "check_capture"))
steps, everywhere = [], []
real.register_optimizer_step_post_hook(lambda *_: everywhere.append(torch.is_grad_enabled()))
x = torch.nn.Parameter(torch.ones(3))
for options in ({}, {"foreach": True}, {"state_dtype": "int8"}):
    optimizer = mvngrad.MVNGradW([x], **options)
    optimizer.register_step_post_hook(lambda *_: steps.append(x.grad_fn))
    for _ in range(2):
        x.grad = torch.ones(3)
        optimizer.step()
assert steps == [None] * 6 and len(everywhere) == 6, (steps, everywhere)
print("works")
"""


def test_private_names_of_torch_are_in_one_place_and_can_be_missing():
    """Only `optim/private.py` names them, and a torch without any of them breaks no import and no step."""
    private = LIBRARY / "optim" / "private.py"
    for path in LIBRARY.rglob("*.py"):
        names = [name for name in get_imports(path, top_level_only=True) if name.startswith("torch.")]
        hidden = [name for name in names if any(part.startswith("_") for part in name.split("."))]
        assert path == private or not hidden, f"{path}: {hidden}"
    assert run(sys.executable, "-c", WITHOUT_PRIVATE_NAMES) == "works\n"


def test_dir_lists_public_names_and_unknown_names_raise():
    import mvngrad

    assert set(mvngrad.__all__) < set(dir(mvngrad))
    with pytest.raises(AttributeError, match="no attribute 'MVNGradX'"):
        mvngrad.MVNGradX  # noqa: B018


# Wheels


def test_both_distributions_have_one_version_and_license():
    import mvngrad
    import mvngrad_lab

    assert mvngrad.__version__ == mvngrad_lab.__version__
    assert f'"mvngrad=={mvngrad.__version__}"' in (ROOT / "lab" / "pyproject.toml").read_text()
    assert f"\nversion: {mvngrad.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ["))
    assert newest.startswith(f"## [{mvngrad.__version__}]")
    assert (ROOT / "LICENSE").read_text() == (ROOT / "lab" / "LICENSE").read_text()


def build(folder, out):
    """Build the sdist, and the wheel from it; return the wheel and the names of the sdist's files."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*-py3-none-any.whl")
    with tarfile.open(sdist) as archive:
        return wheel, {member.name.split("/", 1)[-1] for member in archive.getmembers() if member.isreg()}


SMOKE = """
import importlib.util, pathlib, sys
import mvngrad, torch
assert pathlib.Path(mvngrad.__file__).is_relative_to(sys.prefix), mvngrad.__file__
assert importlib.util.find_spec("mvngrad_lab") is None
import mvngrad.diagnostics
model = torch.nn.Linear(4, 1)
for name in {name for name in mvngrad.__all__ if name[0].isupper()}:
    optimizer = getattr(mvngrad, name)(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
print("works")
"""


@pytest.mark.slow
def test_both_wheels_install_into_an_empty_environment(tmp_path):
    """Empty except for third-party packages, which are borrowed from this environment: they are not tested here."""
    import torch

    wheel, files = build(ROOT, tmp_path / "library")
    lab_wheel, lab_files = build(ROOT / "lab", tmp_path / "lab")
    assert {"LICENSE", "README.md", "pyproject.toml", "src/mvngrad/__init__.py"} <= files
    assert {"LICENSE", "README.md", "pyproject.toml", "src/mvngrad_lab/__init__.py"} <= lab_files
    assert not [name for name in files if "lab" in name]
    venv.create(tmp_path / "empty", with_pip=True)
    bin_folder = tmp_path / "empty" / "bin"
    python = bin_folder / "python"
    site = Path(run(python, "-Ic", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]))
    empty = {"PATH": str(bin_folder), "HOME": str(tmp_path)}

    def install(path):
        run(python, "-I", "-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", path)

    def get_files(package):
        return {str(path.relative_to(site)) for path in (site / package).rglob("*")}

    install(wheel)
    needed = {"mvngrad/py.typed", "mvngrad/rule.py", "mvngrad/optim/backends/cpu/kernel.cpp"}
    assert needed <= get_files("mvngrad")
    assert not [path for path in site.rglob("*") if "lab" in path.name and "mvngrad" in str(path)]
    assert not (bin_folder / "mvngrad").exists()
    assert run(python, "-I", "-c", SMOKE, cwd=tmp_path, env=empty).strip() == "works"

    install(lab_wheel)
    data = {path.suffix for path in map(Path, get_files("mvngrad_lab"))}
    assert {".py", ".typed", ".toml", ".html", ".css"} <= data
    assert len(list(site.glob("mvngrad*.dist-info/licenses/LICENSE"))) == 2
    command = bin_folder / "mvngrad"
    assert "reproduce" in run(command, "--help", cwd=tmp_path, env=empty)
    import mvngrad

    assert run(command, "--version", cwd=tmp_path, env=empty).strip() == f"mvngrad {mvngrad.__version__}"
    run(command, "reproduce", "--quick", "spike", cwd=tmp_path, env=empty)
    assert "MVN-Grad" in (tmp_path / "runs" / "report.html").read_text()
