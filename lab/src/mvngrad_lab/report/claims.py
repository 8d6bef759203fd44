"""Every claim of the paper that has a number or a direction, with our rule for a verdict.

They are in the claims.toml of each experiment's folder, in groups, which are headings of the report. A field of a group
holds for each of its claims. `order` sorts the groups of all files.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from mvngrad_lab.discovery import EXPERIMENTS, find_topics

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


PAPER, TRANSFERRED, OURS = KINDS = ("the paper's", "transferred", "ours")
"""Transferred: a claim of the paper, tested on a stand-in or at a smaller size."""
ARXIV = "https://arxiv.org/abs/2602.10204"
NUMBERS = {
    "app: compute resources": "Appendix C.1",
    "app:mnist-vgap": "Appendix C.3",
    "ass:stationary": "Assumption 3.1",
    "cor:multi_spike": "Corollary 3.3.1",
    "eq:cov_bound": "Equation 17",
    "eq:one_step_descent": "Equation 7",
    "fig:loss_largebatch": "Figure 1b",
    "fig:loss_smallbatch": "Figure 1a",
    "fig:robust-train-cifar1024": "Figure 5e",
    "fig:robust-train-owt": "Figure 5f",
    "fig:robust-val": "Figure 5",
    "fig:robust-val-cifar1024": "Figure 5b",
    "fig:robust-val-cifar128": "Figure 5a",
    "fig:robust-val-owt": "Figure 5c",
    "fig:thm_ssr_1": "Figure 3",
    "fig:thm_ssr_1_1": "Figure 3a",
    "fig:thm_ssr_1_2": "Figure 3b",
    "fig:thm_vgap_ada_prop": "Figure 2",
    "fig:thm_vgap_ada_prop_cifar": "Figure 4",
    "lem:laprop_finite_horizon": "Lemma B.4",
    "lem:mvn_to_hb_stoch": "Lemma B.1",
    "prop:approx_mean": "Proposition 3.2",
    "rem:adam_bound": "Remark 3.1",
    "subsec:cond-moments": "Section 3.1",
    "subsec:general-convergence": "Section 3.4",
    "subsec:lm": "Section 4.2",
    "subsec:var-vs-second": "Section 3.3",
    "tab:GPT-Open-loss": "Table 2",
    "tab:GPT-Wiki": "Table 2",
    "tab:cifar-bs1024": "Table 1",
    "tab:cifar-bs128": "Table 1",
    "tab:hparams-cifar-bs1024": "Table 5",
    "tab:hparams-cifar-bs128": "Table 4",
    "tab:hparams-gpt-owt": "Table 7",
    "tab:hparams-gpt-wiki": "Table 6",
    "thm:laprop_omega_d_eps2": "Theorem B.5",
    "thm:mvngrad_convergence": "Theorem 3.5",
    "thm:separation_MVN-Grad_LaProp_smallvar": "Theorem 3.4",
    "thm:spike": "Theorem 3.3",
    "thm:var_adabelief_mvngrad": "Theorem 3.1",
}
"""Label in the paper's source -> number in print, as docs/paper-map.md counts them."""


@dataclass(frozen=True)
class Claim:
    id: str
    group: str
    where: tuple[str, ...]
    """Labels of the paper; none if the claim is ours."""
    says: str
    value: str
    """The paper's number or direction."""
    rule: str
    target: str
    """The name of the experiment, table, sweep or benchmark that decides it."""
    needs: str = ""
    """What it takes to decide it, if `mvngrad reproduce` cannot."""
    known: bool = False
    """Whether the rule was written or changed after a first look at the numbers; else before."""
    values: dict[str, float] = field(default_factory=dict)
    """The paper's numbers by optimizer, if it has a column of them."""
    kind: str = PAPER
    """One of KINDS; claims without labels are ours."""


@cache
def load_claims() -> tuple[Claim, ...]:
    """All claims, sorted by the order of their groups."""
    groups = sorted((group for topic in find_topics() for group in _read(topic)), key=_order)
    claims = []
    for group in groups:
        shared = {name: value for name, value in group.items() if name not in ("name", "order", "claim")}
        for entry in group["claim"]:
            fields = {"where": (), **shared, **entry, "group": group["name"]}
            kind = fields.get("kind", PAPER if fields["where"] else OURS)
            claims.append(Claim(**{**fields, "where": tuple(fields["where"]), "kind": kind}))
    return tuple(claims)


def find_values(claim: str) -> dict[str, float]:
    """The paper's numbers of a claim, by optimizer."""
    return next(each.values for each in load_claims() if each.id == claim)


def _read(topic: str) -> list[dict[str, Any]]:
    path = files(f"{EXPERIMENTS}.{topic}").joinpath("claims.toml")
    return list(tomllib.loads(path.read_text(encoding="utf-8"))["group"]) if path.is_file() else []


def _order(group: dict[str, Any]) -> float:
    return float(group.get("order", 1e6))
