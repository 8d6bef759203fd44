"""The torch.optim contract around the rule: groups, state, dispatch to a backend, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    StateDict,
    _default_to_fused_or_foreach,
    _use_grad_for_differentiable,
)

from mvngrad.optim import eager, foreach as multi_tensor
from mvngrad.rule import CELLS, Hyper, Rule

Group = dict[str, Any]

_HEALTH_CHECK = "_accelerator_graph_capture_health_check"
if not hasattr(Optimizer, _HEALTH_CHECK):  # its name in older releases
    _HEALTH_CHECK = "_cuda_graph_capture_health_check"

OPTIONS = {"eps_s": 1e-16, "beta_mean": None, "z_clip": None}
"""Hyper-parameters that not every cell has, with their defaults in those that do."""


class RuleOptimizer(Optimizer):
    """A cell of the table as a torch optimizer. Use its named subclasses."""

    rule: ClassVar[Rule]
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_s: float | None = None,
        weight_decay: float | None = None,
        *,
        beta_mean: float | None = None,
        z_clip: float | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        """
        Args:
            params: parameters, named parameters or parameter groups.
            lr: learning rate, a number or a 1-element tensor.
            betas: decay of the momentum (and of the mean m), and of the second moment v or variance s.
            eps: added to the root in the denominator.
            eps_s: added to the stored s at every step (default 1e-16), so that the root never falls below
                sqrt(eps_s / (1 - beta2)), a floor that `repr` shows. Variance cells only.
            weight_decay: the plain names add weight_decay * x to the gradient, before every moment (default 0);
                the W names shrink x by 1 - lr * weight_decay, apart from the gradient (default 1e-2).
            beta_mean: decay of the mean m alone; None is betas[0], as in Algorithm 1. MVN-Grad only.
            z_clip: clamp the normalized gradient z to [-z_clip, z_clip], which bounds u likewise for every sequence
                of gradients; None is the paper's rule. Normalize-then-momentum cells only.
            foreach: one kernel an operation for all tensors; None decides as torch.optim does. The CPU has no
                such kernels: there it steps tensor by tensor, which equals it and needs less memory.
            fused: one kernel for the whole step.
            maximize: ascend instead of descending.
            capturable: keep step counts on the device and read nothing back, for CUDA graphs.
            differentiable: let autograd run through the step.
        """
        defaults: Group = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": (1e-2 if self.decoupled else 0.0) if weight_decay is None else weight_decay,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "decoupled_weight_decay": self.decoupled,
        }
        given = {"eps_s": eps_s, "beta_mean": beta_mean, "z_clip": z_clip}
        defaults |= {name: OPTIONS[name] for name in self.rule.options}
        defaults |= {name: value for name, value in given.items() if value is not None}
        super().__init__(params, defaults)

    # Groups

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):  # if not, torch says what is wrong
            self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check(self, group: Group) -> None:
        """Raise a ValueError for a group this cell cannot be stepped with."""
        for name in OPTIONS:
            if name in group and name not in self.rule.options:
                having = ", ".join(rule.name for rule in CELLS if name in rule.options)
                raise ValueError(f"{self.rule.name} has no {name}={group[name]!r}; it belongs to {having}")
        lr, betas = group["lr"], group["betas"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr has {lr.numel()} elements; a tensor lr must have one")
        pair = isinstance(betas, Sequence) and len(betas) == 2
        if not (pair and all(isinstance(beta, (int, float)) for beta in betas)):
            raise ValueError(f"betas={betas!r} is invalid; it must be two numbers in [0, 1)")
        self.rule.check(_hyper(group, lr.detach() if isinstance(lr, Tensor) else lr))
        on = [name for name in ("foreach", "fused", "differentiable") if group[name]]
        if len(on) > 1:
            raise ValueError(f"{on[0]}=True and {on[1]}=True exclude each other; choose one")
        if group["fused"]:
            raise ValueError("fused=True is not available in this version; use foreach=True or leave both None")

    def __repr__(self) -> str:
        text = super().__repr__()
        if not self.rule.variance:
            return text
        floors = ", ".join(f"{_hyper(group, 0.0).floor:.2g}" for group in self.param_groups)
        return f"{text[:-1]}floor under the root, sqrt(eps_s/(1-beta2)): {floors}\n)"

    # State

    def init_state(self) -> None:
        """Create the state of every trainable parameter now instead of at its first step.

        torch.distributed.checkpoint creates missing state by a hidden step with zero gradients, which counts as a
        step and adds eps_s to s. Call this before a checkpoint taken at step 0, and nothing is hidden.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    self._state_of(param, group)

    def _state_of(self, param: Tensor, group: Group) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["step"] = _count(0, param, group)
            for slot in self.rule.slots:
                state[slot] = torch.zeros_like(param, dtype=state_dtype(param), memory_format=torch.preserve_format)
        return state

    def _init_group(
        self, group: Group, params: list[Tensor], grads: list[Tensor], steps: list[Tensor], *slots: list[Tensor]
    ) -> None:
        # The name, and one flat list for each kind of tensor, are what torch.compile looks for: it runs this
        # function instead of tracing it.
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.layout != torch.strided:
                raise ValueError(
                    f"{type(self).__name__} needs dense gradients, not {param.grad.layout}; use sparse=False in the "
                    "embedding, or torch.optim.SparseAdam for these parameters"
                )
            state = self._state_of(param, group)
            params.append(param)
            grads.append(param.grad)
            steps.append(state["step"])
            for slot, tensors in zip(self.rule.slots, slots, strict=True):
                tensors.append(state[slot])

    # The step

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure`, if given, computes the loss anew and its gradients, and the loss is returned."""
        getattr(self, _HEALTH_CHECK)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            steps: list[Tensor] = []
            state: dict[str, list[Tensor]] = {slot: [] for slot in self.rule.slots}
            self._init_group(group, params, grads, steps, *state.values())
            if not params:
                continue
            capturable, differentiable, lr = group["capturable"], group["differentiable"], group["lr"]
            if isinstance(lr, Tensor) and not (capturable or differentiable):
                lr = lr.item()
            hyper = _hyper(group, lr)
            foreach = group["foreach"]
            if foreach is None:
                _, foreach = _default_to_fused_or_foreach(params, differentiable, use_fused=False)
            if foreach and not all(param.is_cpu for param in params):
                multi_tensor.step(self.rule, hyper, params, grads, state, steps, capturable=capturable)
            else:
                eager.step(
                    self.rule, hyper, params, grads, state, steps, capturable=capturable, differentiable=differentiable
                )
        return loss

    # Checkpoints

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict` returned, into copies, keeping the dtype in which this optimizer holds its state.

        A state of another cell, of other shapes, or with invalid hyper-parameters raises a ValueError that says so,
        and nothing is loaded.
        """
        # torch casts every loaded tensor to its parameter's dtype; what it does not know to be a tensor passes.
        last = self.register_load_state_dict_pre_hook(lambda _, loaded: self._checked_and_sealed(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def _checked_and_sealed(self, state_dict: StateDict) -> StateDict:
        if not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError(f"not an optimizer's state_dict: it has keys {list(state_dict)}, not state, param_groups")
        groups, loaded = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in loaded] != [len(group["params"]) for group in groups]:
            sizes = [len(group["params"]) for group in loaded], [len(group["params"]) for group in groups]
            raise ValueError(f"the state_dict's groups hold {sizes[0]} parameters, this optimizer's {sizes[1]}")
        for group in loaded:
            self._check_saved_group(group)
        params = dict(
            zip(
                chain.from_iterable(group["params"] for group in loaded),
                chain.from_iterable(group["params"] for group in groups),
                strict=True,
            )
        )
        sealed = {
            key: self._sealed(params[key], saved) if key in params and saved else saved
            for key, saved in state_dict["state"].items()
        }
        return {**state_dict, "state": sealed}

    def _check_saved_group(self, saved: Group) -> None:
        needed = {"lr", "betas", "eps", "weight_decay", *self.rule.options}
        foreign = OPTIONS.keys() & saved.keys() - needed
        if not needed <= saved.keys() or foreign:
            differs = sorted(foreign or needed - saved.keys())
            raise ValueError(
                f"not a state_dict of {type(self).__name__}: a group {'has' if foreign else 'lacks'} {differs}"
            )
        if saved.get("decoupled_weight_decay", self.decoupled) != self.decoupled:
            kind = "coupled" if self.decoupled else "decoupled"
            raise ValueError(f"not a state_dict of {type(self).__name__}: its weight decay is {kind}")
        self._check({**self.defaults, **saved})

    def _sealed(self, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        if saved.keys() != {"step", *self.rule.slots}:
            raise ValueError(
                f"not a state_dict of {type(self).__name__}: it keeps {sorted({'step', *self.rule.slots})} for each "
                f"parameter, this one {sorted(saved)}"
            )
        step = torch.as_tensor(saved["step"])
        if step.numel() != 1 or not step.item() >= 0:
            raise ValueError(f"corrupted state_dict: step is {saved['step']!r}, not a count")
        for slot in self.rule.slots:
            value = saved[slot]
            if not isinstance(value, Tensor) or value.shape != param.shape:
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"corrupted state_dict: {slot} is {found} for a parameter of {tuple(param.shape)}")
        return {name: _Sealed(value) for name, value in saved.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for param in group["params"]:
                for name, value in self.state.get(param, {}).items():
                    if isinstance(value, _Sealed):
                        self.state[param][name] = value.opened(name, param, group)


@dataclass(frozen=True)
class _Sealed:
    """A loaded value on its way past torch's cast."""

    value: Any

    def opened(self, name: str, param: Tensor, group: Group) -> Tensor:
        if name == "step":
            return _count(float(self.value), param, group)
        return torch.as_tensor(self.value).to(param.device, state_dtype(param), copy=True)


def _count(steps: float, param: Tensor, group: Group) -> Tensor:
    """A step count, on the host unless a graph must capture it."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.tensor(float(steps), dtype=dtype, device=param.device if group["capturable"] else "cpu")


def state_dtype(param: Tensor) -> torch.dtype:
    """Moments are kept in float32 for 16-bit parameters and in the parameter's own dtype otherwise."""
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


def _hyper(group: Group, lr: Any) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        eps_s=group.get("eps_s", 0.0),
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
        beta_mean=group.get("beta_mean"),
        z_clip=group.get("z_clip"),
        maximize=group["maximize"],
    )
