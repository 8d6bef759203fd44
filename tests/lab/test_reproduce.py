"""What `make reproduce` runs today."""

import json

import pytest

pytest.importorskip("matplotlib")
from mvngrad.lab import reproduce


def test_the_page_is_self_contained_and_its_verdicts_follow_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "SIZES", [1.0, 1e2, 1e5])
    page = reproduce.main(tmp_path).read_text()
    assert page.count("<svg") == 1
    assert "src=" not in page
    assert page.count("<td>reproduced") == 8
    assert "not reproduced" not in page
    stored = json.loads((tmp_path / "spike.json").read_text())
    assert stored["panels"].keys() == reproduce.PANELS.keys()


def test_a_claim_that_does_not_hold_is_said_not_to(monkeypatch):
    monkeypatch.setattr(reproduce, "SIZES", [1e2])
    monkeypatch.setattr(type(reproduce.LONG_HORIZON), "bound", lambda self, rule: 1e-12)
    verdicts = reproduce.spike(reproduce.LONG_HORIZON)["verdicts"]
    assert [holds for holds, _ in verdicts.values()] == [False, False, True, True]
