"""The rule as a torch optimizer: groups, state, checkpoints, and `step`, which collects inputs and calls a backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from mvngrad.optim import checkpoint, private
from mvngrad.optim.backends import choose_backend, get_step, get_step_dtype, make_step_count
from mvngrad.optim.formats import (
    ALL_NAMES,
    GROUP_STEP,
    ROUNDED_DTYPES,
    Rounding,
    allocate_low,
    get_format,
    get_stored_names,
    hash_values,
    is_stored_as,
    parse_state_dtype,
)
from mvngrad.optim.inputs import TENSOR_OPTIONS, Group, State, StepInputs, Sums, make_hyper, read_lr
from mvngrad.optim.options import (
    OPTIONS,
    check_differentiable,
    check_group,
    check_missing_options,
    check_number,
    check_param,
    name_called_class,
    rounds_params,
)
from mvngrad.optim.tensors import get_local, get_local_like, is_wrapper
from mvngrad.rule import LEAN, Rule


class RuleOptimizer(Optimizer):
    """A cell of the table as a torch optimizer. Use its named subclasses."""

    rule: ClassVar[Rule]
    decoupled: ClassVar[bool] = False
    sum_readers = 0
    """Number of attached Monitors that read the kernel's sums; not copied with the optimizer."""

    @name_called_class
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        eps_s: float | None = None,
        weight_decay: float | None = None,
        beta_mean: float | None = None,
        z_clip: float | None = None,
        lean: bool | None = None,
        decouple_lr: bool = False,
        state_dtype: torch.dtype | Literal["float32", "bf16", "bfloat16", "int8"] | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int | None = None,
        master_bits: Literal[24, 32] | None = None,
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
                sqrt(eps_s / (1 - beta2)), the floor; `repr` shows it plus eps. AdaBelief and MVN-Grad only.
            weight_decay: without W in the name, weight_decay * x is added to the gradient, before every moment
                (default 0); with W, x is shrunk by 1 - lr * weight_decay, apart from the gradient (default 1e-2).
            decouple_lr: shrink x by 1 - lr / max_lr * weight_decay instead (default 1e-5), so that the decay follows
                the schedule but not the size of lr. max_lr is the lr of a group when it is added; a group may set
                it, and OneCycleLR replaces it by its own. Names with W only.
            beta_mean: decay of the mean m alone; None is betas[0], as in Algorithm 1. MVN-Grad only.
            z_clip: clamp the normalized gradient z to [-z_clip, z_clip], which bounds u likewise for every sequence
                of gradients; None is the paper's rule. LaProp and MVN-Grad only.
            lean: rebuild m from u and s instead of storing it, which leaves two states, as many as Adam has. Not the
                paper's rule, but equal to it while s is constant. MVN-Grad only.
            state_dtype: how state is stored: torch.float32, torch.bfloat16 (or "float32", "bf16"), or "int8" in blocks
                with scales, the latter two rounded at random so that slow averages do not freeze; None is float32, and
                a wider parameter's own dtype.
            stochastic_rounding: round bfloat16 parameters at random, so that small steps are not lost.
            rounding_seed: the seed of rounding at random; saved in checkpoints. None is 0, except in an optimizer that
                has a single parameter: its first step chooses one by the parameter's shape and first values, so that
                optimizers with one parameter each draw different random bits.
            master_bits: 24 or 32; for bfloat16 parameters, keep 8 or 16 more bits of each as state, and step them as
                24-bit numbers, rounded at random, or as float32 numbers. The parameters are the nearest bfloat16.
            foreach: one kernel for each operation on all tensors; None decides as torch.optim does. The CPU has no
                such kernels: there it steps tensor by tensor, with equal results and less memory.
            fused: one kernel for the whole step. On CUDA it is written in Triton, and None uses it if it can. On the
                CPU it is written in C++ and needs fused=True and a C++ compiler, which compiles it once.
            maximize: ascend instead of descending.
            capturable: keep step counts on the device and read nothing back, for CUDA graphs.
            differentiable: let autograd run through the step.
        """
        default_decay = 0.0 if not self.decoupled else 1e-5 if decouple_lr else 1e-2
        defaults: Group = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": default_decay if weight_decay is None else weight_decay,
            "decouple_lr": decouple_lr,
            "state_dtype": parse_state_dtype(state_dtype),
            "stochastic_rounding": stochastic_rounding,
            "rounding_seed": rounding_seed,
            "master_bits": master_bits,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "decoupled_weight_decay": self.decoupled,
        }
        options = {"eps_s": eps_s, "beta_mean": beta_mean, "lean": lean, "z_clip": z_clip}
        defaults |= {name: OPTIONS[name] for name in self.rule.options}
        defaults |= {name: value for name, value in options.items() if value is not None}
        self._inputs: list[StepInputs] = []
        self._sums: dict[int, Sums] = {}
        """By the index of a group, the sums of the last step."""
        self._new_sums: dict[int, Sums] = {}
        """The same of a step that has not ended: with `release_gradients`, steps begin in backward."""
        self.gradient_release: Any = None
        """Set by `mvngrad.release_gradients`."""
        self._captured: list[Any] = []
        """See `StepInputs.captured`."""
        super().__init__(params, defaults)

    # Groups

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):  # if not, torch says what is wrong
            self._normalize_options(param_group)
            check_group({**self.defaults, **param_group}, self.rule, self.decoupled, type(self).__name__)
            check_differentiable(param_group, self.defaults, type(self).__name__)
        super().add_param_group(param_group)

    def _normalize_options(self, param_group: Group) -> None:
        """Remove options that are None and mean a default, replace aliases of `state_dtype`, and set `max_lr`.

        Raises a ValueError if `decouple_lr` differs from the optimizer's, and there is no `weight_decay` to go with it.
        """
        for name in (*OPTIONS, "weight_decay"):
            none_is_valid = name in ("beta_mean", "z_clip") and name in self.rule.options
            if param_group.get(name, ...) is None and not none_is_valid:
                del param_group[name]
        if "state_dtype" in param_group:
            param_group["state_dtype"] = parse_state_dtype(param_group["state_dtype"])
        merged = {**self.defaults, **param_group}
        differs = self.decoupled and merged["decouple_lr"] != self.defaults["decouple_lr"]
        if differs and "weight_decay" not in param_group:
            raise ValueError(
                f"{type(self).__name__}: a group whose decouple_lr={merged['decouple_lr']} is not the optimizer's "
                "must name its weight_decay, which has another scale there: by default 1e-5 with decouple_lr=True, "
                "and 1e-2 without"
            )
        if merged["decouple_lr"]:
            check_number("lr", merged, type(self).__name__)
            param_group.setdefault("max_lr", float(merged["lr"]))

    def __repr__(self) -> str:
        text = super().__repr__()
        if not self.rule.centered:
            return text
        # repr also shows groups that a step refuses, and the value of an eps that is a tensor
        changed = {"decouple_lr": False, "lean": False, "differentiable": False}
        hypers = [make_hyper(group | changed, 0.0) for group in self.param_groups]
        smallest = ", ".join(f"{hyper.floor + hyper.eps:.2g}" for hyper in hypers)
        return f"{text[:-1]}smallest divisor, sqrt(eps_s/(1-beta2)) + eps: {smallest}\n)"

    # State

    def init_state(self) -> None:
        """Create the state of every trainable parameter now instead of at its first step.

        torch.distributed.checkpoint creates missing state by a hidden step with zero gradients, which counts as a
        step and adds eps_s to s. Call this before a checkpoint at step 0, and there is no hidden step.
        """
        self._check_missing_options(self.param_groups)
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    self.get_or_create_state(param, group)

    def get_or_create_state(self, param: Tensor, group: Group) -> dict[str, Tensor]:
        """The state of a parameter, created if it has none; a ValueError if it is not what the options ask for."""
        group["state_dtype"] = parse_state_dtype(group["state_dtype"])  # a name, if ZeroRedundancyOptimizer loaded it
        state: dict[str, Tensor] = self.state[param]
        if not state or group["master_bits"] or group["stochastic_rounding"]:
            check_param(param, group, type(self).__name__)
        if not state:
            state["step"] = make_step_count(0, param, group)
            state.update(get_format(group["state_dtype"], param).allocate(self.get_rule(group).state_names, param))
            state.update(allocate_low(group["master_bits"], param))
        self._unpack_saved(state, param, group)
        self._check_stored(state, group)
        if not isinstance(state.get("step"), Tensor):  # a number that was set by hand
            state["step"] = make_step_count(checkpoint.parse_steps(state.get("step")), param, group)
        return state

    def _unpack_saved(self, state: dict[str, Tensor], param: Tensor, group: Group) -> None:
        """Unpack what is still as it was saved: ZeroRedundancyOptimizer loads state without `load_state_dict`."""
        if any(isinstance(value, dict) for value in state.values()):
            unpacked = checkpoint.unpack_blocks(state)
            state.clear()
            state.update(unpacked)
        if "low" in state and state["low"].dim() > param.dim():
            state.update(checkpoint.copy_low(state, param, group["master_bits"]))

    def _check_stored(self, state: dict[str, Tensor], group: Group) -> None:
        """Raise a ValueError if the options that decide what is stored have changed since the state was created."""
        names = self._get_stored_names(group)
        stored = {name for name in state if name in ALL_NAMES}  # torch 2.11 cannot trace state.keys() & ALL_NAMES
        if {*names} != stored or not is_stored_as(group["state_dtype"], state[names[0]].dtype):
            raise ValueError(
                f"{type(self).__name__}: the state of a parameter is {', '.join(state)}, from before lean, master_bits "
                "or state_dtype changed in its group; set it back. A new optimizer can have another state_dtype: load "
                "mvngrad.convert_state_dict(state_dict, state_dtype) into it"
            )

    def get_rule(self, group: Group) -> Rule:
        """The cell that steps a group."""
        return LEAN if group.get("lean") else self.rule

    def _get_stored_names(self, group: Group) -> tuple[str, ...]:
        return get_stored_names(self.get_rule(group).state_names, group["state_dtype"], group["master_bits"])

    # The step

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `step` as torch's optimizers do; without a profiler and pre-hooks, only the post-hooks are called.

        torch.autograd.profiler.record_function takes as long as comparing the addresses of 100 tensors.
        """
        recorded = Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: RuleOptimizer, *args: Any, **kwargs: Any) -> Any:
            profiled = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
            if profiled or self._optimizer_step_pre_hooks or private.global_pre_hooks:
                return recorded(self, *args, **kwargs)
            result = func(self, *args, **kwargs)
            for hook in chain(self._optimizer_step_post_hooks.values(), private.global_post_hooks.values()):
                hook(self, (self, *args), kwargs)
            return result

        return step

    @private.use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step and return the loss of `closure`, if there is one; it recomputes the loss and its gradients."""
        self._check_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.gradient_release is not None:
            self.gradient_release.finish()
        if torch.compiler.is_compiling() and not self._can_be_compiled():
            torch.compiler.disable(self.step_groups)(self.param_groups, self._inputs)  # type: ignore[no-untyped-call]
        else:
            self.step_groups(self.param_groups, self._inputs)
        if self._sums or self._new_sums:  # else a compiled step would set attributes, which torch 2.11 cannot trace
            self._sums, self._new_sums = self._new_sums, {}
        return loss

    def _can_be_compiled(self) -> bool:
        """Whether torch.compile may trace the step: not if an option is a tensor, or there is a gradient scale.

        Reading the value of a tensor ends a graph, and inductor compiles the next one wrongly: its step count is a
        number that changes. GradScaler leaves the scale to a kernel, and a compiled step has none.
        """
        has_tensors = any(
            isinstance(group.get(name), Tensor) and not group["differentiable"]
            for group in self.param_groups
            for name in TENSOR_OPTIONS
        )
        return not has_tensors and getattr(self, "grad_scale", None) is None

    def step_groups(self, groups: list[Group], cached: list[StepInputs]) -> None:
        """Step the parameters of `groups` that have gradients; `cached` has the inputs of their last step."""
        self._check_missing_options(groups)
        all_inputs = self._collect_inputs(groups, cached)
        try:
            pairs = zip(groups, all_inputs, strict=True)  # all of them first: a bad option stops the whole step
            hypers = [make_hyper(group, read_lr(group, inputs)) if inputs.params else None for group, inputs in pairs]
            for index, (hyper, inputs) in enumerate(zip(hypers, all_inputs, strict=True)):
                if hyper is not None:
                    inputs.step_backend(inputs, hyper)
                    if inputs.sums:
                        self._new_sums.setdefault(index, []).extend(inputs.sums)
                if inputs.sharded:  # autograd saw only their local parts change
                    torch.autograd.graph.increment_version(inputs.sharded)
        finally:
            for inputs in all_inputs:
                inputs.drop_tensors()

    def _check_missing_options(self, groups: list[Group]) -> None:
        """Raise a ValueError if an option of another cell was set in a group by hand: it would change the rule."""
        for group in groups:
            for option in self.rule.missing_options:  # a loop: any() of a generator takes three times as long
                if option in group:
                    check_missing_options(group, self.rule, type(self).__name__)

    def _check_capture(self) -> None:
        """Call torch's check of `capturable`, which is slow, unless it could neither raise nor warn."""
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            warned = getattr(self, "_warned_capturable_if_run_uncaptured", False)
            if warned or not all(group["capturable"] for group in self.param_groups):
                return
        private.check_capture(self)

    def _collect_inputs(self, groups: list[Group], cached: list[StepInputs]) -> list[StepInputs]:
        """Collect the inputs of all groups before any group steps, so that one bad gradient stops the whole step."""
        if torch.compiler.is_compiling():
            return [self._collect_group(i, group) for i, group in enumerate(groups)]
        del cached[len(groups) :]
        for i, group in enumerate(groups):
            if i == len(cached) or not cached[i].refresh(group, self.state):
                cached[i : i + 1] = [self._collect_group(i, group)]
            cached[i].grad_scale = getattr(self, "grad_scale", None)  # GradScaler sets both
            cached[i].found_inf = getattr(self, "found_inf", None)
            cached[i].writes_sums = self.sum_readers > 0
        return cached

    def _collect_group(self, index: int, group: Group) -> StepInputs:
        """Collect the parameters that have gradients, and their state, which is created at their first step."""
        backend = choose_backend(group)  # first: if it raises, no state was created
        state: State = {name: [] for name in self._get_stored_names(group)}
        options = {"capturable": group["capturable"], "differentiable": group["differentiable"]}
        inputs = StepInputs(self.get_rule(group), params=[], grads=[], state=state, steps=[], indices=[], **options)
        inputs.backend, inputs.step_backend, inputs.captured = backend, get_step(backend), self._captured
        compiling = torch.compiler.is_compiling()
        tensors = inputs.params, inputs.grads, inputs.steps, *state.values()
        seed = self._init_group(group, compiling, inputs.indices, *tensors)
        if compiling and not group["differentiable"]:
            inputs.use_local_parts()
        inputs.rounding = Rounding((seed + index * GROUP_STEP) % 2**32, rounds_params(group))
        if backend in ("cpu", "cuda"):
            if wrappers := {type(grad).__name__ for grad in inputs.grads if is_wrapper(grad)}:
                raise ValueError(
                    f"{type(self).__name__}: a gradient is a {', '.join(wrappers)}, which may have no memory that a "
                    "fused step could read: set fused=False for its group"
                )
            self._move_step_counts(group, inputs)
        if not compiling:
            inputs.remember(group, self.state)
        inputs.view_complex_as_real()
        return inputs

    def _init_group(self, group: Group, compiling: bool, indices: list[int], *tensors: list[Tensor]) -> int:
        # torch.compile does not trace a method of this name: it runs it, looks for one flat list of each kind of
        # tensor, and makes a constant of its result, the rounding seed. It knows the optimizer's own tensors only: a
        # local part of one would become a constant too, so that every step would use the first gradient.
        (params, grads, steps, *stored), names = tensors, self._get_stored_names(group)
        whole = compiling or group["differentiable"]
        for i, param in zip(group.get("param_indices") or range(len(group["params"])), group["params"], strict=True):
            grad = param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                remedy = "; use sparse=False in the embedding, or torch.optim.SparseAdam for these parameters"
                remedy = remedy if "sparse" in str(grad.layout) else ""
                raise ValueError(f"{type(self).__name__} needs dense gradients, not {grad.layout}{remedy}")
            state = self.get_or_create_state(param, group)
            indices.append(i)
            params.append(param if whole else get_local(param))
            grads.append(grad if whole else get_local_like(grad, param))
            steps.append(state["step"])
            for name, values in zip(names, stored, strict=True):
                values.append(state[name] if whole else get_local(state[name]))
        return self.init_rounding_seed(group)

    def init_rounding_seed(self, group: Group) -> int:
        """The rounding seed of a group, chosen and kept in the group if it is None and rounding needs one.

        Replicas choose the same one, because their parameters are equal when they step; a resumed run loads it.
        """
        rounds = group["state_dtype"] in ROUNDED_DTYPES or rounds_params(group)
        if rounds and group["rounding_seed"] is None:
            params = [param for each in self.param_groups for param in each["params"]]
            group["rounding_seed"] = hash_values(params[0]) if len(params) == 1 else 0
        return group["rounding_seed"] or 0

    def _move_step_counts(self, group: Group, inputs: StepInputs) -> None:
        """Move step counts to the devices of their parameters, where the kernel reads them."""
        members = (param for param in group["params"] if param.grad is not None)
        for i, param in enumerate(members):
            inputs.steps[i] = self.state[param]["step"] = inputs.steps[i].to(param.device, get_step_dtype())

    def get_sums(self, index: int) -> Sums:
        """The sums that the last step of a group wrote; empty if it wrote none."""
        return self._sums.get(index, [])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` itself divides by the scale and skips on overflow; GradScaler reads it.

        A compiled step does not: it is made of torch's operations, whatever the group says.
        """
        if private.is_compiled(self.step):
            return False
        return all(choose_backend(group) in ("cpu", "cuda") for group in self.param_groups if group["params"])

    # Checkpoints

    def state_dict(self) -> StateDict:
        """The state and the groups, in the layout of torch's optimizers. The tensors are not copied."""
        return checkpoint.make_portable(self, super().state_dict())

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load copies of what `state_dict` returned.

        A state of another cell, of other shapes, of another `state_dtype` (see `mvngrad.convert_state_dict`) or with
        invalid hyper-parameters raises a ValueError that says so, and nothing is loaded.
        """
        if not isinstance(state_dict, dict):
            checkpoint.check_and_copy(self, state_dict)  # says what is wrong before torch calls .copy()
        last_hook = self.register_load_state_dict_pre_hook(checkpoint.check_and_copy)  # type: ignore[arg-type]
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._inputs, self._captured = [], getattr(self, "_captured", [])
        self.gradient_release = getattr(self, "gradient_release", None)  # load_state_dict keeps it, a copy has none
        self._sums, self._new_sums = {}, {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for param in group["params"]:
                for name, value in self.state.get(param, {}).items():
                    if isinstance(value, checkpoint.RawTensor):
                        self.state[param][name] = value.value
