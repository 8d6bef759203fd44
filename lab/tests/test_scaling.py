"""The arithmetic of larger models: it follows from what was measured, and the page says the same numbers."""

import json
import re
from pathlib import Path

import pytest
import torch

import mvngrad
from benchmarks import scaling
from benchmarks.models import MODELS
from benchmarks.traffic import state_bytes

ROOT = Path(__file__).parents[2]
STATES = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": "int8"}
B7 = next(model for model in scaling.LARGER if model.name == "7B")


@pytest.fixture(scope="module")
def measured():
    return json.loads((ROOT / "results" / "step-cuda.json").read_text())


@pytest.fixture(scope="module")
def costs(measured):
    return {(cost.form, cost.state_dtype): cost for cost in scaling.load_costs(measured)}


def test_the_result_is_that_of_the_measurement_at_hand(tmp_path):
    (tmp_path / "step-cuda.json").write_text((ROOT / "results" / "step-cuda.json").read_text())
    scaling.main(["--out", str(tmp_path)])
    assert (tmp_path / "scaling.md").read_text() == (ROOT / "results" / "scaling.md").read_text(), (
        "step-cuda.json is newer: run `python -m benchmarks.scaling`, and copy its tables to docs/concepts/scaling.md"
    )


def test_the_page_has_the_tables_of_the_result(measured):
    page = (ROOT / "docs" / "concepts" / "scaling.md").read_text()
    for title, table in scaling.tables(measured).items():
        assert table in page, title


def test_the_numbers_in_the_pages_sentences_are_those_of_the_result(measured, costs):
    page = " ".join((ROOT / "docs" / "concepts" / "scaling.md").read_text().split())
    adam, mvn = (costs[form, "float32"] for form in ("Adam, AdaBelief, LaProp", "MVN-Grad"))
    more = [(mvn.state(B7, ranks) - adam.state(B7, ranks)) / 1e9 for ranks in (8, 64)]
    assert f"{more[0]:.2g} GB per rank on 8 ranks, and {more[1]:.2g} GB on 64 ranks" in page
    (small,) = (row for row in measured["models"]["resnet18"]["decoupled"] if row["name"] == "MVNGradW fused")
    linear = 1e3 * mvn.seconds * sum(map(scaling.math.prod, MODELS["resnet18"]))
    assert f"in {small['graph_milliseconds']:.3f} ms, where {linear:.3f} ms would be proportional" in page
    assert f"copies {measured['copy_bytes_per_second'] / 1e12:.2f} TB/s" in page
    b70 = scaling.LARGER[-1]
    room = {key: 141e9 - cost.held(b70, 8) for key, cost in costs.items()}
    assert all((left > 15e9) == (state_dtype != "float32") for (_, state_dtype), left in room.items())
    smaller = [left / 1e9 for (_, state_dtype), left in room.items() if state_dtype != "float32"]
    assert f"leave {min(smaller):.0f} to {max(smaller):.0f} GB per GPU" in page
    assert room["MVN-Grad", "float32"] < 0
    assert all(cost.held(b70, 64) < 100e9 for cost in costs.values())


def test_a_rank_has_its_part_and_every_tensor(costs):
    cost = costs["MVN-Grad", "float32"]
    assert cost.state(B7, 8) == pytest.approx(7e9 * 12 / 8, rel=1e-5)
    assert cost.held(B7, 64) == pytest.approx(7e9 * 20 / 64, rel=1e-5)
    assert cost.device(B7, 8) == pytest.approx(8 * cost.device(B7, 64))
    assert cost.checkpoint(B7) == pytest.approx(7e9 * 16, rel=1e-5)
    assert costs["MVN-Grad, lean", "bf16"].checkpoint(B7) == pytest.approx(7e9 * 8, rel=1e-5)
    assert costs["MVN-Grad", "int8"].checkpoint(B7) == 7e9 * 16
    assert scaling.basis(cost, B7, 8) == "7x"
    assert scaling.basis(cost, B7, 512) == "host"


def test_the_measured_models_come_out_as_they_were_measured(measured, costs):
    (row,) = (row for row in measured["models"]["gpt2-124m"]["decoupled"] if row["name"] == "MVNGradW fused")
    (many,) = (row for row in measured["models"]["tiny-2000"]["decoupled"] if row["name"] == "MVNGradW fused")
    cost, size = costs["MVN-Grad", "float32"], sum(map(scaling.math.prod, MODELS["gpt2-124m"]))
    one = scaling.Model("124M", size, layers=8)
    assert one.tensors == len(MODELS["gpt2-124m"])
    assert 1e3 * cost.device(one, 1) == pytest.approx(row["graph_milliseconds"])
    assert 1e6 * cost.host(one) == pytest.approx(row["host_microseconds"])
    thousands = cost.host_seconds + 2000 * cost.host_seconds_of_tensor
    assert 1e6 * thousands == pytest.approx(many["host_microseconds"])


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize(
    ("form", "name", "options"),
    [
        ("Adam, AdaBelief, LaProp", "LaPropW", {}),
        ("MVN-Grad", "MVNGradW", {}),
        ("MVN-Grad, lean", "MVNGradW", {"lean": True}),
    ],
)
def test_the_bytes_of_state_are_those_of_the_optimizers(costs, form, name, options, kind):
    weight = torch.nn.Parameter(torch.zeros(512, 512))
    optimizer = getattr(mvngrad, name)([weight], state_dtype=STATES[kind], **options)
    optimizer.init_state()
    assert state_bytes(optimizer) / weight.numel() == pytest.approx(costs[form, kind].state_bytes, abs=1e-3)


def test_every_optimizer_and_state_has_a_line(costs):
    assert len(costs) == 10
    assert {kind for form, kind in costs if form == "torch AdamW"} == {"float32"}
    rows = re.findall(r"^\| (?:MVN-Grad|torch|Adam).*$", (ROOT / "results" / "scaling.md").read_text(), re.MULTILINE)
    assert len(rows) == 10 * (1 + len(scaling.LARGER))
