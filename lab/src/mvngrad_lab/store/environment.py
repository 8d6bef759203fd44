"""The machine, versions and code that a result was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import mvngrad

PACKAGE = Path(__file__).parents[1]
LIBRARY = Path(mvngrad.__file__).parent
GIT = ("git", "-C", str(PACKAGE))
LONGEST_DIFF = 1_000_000
"""Characters."""


def get_commit(*parts: Path) -> str:
    """The commit of the working tree, "+changes" if the packages or `parts` differ; MVNGRAD_COMMIT overrides it."""
    if override := os.environ.get("MVNGRAD_COMMIT"):
        return override
    try:
        _require_repository()
        head = _git("rev-parse", "--short=12", "HEAD").strip()
        dirty = _git("status", "--porcelain", "--", str(PACKAGE), str(LIBRARY), *map(str, parts))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if dirty else "")


def get_changes() -> str:
    """How the packages differ from their commit, as a diff; "" if they do not, or without a repository.

    Files that git does not track are only named: results are shared, and such files may be private.
    """
    try:
        _require_repository()
        diff = _git("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--", str(PACKAGE), str(LIBRARY))
        untracked = _git("ls-files", "--others", "--exclude-standard", "--", str(PACKAGE), str(LIBRARY)).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return ""
    if len(diff) > LONGEST_DIFF:
        diff = f"{diff[:LONGEST_DIFF]}\n# cut off: {len(diff)} characters in all\n"
    return diff + "".join(f"# not in the repository: {name}\n" for name in untracked)


def _require_repository() -> None:
    """Raise CalledProcessError unless git tracks the package; a repository may only contain its environment."""
    _git("ls-files", "--error-unmatch", "__init__.py")


def _git(*arguments: str) -> str:
    done = subprocess.run([*GIT, *arguments], capture_output=True, encoding="utf-8", errors="replace", check=True)
    return done.stdout


def processor() -> str:
    """The model name of the CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def get_environment(device: str = "cpu", *parts: Path) -> dict[str, Any]:
    """Device, threads, versions and commit."""
    import torch

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),  # not torch's class, which a checkpoint cannot hold
        "python": platform.python_version(),
        "commit": get_commit(*parts),
    }
