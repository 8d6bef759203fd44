"""What v, s and z are in a stationary regime, against closed forms, and the verdicts on them."""

import pytest

from mvngrad_lab.experiments.moments import run
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, REPRODUCED, find_judges

JUDGES = find_judges()


@pytest.fixture(scope="module")
def result():
    return run.run(run.make_recipe(True, None), None, lambda share: None)


def test_claims_are_judged_by_the_simulation(result):
    expected = {
        "v": REPRODUCED, "s": CAVEAT, "sign-collapse": REPRODUCED, "preconditioner": CAVEAT, "z-bound": REPRODUCED,
    }  # fmt: skip
    verdicts = {claim: JUDGES[f"moments-{claim}"](result) for claim in expected}
    assert {claim: verdict.status for claim, verdict in verdicts.items()} == expected
    assert all(verdict.strip for verdict in verdicts.values())


def test_a_variance_of_another_size_is_not_reproduced(result):
    rows = [{**row, "s": 1.5 * row["s"], "z": row["z"] / 2, "sign_error": 0.1} for row in result["rows"]]
    for claim in ("s", "sign-collapse", "preconditioner"):
        assert JUDGES[f"moments-{claim}"]({**result, "rows": rows}).status == NOT_REPRODUCED


def test_z_comes_close_to_its_bound_where_gradients_are_constant(result):
    assert max(row["largest"] / row["bound"] for row in result["largest"]) > 0.9
