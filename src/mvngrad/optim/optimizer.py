"""The torch.optim contract around the rule: groups, state, dispatch to a backend, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from operator import is_
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

from mvngrad.optim import checkpoint, compiled, eager, foreach as multi_tensor, storage
from mvngrad.optim.gather import Gathered, local, local_part
from mvngrad.optim.rounding import Rounding
from mvngrad.optim.state import (
    KINDS,
    OPTIONS,
    Group,
    asked_kind,
    fusable,
    is_kind,
    kernel_takes,
    no_kind,
    state_kind,
    step_count,
)
from mvngrad.rule import CELLS, LEAN, Hyper, Rule

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
        lean: bool | None = None,
        state_dtype: torch.dtype | Literal["float32", "bf16", "bfloat16", "int8"] | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
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
            lean: rebuild m from u and s instead of keeping it, which leaves two states, as many as Adam has. Not the
                paper's rule, but equal to it while s stands still. MVN-Grad only.
            state_dtype: how state is kept: torch.float32, torch.bfloat16 (or "float32", "bf16"), or "int8" in blocks
                with scales, the latter two rounded at random so that slow averages go on moving; None is float32, and
                a wider parameter's own dtype.
            stochastic_rounding: round bfloat16 parameters at random, so that small steps are not lost.
            rounding_seed: what rounding at random draws from, together with the step; saved in checkpoints.
            foreach: one kernel an operation for all tensors; None decides as torch.optim does. The CPU has no
                such kernels: there it steps tensor by tensor, which equals it and needs less memory.
            fused: one kernel for the whole step: on CUDA in Triton, which None chooses where it can; on the CPU by
                torch's compiler, which needs one of C++ and is chosen by True only.
            maximize: ascend instead of descending.
            capturable: keep step counts on the device and read nothing back, for CUDA graphs.
            differentiable: let autograd run through the step.
        """
        defaults: Group = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": (1e-2 if self.decoupled else 0.0) if weight_decay is None else weight_decay,
            "state_dtype": asked_kind(state_dtype),
            "stochastic_rounding": stochastic_rounding,
            "rounding_seed": rounding_seed,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "decoupled_weight_decay": self.decoupled,
        }
        given = {"eps_s": eps_s, "beta_mean": beta_mean, "lean": lean, "z_clip": z_clip}
        defaults |= {name: OPTIONS[name] for name in self.rule.options}
        defaults |= {name: value for name, value in given.items() if value is not None}
        super().__init__(params, defaults)

    # Groups

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):  # if not, torch says what is wrong
            for name in (*OPTIONS, "weight_decay"):  # None is the default, as in the constructor, where it is no value
                valued = name in ("beta_mean", "z_clip") and name in self.rule.options
                if param_group.get(name, ...) is None and not valued:
                    del param_group[name]
            if "state_dtype" in param_group:
                param_group["state_dtype"] = asked_kind(param_group["state_dtype"])
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
        if self.rule.centered and (floor := _hyper(group, 0.0).floor) >= 1:
            warnings.warn(
                f"{name}: eps_s={group['eps_s']:g} puts a floor of {floor:.2g} under the root, which hardly normalizes "
                "then; choose a smaller one. If a weight_decay was meant, give it by name: the fifth position is eps_s",
                stacklevel=4,
            )
        if group.get("lean") and group["beta_mean"] is not None:
            raise ValueError(f"{name}: lean=True rebuilds m from u, which decays with betas[0]; leave beta_mean=None")
        if group["state_dtype"] not in KINDS:
            raise ValueError(f"{name}: {no_kind(group['state_dtype'])}")
        seed = group["rounding_seed"]
        if not (isinstance(seed, int) and 0 <= seed < 2**32):
            raise ValueError(f"{name}: rounding_seed={seed!r} is invalid; it must be an integer in [0, 2**32)")
        if group["differentiable"] and (group["state_dtype"] in KINDS[2:] or group["stochastic_rounding"]):
            raise ValueError(f"{name}: differentiable=True cannot see through rounded state; leave state_dtype=None")
        on = [option for option in ("foreach", "fused", "differentiable") if group[option]]
        if len(on) > 1:
            raise ValueError(f"{name}: {on[0]}=True and {on[1]}=True exclude each other; choose one")

    def __repr__(self) -> str:
        text = super().__repr__()
        if not self.rule.centered:
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
            if param.is_floating_point() and param.dtype.itemsize < 2:
                raise ValueError(
                    f"{type(self).__name__} steps parameters of 16 bits and more; here is one of {param.dtype}: step a "
                    "bfloat16 or float32 copy of it"
                )
            if group["stochastic_rounding"] and param.dtype == torch.float16:
                raise ValueError(
                    f"{type(self).__name__}: stochastic_rounding=True rounds bfloat16 parameters; here is a float16 "
                    "one: leave it out for this group, or train in bfloat16"
                )
            state["step"] = step_count(0, param, group)
            state.update(storage.empty(self._rule(group).state_names, param, state_kind(param, group)))
        names = self._names(group)
        if not {*names} == state.keys() & storage.NAMES or not is_kind(group["state_dtype"], state[names[0]].dtype):
            raise ValueError(
                f"{type(self).__name__}: the state of a parameter is {', '.join(state)}, from before lean or "
                "state_dtype changed in its group; set it back. A new optimizer can have another state_dtype: load "
                "mvngrad.convert_state_dict(state_dict, state_dtype) into it"
            )
        return state

    def _rule(self, group: Group) -> Rule:
        return LEAN if group.get("lean") else self.rule

    def _names(self, group: Group) -> tuple[str, ...]:
        return storage.names(self._rule(group).state_names, group["state_dtype"])

    def _init_group(
        self, group: Group, params: list[Tensor], grads: list[Tensor], steps: list[Tensor], *kept: list[Tensor]
    ) -> None:
        # The name, and one flat list for each kind of tensor, are what torch.compile looks for: it runs this
        # function instead of tracing it.
        names = self._names(group)
        whole = group["differentiable"]
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise ValueError(
                    f"{type(self).__name__} needs dense gradients, not {grad.layout}; use sparse=False in the "
                    "embedding, or torch.optim.SparseAdam for these parameters"
                )
            state = self._state_of(param, group)
            params.append(param if whole else local(param))
            grads.append(grad if whole else local_part(grad, param))
            steps.append(state["step"])
            for name, tensors in zip(names, kept, strict=True):
                tensors.append(state[name] if whole else local(state[name]))

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
        gathered = self._gathered()
        for group, tensors in zip(self.param_groups, gathered, strict=True):
            if tensors.params:
                self._step_group(group, tensors)
            if tensors.sharded:  # only their parts were seen to change
                torch.autograd.graph.increment_version(tensors.sharded)
            tensors.grads = []  # not kept: zero_grad is to free them
        return loss

    def _gathered(self) -> list[Gathered]:
        """For each group what its step works on; as the step before found it, where only gradients are new."""
        if torch.compiler.is_compiling():
            return [self._gather(group) for group in self.param_groups]
        kept: list[Gathered] = self.__dict__.setdefault("_kept", [])
        owned: list[Any] = self.__dict__.setdefault("_owned", [])
        known = len(owned) == len(self.state) and all(map(is_, owned, self.state.values()))
        del kept[len(self.param_groups) :]
        for index, group in enumerate(self.param_groups):
            old = kept[index] if index < len(kept) else None
            if known and old is not None and old.form == _form(group) and old.renew(group["params"]):
                continue
            if old is not None:
                self._spare_captured(old)
            new = self._gather(group)
            new.keep(group["params"], [self.state[p] for p in group["params"] if p.grad is not None])
            kept[index : index + 1] = [new]
            self._owned = list(self.state.values())  # a parameter's first step gives it state
        return kept

    def _spare_captured(self, tensors: Gathered) -> None:
        """Keep what a graph reads from and writes to at every replay, before others take its place."""
        if tensors.launches is not None and tensors.launches.captured:
            self.__dict__.setdefault("_captured", []).append((tensors.launches, tensors.values))

    def _gather(self, group: Group) -> Gathered:
        tensors = Gathered(self._names(group), _form(group))
        self._init_group(group, tensors.params, tensors.grads, tensors.steps, *tensors.state.values())
        return tensors

    def _step_group(self, group: Group, tensors: Gathered) -> None:
        launches = self._launches(group, tensors)
        backend, capturable, lr = "kernel" if launches else self._backend(group), group["capturable"], group["lr"]
        if isinstance(lr, Tensor):
            stays = {"kernel": lr.is_cuda, "compiled": False}.get(backend, capturable or group["differentiable"])
            lr = lr.squeeze() if stays else lr.item()
        hyper, rounding = _hyper(group, lr), Rounding(group["rounding_seed"], group["stochastic_rounding"])
        if launches:
            launches.run(hyper, getattr(self, "grad_scale", None), getattr(self, "found_inf", None), rounding)
            return
        steppers: dict[str, Callable[..., None]] = {
            "compiled": partial(compiled.step, rows=tensors.rows),
            "foreach": partial(multi_tensor.step, capturable=capturable),
            "eager": partial(eager.step, capturable=capturable, differentiable=group["differentiable"]),
        }
        step = partial(steppers[backend], rounding=rounding)
        step(self._rule(group), hyper, tensors.params, tensors.grads, tensors.state, tensors.steps)

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

    def _launches(self, group: Group, tensors: Gathered) -> Launches | None:
        """The launches of a group, pointed to its gradients; None where the kernel is not to step it.

        They are made anew when a parameter comes, goes or changes.
        """
        asked = group["fused"], group["foreach"], group["differentiable"]
        if tensors.launches is not None and tensors.asked == asked and tensors.launches.point(tensors.grads):
            return tensors.launches
        if self._backend(group) != "kernel":
            return None
        from mvngrad.optim.launch import Launches

        self._spare_captured(tensors)
        for i, (param, kept) in enumerate(zip(tensors.params, tensors.owned, strict=True)):
            # The count may have been kept where another path reads it.
            tensors.steps[i] = kept["step"] = kept["step"].to(param.device, torch.float32)
        rule = self._rule(group)
        tensors.launches = Launches(rule, tensors.params, tensors.grads, tensors.state, tensors.steps)
        tensors.launches.point(tensors.grads)
        tensors.asked = asked
        tensors.keep(tensors.members, tensors.owned)
        return tensors.launches

    # Checkpoints

    def state_dict(self) -> StateDict:
        """The state and the groups, as torch's optimizers give them; its tensors are the optimizer's own."""
        return checkpoint.portable(self, super().state_dict())

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict` returned, into copies.

        A state of another cell, of other shapes, of another `state_dtype` (see `mvngrad.convert_state_dict`) or with
        invalid hyper-parameters raises a ValueError that says so, and nothing is loaded.
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


def _form(group: Group) -> tuple[Any, ...]:
    """What decides which state there is, and in which dtype."""
    return group.get("lean"), group["state_dtype"]


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
