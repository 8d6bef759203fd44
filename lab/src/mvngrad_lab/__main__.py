"""The command `mvngrad`, also as `python -m mvngrad_lab`."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from mvngrad_lab.cli import main as command
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("mvngrad"):
            raise
        print(
            f"mvngrad: the command needs {missing.name}, which the optimizers do not: pip install mvngrad-lab",
            file=sys.stderr,
        )
        return 1
    return command()


if __name__ == "__main__":
    sys.exit(main())
