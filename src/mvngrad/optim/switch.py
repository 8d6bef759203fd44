"""Switch from AdamW to our optimizers and back: the state of one computed from the state of the other.

AdamW stores m, the average of the gradients g, and v, that of g^2. From these and the step count t:

| state | how | exact |
|---|---|---|
| m, v, t | copied | yes |
| s | its expectation for independent gradients of mean 0 | if t = 1 |
| u | m / (sqrt(s/c_v) + eps) | if the root did not change within the memory of u, about 1/(1 - beta1) steps |

s is the average of (g - m)^2 = beta1^2 (g - m_previous)^2. For independent gradients of variance sigma^2 the previous m
has variance r sigma^2 (1 - beta1^(2t-2)), so that

    E[s] = sigma^2 beta1^2 (c_v (1 + r) - r b),    r = (1 - beta1) / (1 + beta1),
    b = (1 - beta2) (beta2^t - beta1^(2t)) / (beta2 - beta1^2),

which is sigma^2 2 beta1^2 / (1 + beta1) after many steps. v/c_v estimates mu^2 + sigma^2 and is taken for sigma^2. So
if gradients have a mean mu, s is at first too large by a factor of 1 + mu^2/sigma^2: the first steps are those of
AdamW, at most 1/beta1 as large, and s has forgotten this after 1/(1 - beta2) steps. v - m^2 would be an estimate of
sigma^2 too, but m averages few gradients: after a rare one, as in the row of a rare token, v - m^2 is small or negative
where s is not, and u would be many times too large (test_rare_gradients_are_not_taken_for_a_mean_without_noise).

To AdamW, both parts of v are known: v/c_v = sigma^2 (1 - w) + (m/c_m)^2, where w sigma^2 is the variance of m/c_m.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mvngrad.optim import checkpoint
from mvngrad.optim.inputs import Group, make_hyper
from mvngrad.optim.optimizer import RuleOptimizer
from mvngrad.rule import ADAM, Hyper, Rule

SHARED = ("lr", "betas", "eps", "weight_decay")
"""Options that AdamW's groups have too. They are loaded, as torch loads them; how a step is computed is not."""


