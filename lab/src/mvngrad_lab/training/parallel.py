"""Training on several processes: the process group, its collectives, and how a model is replicated or sharded.

Everything here also works without a process group, as in a group of one; what only several processes need is imported
when it is used.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mvngrad_lab.errors import NotPossible

Mode = Literal["ddp", "fsdp"]
T = TypeVar("T")


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def init_process_group(mode: Mode | None, device: torch.device) -> torch.device:
    """Join the process group that torchrun started, unless this process is in one; returns the process's device.

    Gloo carries flags and checkpoints, NCCL gradients. The group is destroyed at the end of the process, because
    models that are sharded over it may live as long.
    """
    if mode is None:
        return device
    if not dist.is_initialized() and "RANK" not in os.environ:
        raise NotPossible(
            f"parallel={mode!r} needs a process group: "
            f"torchrun --nproc-per-node 2 -m mvngrad_lab train ... --parallel {mode}"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    return device


def wrap_model(model: nn.Module, mode: Mode | None, bfloat16: bool, compiled: bool) -> nn.Module:
    """The module to call for `model`. With fsdp, the parameters of `model` itself become shards.

    With fsdp each entry of a ModuleList, a layer of a network, is gathered when it is needed, and with `bfloat16` it is
    gathered and multiplied in bfloat16. Gradients are reduced in float32 in any case.
    """
    if mode is None:
        return model
    if mode == "ddp":
        if compiled:
            model.compile(dynamic=False)
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else MixedPrecisionPolicy()
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for layer in layers:
            if compiled:
                layer.compile(dynamic=False)
            fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def set_gradient_sync(model: nn.Module, last: bool) -> None:
    """With ddp, reduce gradients only in the backward pass of the `last` micro-batch.

    With fsdp every backward pass reduces; otherwise a process would have to hold the gradients of the whole model.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last


def all_reduce_mean(value: Tensor) -> Tensor:
    """The mean over processes, in place. A collective."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= get_world_size()
    return value


def any_rank(*flags: bool) -> tuple[bool, ...]:
    """For each flag, whether it is set on any rank: clocks and signals differ. A collective."""
    if not dist.is_initialized():
        return flags
    raised = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return tuple(bool(flag) for flag in raised)


def broadcast_from_rank0(value: T) -> T:
    """The value that rank 0 has. A collective: every rank must call it."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, device=torch.device("cpu"))
    return box[0]


def barrier() -> None:
    """Wait for all processes. A collective, on the CPU."""
    any_rank(False)


def is_sharded(value: Any) -> bool:
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def shard_like(value: Any, shard: Any) -> Any:
    """A whole tensor, which every process has, sharded like another; a sharded one is returned as it is."""
    if is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None)


def copy_into(target: Any, value: Any) -> None:
    """Copy a tensor into another, whose process may have only a shard of it."""
    if is_sharded(target):
        target, value = target.to_local(), shard_like(value, target).to_local()
    target.copy_(value)


def full_tensor(value: Any) -> Tensor:
    """The whole of a tensor. A collective if it is sharded."""
    whole: Tensor = value.full_tensor() if is_sharded(value) else value
    return whole
