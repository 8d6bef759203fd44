"""DTensors: what is measured of a parameter is the part that is here."""

import pytest
import torch
import torch.distributed as dist
from family import tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mvngrad
from mvngrad.diagnostics import Monitor, variance_gap


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [None, torch.bfloat16, "int8"])
@pytest.mark.parametrize("make", [mvngrad.AdaBelief, mvngrad.MVNGrad])
def test_a_sharded_parameter_is_measured_as_a_whole_one_where_it_is_whole(mesh, make, kind):
    (start,), grads = tensors((40, 30)), tensors(*[(40, 30)] * 30, seed=1)

    def run(placed):
        weight = torch.nn.Parameter(placed(start.clone()))
        optimizer, records = make([weight], state_dtype=kind), []
        with Monitor(optimizer, every=10, sink=records.append, sample=500):
            for g in grads:
                weight.grad = placed(g)
                optimizer.step()
        return records, variance_gap(optimizer, lambda g: [placed(g)], grads[:5])

    sharded = run(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    assert sharded == run(lambda tensor: tensor)