def from_adamw(optimizer: RuleOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state_dict for `optimizer` from one of AdamW or Adam: torch's, ours in any format, or in a framework's files.

    m, v, step counts and what a hook or a wrapper of our AdamW added are copied; s and u are estimated, see
    `mvngrad.optim.switch`. lr, betas, eps and weight_decay of the groups are AdamW's, as whenever a state_dict is
    loaded; change them afterwards. A state_dict of another kind is returned as it is, so that this function can be a
    hook for frameworks that load checkpoints themselves:
    `optimizer.register_load_state_dict_pre_hook(mvngrad.from_adamw)`.

    Raises a ValueError if the groups do not match, or if the weight decay in the averages is of the other kind.

    >>> import mvngrad, torch
    >>> x = torch.nn.Parameter(torch.ones(3))
    >>> x.grad = torch.ones(3)
    >>> adamw, optimizer = torch.optim.AdamW([x]), mvngrad.MVNGradW([x])
    >>> adamw.step()
    >>> optimizer.load_state_dict(mvngrad.from_adamw(optimizer, adamw.state_dict()))
    >>> sorted(optimizer.state[x])
    ['m', 's', 'step', 'u']
    """
    if not isinstance(optimizer, RuleOptimizer) or isinstance(state_dict, torch.optim.Optimizer):
        raise TypeError("from_adamw: pass an optimizer of mvngrad, then the state_dict() of the AdamW that it replaces")
    if not (isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()):
        return state_dict  # load_state_dict says what is wrong
    renamed = checkpoint.rename_torch_state(state_dict)
    states, groups, own_groups = renamed["state"], renamed["param_groups"], optimizer.param_groups
    names = {*chain.from_iterable(saved for saved in states.values() if isinstance(saved, Mapping))}
    is_adam = {*checkpoint.get_state_names(dict.fromkeys(names))} == {*ADAM.state_names}
    if not is_adam and (names or not all("amsgrad" in group for group in groups)):
        return state_dict
    checkpoint.check_group_sizes(groups, own_groups)
    new_states, new_groups = {}, []
    for saved, own in zip(groups, own_groups, strict=True):
        _check_group(optimizer, saved, own)
        group = _make_group(saved, own)
        new_groups.append(group)
        hyper, rule = make_hyper(group, 0.0), optimizer.get_rule(group)
        for key in saved["params"]:
            if state := states.get(key):
                new_states[key] = checkpoint.get_other_entries(state) | _from_moments(rule, hyper, state)
    return {**renamed, "state": new_states, "param_groups": new_groups}


def to_adamw(optimizer: RuleOptimizer) -> dict[str, Any]:
    """A state_dict for torch.optim.AdamW (Adam, of a class without W) from the state of any of our optimizers.

    m, v and step counts are copied if they are stored; otherwise m is u times its root, and v is estimated from s and
    m, which is noisy if betas[0] is near 0. `mvngrad.convert_state_dict` makes one for `mvngrad.AdamW` of it. The low
    bits of master weights, which torch's class does not have, are left out.
    """
    if not isinstance(optimizer, RuleOptimizer):
        raise TypeError(f"to_adamw: pass an optimizer of mvngrad; got {type(optimizer).__name__}")
    state_dict = optimizer.state_dict()
    states, groups = {}, []
    for saved, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        extra = {name: value for name, value in saved.items() if name not in optimizer.defaults}
        hyper, rule = make_hyper(own, 0.0), optimizer.get_rule(own)
        shared = {name: saved[name] for name in (*SHARED, "maximize", "capturable", "decoupled_weight_decay")}
        shared["weight_decay"] = hyper.weight_decay  # over max_lr with decouple_lr, which torch does not have
        unset = {"amsgrad": False, "foreach": None, "fused": None, "differentiable": False}
        groups.append({**extra, **shared, **unset})
        for key, param in zip(saved["params"], own["params"], strict=True):
            if state := state_dict["state"].get(key):
                states[key] = _to_moments(rule, hyper, state, param)
    return {**state_dict, "state": states, "param_groups": groups}


def _check_group(optimizer: RuleOptimizer, saved: Group, own: Group) -> None:
    """Raise a ValueError if AdamW averaged other gradients than this optimizer does, or has other master weights."""
    name = type(optimizer).__name__
    decoupled = saved.get("decoupled_weight_decay", optimizer.decoupled)
    if decoupled != optimizer.decoupled and saved["weight_decay"]:
        saved_is, own_is = ("is not", "is") if decoupled else ("is", "is not")
        other = f"{name}W" if decoupled else name.removesuffix("W")
        raise ValueError(
            f"weight_decay={saved['weight_decay']} of the state_dict {saved_is} part of its averages of gradients, and "
            f"in {name} it {own_is}: load it into mvngrad.{other}"
        )
    maximize = saved.get("maximize", False)
    if maximize != own["maximize"]:
        both = f"the state_dict has maximize={maximize}, and {name} has maximize={own['maximize']}"
        raise ValueError(f"{both}: make the optimizer with maximize={maximize}")
    bits = saved.get("master_bits") or own["master_bits"]
    if bits != own["master_bits"]:
        both = f"the state_dict has master_bits={bits}, and {name} has master_bits={own['master_bits']}"
        raise ValueError(f"{both}: make the optimizer with master_bits={bits}")


def _make_group(saved: Group, own: Group) -> Group:
    """The optimizer's own group with the options, the parameters and any extra keys of AdamW's."""
    group = {**own, "state_dtype": checkpoint.get_dtype_name(own["state_dtype"], as_floats=True)}
    group |= {name: saved[name] for name in (*SHARED, "params")}
    group |= {name: value for name, value in saved.items() if name not in (*own, "amsgrad")}
    if own["rounding_seed"] is None:  # as a hook of our AdamW this also gets AdamW's own state: keep its random bits
        group["rounding_seed"] = saved.get("rounding_seed")
    decay = saved["weight_decay"] / (saved["max_lr"] if saved.get("decouple_lr") else 1)  # the share of x at lr = 1
    group["weight_decay"] = decay * (own["max_lr"] if own["decouple_lr"] else 1)
    return group


def _variance_factor(hyper: Hyper, t: float) -> float:
    """E[s] / sigma^2 after t steps, without eps_s: see the module's docstring."""
    beta2, q, r = hyper.beta2, hyper.mean_decay**2, (1 - hyper.mean_decay) / (1 + hyper.mean_decay)
    is_limit = math.isclose(beta2, q, rel_tol=1e-6)  # where the quotient is mostly rounding
    b = (1 - beta2) * (t * beta2 ** (t - 1) if is_limit else (beta2**t - q**t) / (beta2 - q))
    return float(q * ((1 - beta2**t) * (1 + r) - r * b))


def _from_moments(rule: Rule, hyper: Hyper, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a cell from AdamW's m, v and step, as floats."""
    t = checkpoint.parse_steps(saved["step"])
    new = checkpoint.load_wide(("m", "v"), checkpoint.unpack_blocks(saved))
    m, v = new["m"], new["v"]
    if t == 0:
        return {"step": saved["step"], **{name: torch.zeros_like(m) for name in rule.state_names}}
    c_m, c_v, c_mean = (1 - beta**t for beta in (hyper.beta1, hyper.beta2, hyper.mean_decay))
    if hyper.mean_decay != hyper.beta1:
        new["m"] = m * (c_mean / c_m)
    if rule.centered:
        new["s"] = v * (_variance_factor(hyper, t) / c_v) + hyper.floor**2 * c_v  # the latter is what eps_s added
    if rule.momentum_last:
        u = m / ((new[rule.normalizer] / c_v).sqrt() + hyper.eps)
        u = torch.where(m == 0, torch.zeros_like(u), u)  # 0/0 without any epsilon
        new["u"] = u if hyper.z_clip is None else u.clamp(-hyper.z_clip * c_m, hyper.z_clip * c_m)
    return {"step": saved["step"], **{name: new[name] for name in rule.state_names}}


def _to_moments(rule: Rule, hyper: Hyper, saved: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """AdamW's state from that of a cell."""
    t = checkpoint.parse_steps(saved["step"])
    values = checkpoint.load_wide(rule.state_names, checkpoint.unpack_blocks(saved))
    m = v = torch.zeros_like(values[rule.state_names[0]])
    if t:
        c_m, c_v = 1 - hyper.beta1**t, 1 - hyper.beta2**t
        if "m" in values and hyper.mean_decay == hyper.beta1:
            m = values["m"]
        else:  # u decays with beta1, as AdamW's m does
            m = values["u"] * ((values[rule.normalizer] / c_v).sqrt() + hyper.eps)
        if "v" in values:
            v = values["v"]
        else:
            variance = (values["s"] - hyper.floor**2 * c_v).clamp(min=0) / _variance_factor(hyper, t)
            w = (1 - hyper.beta1) * (2 - c_m) / ((1 + hyper.beta1) * c_m)
            v = (variance * (1 - w) + (m / c_m).square()) * c_v
    both = {"exp_avg": m, "exp_avg_sq": v}
    as_param = {name: torch.view_as_complex(value) if param.is_complex() else value for name, value in both.items()}
    return {"step": torch.tensor(t, dtype=torch.float32, device="cpu"), **as_param}
