"""A result names its code: the commit, and how the working tree differs from it."""

import subprocess

import pytest

from mvngrad_lab.store import environment


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A repository with a package and another file in it."""
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "rule.py").write_text("beta1 = 0.9\n")
    (tmp_path / "secrets.env").write_text("token = 1\n")

    def git(*arguments):
        author = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *author, *arguments], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.delenv("MVNGRAD_COMMIT", raising=False)
    monkeypatch.setattr(environment, "PACKAGE", package)
    monkeypatch.setattr(environment, "LIBRARY", package)
    monkeypatch.setattr(environment, "GIT", ("git", "-C", str(package)))
    return package


def test_a_clean_tree_has_no_changes(package):
    assert environment.get_changes() == ""
    assert not environment.get_commit().endswith("+changes")


def test_changes_contain_only_the_package(package):
    (package / "rule.py").write_text("beta1 = 0.8\n")
    (package.parents[1] / "secrets.env").write_text("token = 2\n")
    (package / "new.py").write_text("password = 3\n")
    diff = environment.get_changes()
    assert "-beta1 = 0.9\n+beta1 = 0.8\n" in diff
    assert "# not in the repository: " in diff
    assert "new.py" in diff
    assert "token" not in diff
    assert "password" not in diff
    assert environment.get_commit().endswith("+changes")


def test_a_long_diff_is_cut(package):
    (package / "rule.py").write_text("x = 1\n" * 300_000)
    diff = environment.get_changes()
    assert len(diff) < environment.LONGEST_DIFF + 100
    assert "# cut off: 2" in diff


def test_without_a_repository_there_are_no_changes(package, monkeypatch):
    monkeypatch.setattr(environment, "GIT", ("git", "-C", str(package / "none")))
    assert environment.get_changes() == ""
    assert environment.get_commit() == "unknown"
