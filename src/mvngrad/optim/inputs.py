"""What one step of one parameter group works on, and the key that says when it must be collected again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice, repeat
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvngrad.optim.formats import Rounding
from mvngrad.optim.private import TensorGuards
from mvngrad.optim.tensors import (
    get_local,
    get_local_like,
    is_sharded,
    is_wrapper,
    resolve_bits,
    trace_local,
    view_as_real,
)
from mvngrad.rule import Hyper, Rule

if TYPE_CHECKING:
    from mvngrad.optim.backends.cuda.launch import StepSums

Group = dict[str, Any]
State = dict[str, list[Tensor]]
"""For each name that state is stored under, one tensor for each parameter."""
Sums = list[tuple["StepSums", int]]
"""What the CUDA kernel wrote at a step: sums, each with the row of that step."""

_get_grad = attrgetter("grad")
_get_common_options = itemgetter(
    "state_dtype", "stochastic_rounding", "rounding_seed", "master_bits", "foreach", "fused", "capturable",
    "differentiable",
)  # fmt: skip


def get_options(group: Group) -> tuple[Any, ...]:
    """The options that decide which state a group has and which backend steps it."""
    return (*_get_common_options(group), group.get("lean"))


class TensorKey:
    """Addresses and layouts of tensors, without references to them.

    A layout is everything else that a kernel relies on: Python type, shape, strides, dtype, device, and the negative
    and conjugate bits. Each check is one pass in C, because every step checks every tensor.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.addresses = get_addresses(tensors)
        self.layouts: Any = None
        if TensorGuards is not None and self.addresses is not None:
            self.layouts = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def has_layouts(self, tensors: Sequence[Tensor]) -> bool:
        return self.layouts is not None and bool(self.layouts.check(*tensors))

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        return self.layouts is not None and self.addresses == get_addresses(tensors) and self.has_layouts(tensors)


def get_addresses(tensors: Iterable[Tensor]) -> list[int] | None:
    """The addresses of tensors; None if one is missing or has no address, such as a sparse tensor."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except (RuntimeError, TypeError, LookupError):
        return None


@dataclass
class InputsKey:
    """What the inputs of a group were collected from. While it matches, they are the same but for the values."""

    options: tuple[Any, ...]
    """See `get_options`."""
    has_grad: list[bool]
    """For each parameter of the group, whether it has a gradient."""
    params: TensorKey
    grads: TensorKey
    """Updated by `refresh` if gradients only have other addresses, strides or dtypes: inputs stay valid."""
    state_addresses: list[int]
    """Without layouts: most tensors of a step are state, and comparing their layouts too would add a third to the
    host's time. State whose strides change in place, at its address, is not noticed."""


def view_state_as_real(state: State) -> State:
    """Real views of the same memory, for tensors that are complex."""
    return {name: list(map(view_as_real, tensors)) for name, tensors in state.items()}


