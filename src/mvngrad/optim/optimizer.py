"""The torch.optim contract around the rule: groups, state, dispatch to a backend, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    StateDict,
    _default_to_fused_or_foreach,
    _use_grad_for_differentiable,
)

from mvngrad.optim import checkpoint, compiled, eager, foreach as multi_tensor
from mvngrad.optim.gather import Gathered
from mvngrad.optim.state import OPTIONS, Group, fusable, kernel_takes, state_dtype, step_count
from mvngrad.rule import CELLS, Hyper, Rule

if TYPE_CHECKING:
    from mvngrad.optim.launch import Launches

_HEALTH_CHECK = "_accelerator_graph_capture_health_check"
if not hasattr(Optimizer, _HEALTH_CHECK):  # its name in older releases
    _HEALTH_CHECK = "_cuda_graph_capture_health_check"


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
            fused: one kernel for the whole step: on CUDA in Triton, which None chooses where it can; on the CPU by
                torch.compile, which needs a C++ compiler and is chosen by True only.
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
            for name in (*OPTIONS, "weight_decay"):  # None is the default, as in the constructor
                if param_group.get(name, ...) is None:
                    del param_group[name]
            self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check(self, group: Group) -> None:
        """Raise a ValueError for a group this cell cannot be stepped with."""
        name = type(self).__name__
        for option in OPTIONS:
            if option in group and option not in self.rule.options:
                having = ", ".join(rule.name for rule in CELLS if option in rule.options)
                raise ValueError(f"{name} has no {option}={group[option]!r}; it belongs to {having}")
        if group["decoupled_weight_decay"] != self.decoupled:
            raise ValueError(f"{name}: decoupled_weight_decay is the name's to say: those ending in W decouple it")
        lr, betas = group["lr"], group["betas"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"{name}: lr has {lr.numel()} elements; a tensor lr must have one")
        pair = isinstance(betas, Sequence) and len(betas) == 2
        if not (pair and all(isinstance(beta, Real) for beta in betas)):
            raise ValueError(f"{name}: betas={betas!r} is invalid; it must be two numbers in [0, 1)")
        self.rule.check(_hyper(group, lr.detach() if isinstance(lr, Tensor) else lr), name)
        on = [option for option in ("foreach", "fused", "differentiable") if group[option]]
        if len(on) > 1:
            raise ValueError(f"{name}: {on[0]}=True and {on[1]}=True exclude each other; choose one")

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
            state["step"] = step_count(0, param, group)
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
        # From all groups before the first steps, so that one bad gradient stops the whole step.
        gathered = [self._gathered(index, group) for index, group in enumerate(self.param_groups)]
        for group, tensors in zip(self.param_groups, gathered, strict=True):
            if tensors.params:
                self._step_group(group, tensors)
            tensors.grads = []  # not kept: zero_grad is to free them
        return loss

    def _gathered(self, index: int, group: Group) -> Gathered:
        if torch.compiler.is_compiling():
            return self._gather(group)
        kept: dict[int, Gathered] = self.__dict__.setdefault("_kept", {})
        old = kept.get(index)
        if old is not None and old.renew(group["params"], self.state):
            return old
        if old is not None and old.launches is not None and old.launches.captured:
            self.__dict__.setdefault("_captured", []).append(old)  # a graph still reads from it
        kept[index] = new = self._gather(group)
        new.keep(group["params"], self.state)
        return new

    def _gather(self, group: Group) -> Gathered:
        tensors = Gathered(self.rule.slots)
        self._init_group(group, tensors.params, tensors.grads, tensors.steps, *tensors.state.values())
        return tensors

    def _step_group(self, group: Group, tensors: Gathered) -> None:
        backend, capturable, lr = self._backend(group), group["capturable"], group["lr"]
        if isinstance(lr, Tensor):
            stays = {"kernel": lr.is_cuda, "compiled": False}.get(backend, capturable or group["differentiable"])
            lr = lr.squeeze() if stays else lr.item()
        hyper = _hyper(group, lr)
        if backend == "kernel":
            launches = self._launches(tensors)
            launches.run(hyper, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
            return
        steppers: dict[str, Callable[..., None]] = {
            "compiled": compiled.step,
            "foreach": partial(multi_tensor.step, capturable=capturable),
            "eager": partial(eager.step, capturable=capturable, differentiable=group["differentiable"]),
        }
        steppers[backend](self.rule, hyper, tensors.params, tensors.grads, tensors.state, tensors.steps)

    def _backend(self, group: Group) -> Literal["kernel", "compiled", "foreach", "eager"]:
        params, foreach = group["params"], group["foreach"]
        if fusable(group) and all(map(kernel_takes, params)):
            return "kernel"
        if fusable(group) and group["fused"]:
            if all(param.is_cpu for param in params):
                return "compiled"
            kinds = sorted({f"{param.dtype} on {param.device.type}" for param in params if not kernel_takes(param)})
            raise ValueError(
                f"fused=True takes float32, bfloat16, float16 and complex64 parameters on CUDA, with triton installed, "
                f"or parameters on the CPU; here are {', '.join(kinds)}: leave fused=None"
            )
        if foreach is None:
            _, foreach = _default_to_fused_or_foreach(params, group["differentiable"], use_fused=False)
        return "foreach" if foreach and not all(param.is_cpu for param in params) else "eager"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by GradScaler: whether `step` itself divides by the scale and skips on overflow."""
        return all(self._backend(group) == "kernel" for group in self.param_groups)

    def _launches(self, tensors: Gathered) -> Launches:
        """The launches of a group, pointed to its gradients; made anew when a parameter comes, goes or changes."""
        if tensors.launches is None or not tensors.launches.point(tensors.grads):
            from mvngrad.optim.launch import Launches

            for i, (param, count) in enumerate(zip(tensors.params, tensors.steps, strict=True)):
                # The count may have been kept where another path reads it.
                tensors.steps[i] = self.state[param]["step"] = count.to(param.device, torch.float32)
            tensors.launches = Launches(self.rule, tensors.params, tensors.grads, tensors.state, tensors.steps)
            tensors.launches.point(tensors.grads)
            tensors.keep(tensors.members, self.state)
        return tensors.launches

    # Checkpoints

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict` returned, into copies, keeping the dtype in which this optimizer holds its state.

        A state of another cell, of other shapes, or with invalid hyper-parameters raises a ValueError that says so,
        and nothing is loaded.
        """
        if not isinstance(state_dict, dict):
            checkpoint.sealed(self, state_dict)
        last = self.register_load_state_dict_pre_hook(checkpoint.sealed)  # type: ignore[arg-type]
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for param in group["params"]:
                for name, value in self.state.get(param, {}).items():
                    if isinstance(value, checkpoint.Sealed):
                        self.state[param][name] = value.value


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
