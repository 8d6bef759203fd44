"""One training on several processes: who this process is, and how a model is spread over them.

Everything here also works without a process group: then there is one process, and nothing to agree on, and what only
several need is not even imported.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mvngrad.optim.gather import is_sharded

Mode = Literal["ddp", "fsdp"]


def get_rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def init_process_group(mode: Mode | None, device: torch.device) -> torch.device:
    """Be in the group of processes that torchrun started, or in one that is there already; the device of this process.

    Gloo carries what the processes agree on, NCCL what their GPUs exchange. The group is left at the end of the
    process: models that were spread over it live as long, and a second one would have to be told apart from the first.
    """
    if mode is None:
        return device
    if not dist.is_initialized() and "RANK" not in os.environ:
        raise RuntimeError(
            f"parallel={mode!r} needs processes that know of each other: "
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
    """What to call in place of `model`, whose parameters are sharded in place with fsdp and stay whole with ddp.

    Under fsdp each entry of a ModuleList, a layer of a network, is gathered when it is needed, and `bfloat16` products
    are of bfloat16 parameters; gradients are reduced in float32 either way.
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
    """Whether the backward pass that comes next exchanges gradients: under ddp only that of the `last` micro-batch.

    Under fsdp all do: a process that waited would hold the gradients of the whole model, which it cannot be asked to.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last


def all_reduce_mean(value: Tensor) -> Tensor:
    """Over the processes, in place; nothing waits for a GPU."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= get_world_size()
    return value


def any_rank(*flags: bool) -> tuple[bool, ...]:
    """Those that any process raised: clocks and signals differ, and all must do the same."""
    if not dist.is_initialized():
        return flags
    raised = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return tuple(bool(flag) for flag in raised)


def broadcast_from_rank0(value: Any) -> Any:
    """What process 0 found."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, device=torch.device("cpu"))
    return box[0]


def barrier() -> None:
    """Wait for all processes."""
    any_rank(False)


def copy_into(value: Any, whole: Tensor) -> None:
    """Give a tensor, or this process's part of it, the values of a whole one."""
    if not is_sharded(value):
        value.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    # It asks nobody: every process has the whole.
    shared = distribute_tensor(whole.to(value.device), value.device_mesh, value.placements, src_data_rank=None)
    value.to_local().copy_(shared.to_local())


def full_tensor(value: Any) -> Tensor:
    """All of a tensor; where it is in parts, every process has to ask."""
    found: Tensor = value.full_tensor() if is_sharded(value) else value
    return found
