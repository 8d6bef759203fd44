"""Who tries more finds more: all optimizers have as many runs, in the grid and in what a store has of it."""

from collections import Counter
from dataclasses import replace

import pytest
import sweep_toy
from sweep_toy import OPTIMIZERS, each, second, staged, sweep, worked

from mvngrad_lab.sweep import export, plan
from mvngrad_lab.sweep.records import by_key
from mvngrad_lab.sweep.worker import identity


def two(**values):
    return [recipe for recipe in each(**values) if recipe.optimizer in ("adam", "mvngrad")]


def test_unequal_budgets_are_refused_unless_told(place, said):
    with pytest.raises(ValueError, match=r"2 runs of mvngrad and 1 of .*--unequal"):
        plan.init(place, "sweep_toy:unfair", tell=said.append)
    assert not place.file.exists()
    assert len(plan.init(place, "sweep_toy:unfair", unequal=True, tell=said.append)) == 5


def test_a_changed_grid_must_give_all_as_many_runs_together_with_what_was_tried_before(place, said, monkeypatch):
    plan.init(place, "sweep_toy:small", tell=said.append)
    other = [r if r.optimizer != "mvngrad" else replace(r, lr=r.lr + 0.5) for r in sweep_toy.small().stages[0]]
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep(other))
    with pytest.raises(ValueError, match=r"stage 1 of the store has 6 runs of mvngrad and 3 of .*another storage"):
        plan.init(place, "sweep_toy:small", tell=said.append)
    assert len(plan.init(place, "sweep_toy:small", unequal=True, tell=said.append)) == 3


def test_nothing_is_chosen_among_what_is_not_in_the_grid_any_more(opened, tmp_path, said, monkeypatch):
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep(two(lr=(2.0, 3.0)), second))
    queue = opened("small")
    assert worked(queue, tmp_path, said) == {"finished": 8}
    assert {record.settings["lr"] for record in plan.select(queue).values()} == {3.0}
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep(two(lr=(1.0, 2.0)), second))
    plan.init(queue.address, queue.name, tell=said.append)
    assert "6 that are there are not in the grid any more; they stay, and nothing is chosen" in said[-1]
    assert worked(queue, tmp_path, said) == {"finished": 6}
    assert {record.settings["lr"] for record in plan.select(queue).values()} == {2.0}
    assert "6 more in the store are not in the grid any more" in "\n".join(export.selection(queue))
    assert len(plan.rerun(queue, 2)) == 2
    assert {record.settings["lr"] for record in queue.records() if record.status == "waiting"} == {2.0}
    assert len(export.rows(queue)) == 16


def test_a_worker_whose_code_has_another_grid_runs_that_of_the_store(opened, tmp_path, said, monkeypatch):
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep(two(lr=(1.0, 2.0))))
    queue, before = opened("small"), sweep_toy.small
    monkeypatch.setattr(sweep_toy, "small", sweep_toy.unfair)
    assert worked(queue, tmp_path, said) == {"finished": 4}
    assert "warning: this code has another grid than the store; `mvngrad sweep init" in "\n".join(said)
    said.clear()
    monkeypatch.setattr(sweep_toy, "small", before)
    assert worked(queue, tmp_path, said) == {}
    assert said == []


def cured(recipe, **given):
    """Runs that raise until somebody mends them."""
    if recipe.fate == "raises" and not CURED:
        raise MemoryError(f"lr={recipe.lr}")
    return sweep_toy.run(replace(recipe, fate=""), **given)


CURED = []


@pytest.fixture
def breaking(monkeypatch):
    """A sweep of two stages; of mvngrad, all of the first stage raises."""
    first = [replace(r, fate="raises" if r.optimizer == "mvngrad" else "") for r in two(lr=(1.0, 2.0))]
    monkeypatch.setattr(sweep_toy, "cured", cured, raising=False)
    monkeypatch.setattr(sweep_toy, "small", lambda: replace(sweep(first, second), run="sweep_toy:cured"))
    yield
    CURED.clear()


def test_no_stage_and_no_seeds_are_chosen_before_what_raised_is_tried_again(breaking, opened, tmp_path, said):
    queue = opened("small")
    with pytest.raises(RuntimeError, match=r"2 runs of sweep_toy:small raised an error.*`mvngrad sweep retry"):
        worked(queue, tmp_path, said)
    with pytest.raises(RuntimeError, match="`mvngrad sweep retry"):
        plan.rerun(queue, 2)
    plan.retry(queue)
    CURED.append(True)
    assert worked(queue, tmp_path, said) == {"finished": 2 + 4}
    assert stages(queue)["2"] == {"adam": 2, "mvngrad": 2}


def test_who_has_nothing_to_go_on_with_is_not_left_out_of_a_stage_silently(breaking, opened, tmp_path, said):
    queue = opened("small")
    with pytest.raises(RuntimeError, match="retry"):
        worked(queue, tmp_path, said)
    plan.retry(queue)
    with pytest.raises(ValueError, match=r"stage 2 of the store has 2 runs of .* and 0 of mvngrad.*--unequal"):
        worked(queue, tmp_path, said)
    plan.init(queue.address, queue.name, unequal=True, tell=said.append)
    assert worked(queue, tmp_path, said) == {"finished": 2}
    assert stages(queue)["2"] == {"adam": 2}


def test_a_stage_that_is_queued_stays_as_it_is(opened, said):
    """Whatever the third try of a run finds that raised twice."""
    queue = opened("staged")
    unlucky = queue.records()[0].key

    def end_all(raising):
        while (claim := queue.claim(identity())) is not None:
            if raising and claim.record.key == unlucky:
                queue.finish(claim, {"status": "raised", "reason": "no luck"}, None)
            else:
                queue.finish(claim, {"status": "finished"}, 0.0 if claim.record.key == unlucky else 9.0)

    end_all(raising=True)
    plan.retry(queue)
    end_all(raising=True)
    assert len(plan.fill(queue, staged())) == 8
    plan.retry(queue)
    end_all(raising=False)
    assert plan.select(queue)["adam"].key == unlucky
    assert plan.fill(queue, staged()) == []
    assert stages(queue)["2"] == dict.fromkeys(OPTIMIZERS, 2)


def stages(queue):
    """How many configurations each optimizer has in each."""
    found = {}
    for record in by_key(queue.records()).values():
        found.setdefault(record.stage, Counter())[record.settings["optimizer"]] += 1
    return found