class StepInputs:
    """The tensors of one step of one group, and what a backend derived from their addresses.

    A group keeps its `StepInputs` from step to step. `refresh` fetches the current tensors and says whether the key
    still matches; after the step `drop_tensors` drops them. So tensors that the optimizer no longer has are freed.

    All tensors are local parts of sharded ones, and complex ones are viewed as real.
    """

    def __init__(
        self,
        rule: Rule,
        params: list[Tensor],
        grads: list[Tensor],
        state: State,
        steps: list[Tensor],
        *,
        rounding: Rounding | None = None,
        indices: list[int] | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        self.rule, self.rounding = rule, rounding or Rounding()
        self.capturable, self.differentiable = capturable, differentiable
        self.params, self.grads = params, grads
        self._state_and_steps: tuple[State, list[Tensor]] | None = state, steps
        self.indices = list(range(len(params))) if indices is None else indices
        """The indices of `params` in their group, where parameters without gradients count too."""
        self.stored_names = tuple(state)
        self.backend = ""
        self.step_backend: Callable[[StepInputs, Hyper], None]
        self.plan: Any = None
        """What the backend derived from layouts; it holds no parameter, gradient or state."""
        self.addresses_changed = True
        """Whether an address differs from the step before; backends that use addresses set it to False."""
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.writes_sums = False
        """Whether the CUDA kernel writes sums; other backends write none."""
        self.sums: Sums = []
        """Those of the last step."""
        self.captured: list[Any] = []
        """What CUDA graphs read and write at every replay, owned by the optimizer for as long as it lives."""
        self.sharded: list[Tensor] = []
        """The DTensors whose local parts are in `params`."""
        self.has_complex = False
        self.key: InputsKey | None = None
        """Computed by `remember`, compared by `refresh`. Without a key, inputs are collected at every step."""
        # How `refresh` and `_iterate_stored` fetch the tensors
        self._has_sharded = False
        self._filters_params = False
        """Whether `refresh` compares which parameters have gradients. If all had one and none is sharded it need not: a
        gradient that is missing has no layout."""
        self._first_position = 0
        """The position in the optimizer's state of the first parameter with a gradient; the others usually follow."""
        self._get_values: Callable[[Any], tuple[Tensor, ...]]
        # Where `_iterate_stored` reads, from `refresh` to `drop_tensors`
        self._params_with_grad: list[Tensor] = []
        """The parameters of the group that have gradients. `params` are the local parts of these."""
        self._optimizer_state: Mapping[Tensor, dict[str, Tensor]] = {}

    @property
    def state(self) -> State:
        return self._get_state_and_steps()[0]

    @property
    def steps(self) -> list[Tensor]:
        """The step counts."""
        return self._get_state_and_steps()[1]

    def _get_state_and_steps(self) -> tuple[State, list[Tensor]]:
        """State and step counts. Their lists are made on demand: a backend that knows all addresses needs none."""
        if self._state_and_steps is None:
            stored, count = list(self._iterate_stored()), 1 + len(self.stored_names)
            state = {name: stored[i::count] for i, name in enumerate(self.stored_names, start=1)}
            self._state_and_steps = view_state_as_real(state) if self.has_complex else state, stored[::count]
        return self._state_and_steps

    def use_local_parts(self) -> None:
        """Replace DTensors by their local parts, in a way that torch.compile can trace."""
        self.grads = [get_local_like(grad, param) for grad, param in zip(self.grads, self.params, strict=True)]
        self.params = list(map(trace_local, self.params))
        state = {name: list(map(trace_local, tensors)) for name, tensors in self.state.items()}
        self._state_and_steps = state, self.steps

    def view_complex_as_real(self) -> None:
        """Replace complex tensors by real views of the same memory."""
        self.has_complex = any(param.is_complex() for param in self.params)
        if self.has_complex:
            self.params = list(map(view_as_real, self.params))
            self.grads = [view_as_real(grad.resolve_conj()) for grad in self.grads]
            if self._state_and_steps is not None:
                self._state_and_steps = view_state_as_real(self.state), self.steps

    def remember(self, group: Group, optimizer_state: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """Compute the key of tensors that were just collected, and resolve gradients that are negated views."""
        has_grad = [param.grad is not None for param in group["params"]]
        params_with_grad = list(compress(group["params"], has_grad))
        self.sharded = list(filter(is_sharded, params_with_grad))
        self._has_sharded = bool(self.sharded)
        self._filters_params = self._has_sharded or not all(has_grad)
        self._get_values = itemgetter("step", *self.stored_names)
        first = params_with_grad[0] if params_with_grad else None
        self._first_position = next((i for i, param in enumerate(optimizer_state) if param is first), 0)
        if self.differentiable:
            return
        self.grads = list(map(resolve_bits, self.grads))
        stored = chain.from_iterable(zip(self.steps, *self.state.values(), strict=True))
        if (state_addresses := get_addresses(stored)) is not None:
            params, grads = TensorKey(self.params), TensorKey(self.grads)
            self.key = InputsKey(get_options(group), has_grad, params, grads, state_addresses)

    def refresh(self, group: Group, optimizer_state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        """Fetch the current tensors; False if they must be collected again, because more than values has changed.

        Gradients may change their addresses, strides and dtypes, but must not appear, disappear or be sparse.
        """
        self.sums = []
        key = self.key
        if key is None or key.options != get_options(group):
            return False
        params = params_with_grad = group["params"]
        grads = list(map(_get_grad, params))
        if self._filters_params:
            if key.has_grad != [grad is not None for grad in grads]:
                return False
            params = params_with_grad = list(compress(params, key.has_grad))
            grads = list(compress(grads, key.has_grad))
        self._state_and_steps, self._params_with_grad, self._optimizer_state = None, params_with_grad, optimizer_state
        if self._has_sharded:
            self.sharded = list(filter(is_sharded, params_with_grad))
            grads = list(map(get_local_like, grads, params_with_grad))
            params = list(map(get_local, params_with_grad))
        if not key.params.matches(params) or key.state_addresses != get_addresses(self._iterate_stored()):
            return False
        if not key.grads.has_layouts(grads):
            layouts = set(map(getattr, grads, repeat("layout"), repeat(None)))
            if layouts != {torch.strided} or any(map(is_wrapper, grads)):
                return False
            self.addresses_changed, self.plan = True, None
            grads = list(map(resolve_bits, grads))
            key.grads = TensorKey(grads)
        elif (addresses := get_addresses(grads)) != key.grads.addresses:
            self.addresses_changed, key.grads.addresses = True, addresses
        self.params, self.grads = params, grads
        if self.has_complex:
            self.view_complex_as_real()
        return True

    def _iterate_stored(self) -> Iterable[Tensor]:
        """The step count and the state of each parameter in turn, from the optimizer's state."""
        params, state, first = self._params_with_grad, self._optimizer_state, self._first_position
        if all(map(is_, islice(state, first, None), params)):
            states: Iterable[Any] = islice(state.values(), first, first + len(params))
        else:  # slower: the hash of a tensor is a Python function
            states = map(state.get, params)
        stored = chain.from_iterable(map(self._get_values, states))
        return map(get_local, stored) if self._has_sharded else stored

    def drop_tensors(self) -> None:
        """Drop the tensors after a step."""
        self.params, self.grads, self.sharded, self._params_with_grad = [], [], [], []
        self._state_and_steps, self._optimizer_state = None, {}
        self.grad_scale = self.found_inf = None


TENSOR_OPTIONS = ("eps", "eps_s", "weight_decay", "beta_mean", "z_clip")
"""Options of a group, other than lr, that may be tensors."""
LEAN_WITH_BETA_MEAN = "lean=True rebuilds m from u, which decays with betas[0]; leave beta_mean=None"


def make_hyper(group: Group, lr: Any) -> Hyper:
    """The hyper-parameters of a group, with a learning rate that may be a number or a tensor.

    Other options that are tensors are read now, unless autograd may need them (`differentiable`). Raises a ValueError
    if options that were set by hand exclude each other.
    """
    options: list[Any] = [group.get(name, 0.0 if name == "eps_s" else None) for name in TENSOR_OPTIONS]
    if not group["differentiable"]:
        options = [option.item() if isinstance(option, Tensor) else option for option in options]
    eps, eps_s, decay, beta_mean, z_clip = options
    beta1, beta2 = group["betas"]
    if torch.compiler.is_compiling():
        # Keys of a dict become constants of the graph, as betas do in torch's Adam. Otherwise the cache of AOTAutograd
        # (torch 2.13) returns a graph with the new beta where it multiplies a tensor, and an old one elsewhere.
        dict.fromkeys((beta1, beta2))
    if beta_mean is not None and group.get("lean"):
        raise ValueError(LEAN_WITH_BETA_MEAN)
    return Hyper(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        eps_s=eps_s,
        weight_decay=decay / _get_max_lr(group) if group.get("decouple_lr") else decay,
        decoupled=group["decoupled_weight_decay"],
        beta_mean=beta_mean,
        z_clip=z_clip,
        maximize=bool(group["maximize"]),
    )


def _get_max_lr(group: Group) -> Any:
    """The lr that decay is relative to. Raises a ValueError if `decouple_lr` was set by hand, and cannot be obeyed."""
    if not group["decoupled_weight_decay"]:
        raise ValueError("decouple_lr=True is for decoupled weight decay; use the class whose name ends in W")
    if group.get("max_lr") is None:
        raise ValueError(
            "decouple_lr=True was set in a group that has no max_lr, the largest lr of its schedule: set "
            "group['max_lr'] too, and a weight_decay of that scale, such as 1e-5"
        )
    return group["max_lr"]


def read_lr(group: Group, inputs: StepInputs) -> Any:
    """The learning rate: a tensor only if the backend must not, or need not, read its value on the host."""
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return lr
    if inputs.backend == "cuda":
        stays_tensor = lr.is_cuda
    else:
        stays_tensor = inputs.backend != "cpu" and (inputs.capturable or inputs.differentiable)
    if not stays_tensor:
        return lr.item()
    # In 16 bits 1 - lr * weight_decay may be 1, and in 32 it has 7 digits.
    wide = any(param.dtype == torch.float64 for param in inputs.params)
    return lr.squeeze().to(torch.float64 if wide else torch.promote_types(lr.dtype, torch.float32))
