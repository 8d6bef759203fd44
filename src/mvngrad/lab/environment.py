"""What a number was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]


def commit(*parts: Path) -> str:
    """The commit of the working tree, "+changes" if the package or `parts` differ; else what MVNGRAD_COMMIT says."""
    if given := os.environ.get("MVNGRAD_COMMIT"):
        return given
    git = ["git", "-C", str(PACKAGE)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "rule.py"], capture_output=True, check=True)  # ours?
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        status = [*git, "status", "--porcelain", "--", str(PACKAGE), *map(str, parts)]
        dirty = subprocess.run(status, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if dirty.stdout else "")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment(device: str = "cpu", *parts: Path) -> dict[str, Any]:
    """Device, threads, versions and commit."""
    import torch

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(*parts),
    }
