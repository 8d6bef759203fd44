"""Gradient release: step parameters inside backward and free each gradient as soon as it is used."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mvngrad.optim.inputs import Group, StepInputs
from mvngrad.optim.optimizer import RuleOptimizer
from mvngrad.optim.private import get_backward_id, queue_callback
from mvngrad.optim.tensors import get_local, is_sharded

BUCKET_BYTES = 2**25
"""Bytes of gradients to collect before a step: enough for one launch to serve many tensors, and little memory."""

CACHED_BACKWARDS = 4
"""The number of backward passes whose bucket inputs are cached, if passes make different buckets."""


class ReleasedGradient(Tensor):
    """Stands in `param.grad` for a gradient that was used and freed. It has no memory, and using it raises."""

    @staticmethod
    def __new__(cls, param: Tensor) -> ReleasedGradient:
        dtype = param.grad_dtype or param.dtype  # None allows any dtype
        return Tensor._make_wrapper_subclass(cls, param.shape, dtype=dtype, device=param.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{func}: this gradient was used and freed in backward (release_gradients). Clipping by norm, gradient "
            "scaling and accumulation over several backward passes need all gradients at once: use z_clip (LaProp, "
            "MVN-Grad), which needs no norm; bfloat16, which needs no scaling; optimizer.step() after every backward. "
            "Or call remove() on what release_gradients returned"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)})"


class Member(NamedTuple):
    """A parameter whose gradient is released, the index of its group, its index there, and what `.grad` becomes."""

    param: Tensor
    group_index: int
    param_index: int
    placeholder: ReleasedGradient


class GradientRelease:
    """The hooks of `release_gradients`; `remove` removes them.

    The optimizer owns it, and hooks hold weak references to it: the garbage collector does not see a cycle through a
    tensor's hooks, so that model and optimizer would never be freed. Without the optimizer the hooks do nothing.
    """

    def __init__(self, optimizer: RuleOptimizer, bucket_bytes: int) -> None:
        self._optimizer, self.bucket_bytes = weakref.ref(optimizer), bucket_bytes
        self._members: list[Member] = []
        self._released: set[int] = set()
        """The members that backward has stepped, until `step` ends the step. By position: tensors hash in Python."""
        self._groups_used: list[Group] = []
        """The groups as they were when the first bucket of this step was stepped."""
        self._versions_used: list[dict[str, int]] = []
        """The version counters of their options that are tensors: schedulers change such an lr in place."""
        self._bucket: dict[int, None] = {}
        """The members in the bucket, in order. A failed backward leaves some, which the next may add again."""
        self._bytes = 0
        self._backward: int | None = None
        """The backward pass that will call `flush` at its end."""
        self._inputs: dict[tuple[int, ...], list[StepInputs]] = {}
        """The inputs of each bucket, by what is in it, the last used at the end.

        Backward usually makes the same buckets at every step. With experts or layers that are left out at random, it
        makes others at each.
        """
        self._members_cached = 0
        """The members in all buckets of `_inputs`."""
        self._handles = []
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if param.requires_grad:
                    hook = partial(_on_gradient, weakref.ref(self), len(self._members))
                    self._handles.append(param.register_post_accumulate_grad_hook(hook))
                    self._members.append(Member(param, group_index, index, ReleasedGradient(param)))

    @property
    def optimizer(self) -> RuleOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it owns self
        return optimizer

    def has_member_in(self, group_index: int) -> bool:
        """Whether the gradient of a parameter of this group is released."""
        return any(member.group_index == group_index for member in self._members)

    def remove(self) -> None:
        """Remove the hooks: gradients stay until `zero_grad`, as without them."""
        for handle in self._handles:
            handle.remove()
        if (optimizer := self._optimizer()) is not None:
            optimizer.gradient_release = None  # first: flush may raise
            self.flush()
            self._drop_placeholders()

    def finish(self) -> None:
        """Step what is left in the bucket, and drop placeholders: the next backward belongs to the next step.

        Raises a RuntimeError if a gradient or an option was set after backward had used it.
        """
        self.flush()
        self._check_options_unchanged()
        if not self._drop_placeholders():
            raise RuntimeError(
                "release_gradients: a gradient was set between backward and step(), but backward has stepped its "
                "parameter already; change gradients by hooks of the parameters, or call remove()"
            )
        self._released, self._groups_used, self._versions_used = set(), [], []

    def _check_options_unchanged(self) -> None:
        names = {*self.optimizer.defaults, "max_lr"} - {"rounding_seed"}
        all_used = zip(self._groups_used, self._versions_used, self.optimizer.param_groups, strict=False)
        for used, versions, group in all_used:  # without groups that were added since
            for name in names & group.keys() & used.keys():
                old, new = used[name], group[name]
                if old is new:
                    changed, how = isinstance(new, Tensor) and new._version != versions[name], "in place"
                else:
                    has_tensor = isinstance(old, Tensor) or isinstance(new, Tensor)
                    changed, how = has_tensor or old != new, f"from {old} to {new}"
                if changed:
                    raise RuntimeError(
                        f"release_gradients: {name} was changed {how} between backward and step(), but backward has "
                        f"stepped the parameters already; set {name} before backward"
                    )

    def _drop_placeholders(self) -> bool:
        """Set placeholders to None; False if a released parameter has got another gradient."""
        only_placeholders = True
        for position in self._released:
            member = self._members[position]
            if member.param.grad is member.placeholder:
                member.param.grad = None
            elif member.param.grad is not None:
                only_placeholders = False
        return only_placeholders

    def flush(self) -> None:
        """Step the parameters of the bucket and free their gradients."""
        # A gradient is None if zero_grad was called after a backward that failed.
        positions = tuple(i for i in self._bucket if self._members[i].param.grad is not None)
        self._bucket, self._bytes, self._backward = {}, 0, None
        if not positions:
            return
        members = [self._members[i] for i in positions]
        self._check_members(members)
        groups = [
            {**group, "params": [], "param_indices": [], "rounding_seed": self.optimizer.init_rounding_seed(group)}
            for group in self.optimizer.param_groups
        ]
        for member in members:
            groups[member.group_index]["params"].append(member.param)
            groups[member.group_index]["param_indices"].append(member.param_index)
        with torch.no_grad():
            self.optimizer.step_groups(groups, self._get_inputs(positions))
        for position, member in zip(positions, members, strict=True):
            try:
                member.param.grad = member.placeholder
            except RuntimeError:  # noqa: PERF203 (cast, moved, or another grad_dtype; asking first costs more)
                placeholder = member.param.grad = ReleasedGradient(member.param)
                self._members[position] = member._replace(placeholder=placeholder)
        self._released.update(positions)
        if not self._groups_used:
            self._groups_used, self._versions_used = groups, list(map(_get_versions, groups))

    def _get_inputs(self, positions: tuple[int, ...]) -> list[StepInputs]:
        """The inputs of a bucket; forget those of the bucket that was not used for longest, if there are too many."""
        if positions not in self._inputs:
            self._members_cached += len(positions)
        inputs = self._inputs[positions] = self._inputs.pop(positions, [])
        while self._members_cached > CACHED_BACKWARDS * len(self._members):
            oldest = next(iter(self._inputs))
            del self._inputs[oldest]
            self._members_cached -= len(oldest)
        return inputs

    def _check_members(self, members: list[Member]) -> None:
        """Raise a RuntimeError if the parameters cannot be stepped in this backward."""
        params = [member.param for member in members]
        _check_not_replicated(params)
        if any(param.is_cuda for param in params) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("release_gradients: backward cannot be captured in a CUDA graph with it; call remove()")
        if not self._are_in_their_groups(members):
            raise RuntimeError(
                "release_gradients: parameters were moved or taken out of their groups since it was called; call "
                "remove() on what it returned, and release_gradients again"
            )

    def _are_in_their_groups(self, members: list[Member]) -> bool:
        params = [group["params"] for group in self.optimizer.param_groups]
        try:
            return all(params[group_index][index] is param for param, group_index, index, _ in members)
        except IndexError:
            return False

    def add(self, position: int, param: Tensor) -> None:
        """Put a member that got its gradient into the bucket, and step the bucket if it is full.

        This runs for every parameter, while the device may wait for the next kernel; checks are in `flush`. A backward
        that failed has not called `flush`, and FSDP2 may reduce gradients after the one at the end of backward.
        """
        if position in self._released:
            raise RuntimeError(
                "release_gradients: the last backward has stepped this parameter, and step() has not ended that step; "
                "call optimizer.step() after every backward: zero_grad() cannot take a step back"
            )
        self._bucket[position] = None
        grad = get_local(param.grad)  # type: ignore[arg-type]
        self._bytes += grad.nbytes if grad.layout == torch.strided else 0  # `flush` refuses a sparse one
        backward = get_backward_id()
        if backward is None or backward != self._backward:
            self._backward = backward
            queue_callback(self.flush)
        if self._bytes >= self.bucket_bytes:
            self.flush()


def _get_versions(group: Group) -> dict[str, int]:
    """The version counter of each option that is a tensor, which grows with each change in place."""
    return {name: value._version for name, value in group.items() if isinstance(value, Tensor)}


def _on_gradient(release: weakref.ref[GradientRelease], position: int, param: Tensor) -> None:
    """The hook of each parameter, called when its gradient is complete; does nothing without the optimizer."""
    if (owner := release()) is not None:
        owner.add(position, param)


def release_gradients(optimizer: RuleOptimizer, *, bucket_bytes: int = BUCKET_BYTES) -> GradientRelease:
    """Step parameters inside backward, a bucket at a time, and free their gradients, so that not all exist at once.

    The loop stays as it is: `loss.backward(); optimizer.step(); optimizer.zero_grad()`. `step` then only ends the step
    (hooks and schedulers see it as before), and results are bit-identical to those without release. While backward
    runs, parameters that are done already have their new values: a module used after its own backward is not
    possible, as for every optimizer in backward.

    Refused with an error, because they need all gradients at once: accumulation over several backward passes, gradient
    scaling, clipping by norm (use `z_clip`, which LaProp and MVN-Grad have), DistributedDataParallel. Also refused: a
    batch that is skipped after backward, gradients or options such as lr that are set between backward and `step`, and
    capture in a CUDA graph.
    FSDP2 works: a gradient is stepped when it has been reduced, and unsharded gradients can be accumulated before that.

    Args:
        optimizer: an optimizer of mvngrad that has all its parameters; later ones keep their gradients until `step`.
        bucket_bytes: bytes of gradients that are collected before a step.

    Returns an object whose `remove()` undoes it.

    >>> from mvngrad import MVNGradW
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = MVNGradW(model.parameters())
    >>> release = release_gradients(optimizer)
    >>> model(torch.ones(4)).sum().backward()
    >>> model.weight.grad
    ReleasedGradient(shape=(1, 4))
    >>> optimizer.step()
    >>> model.weight.grad is None
    True
    """
    is_wrapper = isinstance(getattr(optimizer, "optimizer", None), RuleOptimizer)  # Lightning's are subclasses, too
    if is_wrapper or not isinstance(optimizer, RuleOptimizer):
        raise TypeError(
            f"release_gradients needs an optimizer of mvngrad, not {type(optimizer).__name__}; if it wraps one, as in "
            "accelerate and lightning, pass its .optimizer"
        )
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(
            f"release_gradients: bucket_bytes={bucket_bytes!r} is invalid; it must be an int of at least 1"
        )
    if optimizer.gradient_release is not None:
        raise ValueError("release_gradients: this optimizer releases gradients already; call remove() on that first")
    for group in optimizer.param_groups:
        if group["differentiable"]:
            raise ValueError("release_gradients: differentiable=True needs the gradients; leave it out")
        _check_not_replicated(group["params"])
    release = optimizer.gradient_release = GradientRelease(optimizer, bucket_bytes)
    return release


def _check_not_replicated(params: list[Tensor]) -> None:
    """Raise a RuntimeError for unsharded parameters on several processes: their replicas would diverge."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and not all(map(is_sharded, params)):
        raise RuntimeError(
            "release_gradients: DistributedDataParallel reduces gradients after they are released; shard the model "
            "with FSDP2 (fully_shard), which reduces them before"
        )
