"""Who may import whom, what an import costs, and that the wheel works by itself."""

import ast
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mvngrad"

LAB = ROOT / "lab" / "src" / "mvngrad_lab"

# Package of the library -> the packages of the library that it may import.
ALLOWED = {
    "__init__": {"optim"},
    "rule": set(),
    "optim": {"rule", "optim"},
    "optax": {"rule"},
    "diagnostics": {"rule", "optim", "diagnostics"},
}
STANDARD_LIBRARY_ONLY = {"__init__", "rule"}
# Part of the lab -> what it must not import.
HEAVY = {"torch", "optuna", "tyro", "mvngrad_lab.training", "mvngrad_lab.sweep", "mvngrad.optim"}
FORBIDDEN = {
    "report": HEAVY,
    "experiments/*/judge.py": HEAVY,
    "experiments/*/figure.py": HEAVY,
    "tasks/*/recipe.py": {"numpy", *HEAVY},
    "training_recipe.py": {"numpy", *HEAVY},
    "recipe.py": {"numpy", "mvngrad", *HEAVY},
    "experiments/__init__.py": {"numpy", *HEAVY},
    "store/__init__.py": {"numpy", "mvngrad.diagnostics", *HEAVY},
    "training": {"tyro", "rich", "matplotlib", "jinja2", "optuna", "mlxtend", "mvngrad_lab.report", "mvngrad_lab.cli"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room is entered"
            if node.module == "mvngrad":
                yield from (f"mvngrad.{alias.name}" for alias in node.names)
            else:
                yield node.module


def room(dotted):
    parts = dotted.split(".")
    inside = parts[1] if len(parts) > 1 else "__init__"
    return inside if (SOURCE / inside).is_dir() or (SOURCE / f"{inside}.py").exists() else "__init__"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_library_imports_in_one_direction_and_nothing_of_the_lab(path):
    here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for name in imports(path):
        assert name.split(".")[0] != "mvngrad_lab", f"{here} must not import {name}"
        if name.split(".")[0] == "mvngrad":
            assert room(name) in ALLOWED[here], f"{here} must not import {name}"
        elif here in STANDARD_LIBRARY_ONLY:
            assert name.split(".")[0] in sys.stdlib_module_names, f"{here} must not import {name}"


@pytest.mark.parametrize("part", FORBIDDEN)
def test_light_parts_of_the_lab_import_nothing_heavy(part):
    places = sorted(LAB.glob(part))
    assert places
    for path in (path for place in places for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])):
        for name in imports(path):
            heavy = [banned for banned in FORBIDDEN[part] if name == banned or name.startswith(f"{banned}.")]
            assert not heavy, f"{path.relative_to(LAB)} must not import {name}"


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_importing_the_package_imports_no_framework():
    code = "import sys, mvngrad; print([n for n in ('torch', 'numpy', 'jax', 'matplotlib') if n in sys.modules])"
    assert run(sys.executable, "-c", code).strip() == "[]"


def test_beyond_torch_the_optimizers_import_only_their_own_small_files():
    code = (
        "import sys, torch; before = set(sys.modules); import mvngrad; mvngrad.MVNGradW;"
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('mvngrad')))"
    )
    assert run(sys.executable, "-c", code).strip() == "[]"


def test_public_names():
    import mvngrad

    assert set(mvngrad.__all__) < set(dir(mvngrad))
    with pytest.raises(AttributeError, match="no attribute 'MVNGradX'"):
        mvngrad.MVNGradX  # noqa: B018


def test_the_wheel_installs_into_an_empty_environment(tmp_path):
    """Empty but for torch and what torch needs, which are lent from here: they are not what is tested."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("mvngrad-*-py3-none-any.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    files = {str(path.relative_to(site)) for path in (site / "mvngrad").rglob("*")}
    assert {"mvngrad/py.typed", "mvngrad/rule.py", "mvngrad/optim/optimizer.py"} <= files
    assert not [name for name in files if "lab" in name]
    import torch

    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    smoke = """
import mvngrad, pathlib, pkgutil, sys, torch
assert [room.name for room in pkgutil.walk_packages(mvngrad.__path__, "mvngrad.", onerror=lambda name: None)]
assert pathlib.Path(mvngrad.__file__).is_relative_to(sys.prefix), mvngrad.__file__
model = torch.nn.Linear(4, 1)
for name in set(mvngrad.__all__) - {"convert_state_dict"}:
    optimizer = getattr(mvngrad, name)(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
print("works")
"""
    assert run(python, "-c", smoke, cwd=tmp_path).strip() == "works"
