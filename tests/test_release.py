"""Gradients that are used and freed inside backward."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from family import OPTIMIZERS
from test_sharded import on_two_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear, ReLU, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import mvngrad
from mvngrad import release_gradients
from mvngrad.optim.release import CACHED_BACKWARDS, GradientRelease, ReleasedGradient

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
FORMATS = [
    pytest.param({}, id="float32"),
    pytest.param({"state_dtype": torch.bfloat16, "stochastic_rounding": True}, id="bf16"),
    pytest.param({"state_dtype": "int8"}, id="int8"),
    pytest.param({"state_dtype": "int8", "lean": True}, id="lean"),
]


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [Linear(16, 40), ReLU(), Linear(40, 24), ReLU(), Linear(24, 16), ReLU(), Linear(16, 1)]
    return Sequential(*layers).to(dtype)


def make_groups(model):
    """Biases in a group of their own, one parameter frozen."""
    model[2].weight.requires_grad = False
    weights = [param for param in model.parameters() if param.ndim > 1]
    return [{"params": weights}, {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]


def train(model, optimizer, steps=12, scheduler=None):
    for _ in range(steps):
        model(X.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()


@pytest.mark.parametrize("bucket_bytes", [1, 1500, 2**25])
@pytest.mark.parametrize("options", FORMATS)
def test_results_are_bit_identical_to_those_without_release(options, bucket_bytes):
    dtype = torch.bfloat16 if "stochastic_rounding" in options else torch.float32
    results = []
    for release in (False, True):
        model = make_model(dtype)
        optimizer = mvngrad.MVNGradW(make_groups(model), lr=1e-2, **options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        if release:
            release_gradients(optimizer, bucket_bytes=bucket_bytes)
        train(model, optimizer, scheduler=scheduler)
        results.append((model.state_dict(), optimizer.state_dict()["state"]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_every_optimizer_can_release(make):
    models = make_model(), make_model()
    for model in models:
        optimizer = make(model.parameters(), lr=1e-2)
        if model is models[1]:
            release_gradients(optimizer)
        train(model, optimizer, 3)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


def test_only_a_bucket_of_gradients_exists_at_a_time():
    """20 layers of 4 KB; buckets of two layers."""
    model = Sequential(*(Linear(32, 32, bias=False) for _ in range(20)))
    optimizer, alive = mvngrad.MVNGradW(model.parameters()), []
    release_gradients(optimizer, bucket_bytes=2 * 4096)

    def count(param):
        grads = (p.grad for p in model.parameters())
        alive.append(sum(not isinstance(grad, ReleasedGradient) for grad in grads if grad is not None))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    model(torch.randn(4, 32)).sum().backward()
    assert len(alive) == 20
    assert max(alive) <= 2
    assert all(isinstance(param.grad, ReleasedGradient) for param in model.parameters())
    assert all(optimizer.state[param]["step"] == 1 for param in model.parameters())


@pytest.mark.parametrize("use", ["second backward", "clip", "unscale", "scaler step", "read", "zero in place"])
def test_what_needs_all_gradients_is_refused_with_the_remedy(use):
    model = make_model()
    optimizer = mvngrad.MVNGradW(model.parameters())
    release_gradients(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(X).mean()).backward()
    actions = {
        "second backward": lambda: model(X).mean().backward(),
        "clip": lambda: clip_grad_norm_(model.parameters(), 1.0),
        "unscale": lambda: scaler.unscale_(optimizer),
        "scaler step": lambda: scaler.step(optimizer),
        "read": lambda: model[0].weight.grad.norm(),
        "zero in place": lambda: optimizer.zero_grad(set_to_none=False),
    }
    with pytest.raises(RuntimeError, match=r"used and freed in backward .* use z_clip"):
        actions[use]()


def test_gradients_that_backward_did_not_make_are_stepped_by_step():
    models = make_model(), make_model()
    for model in models:
        optimizer = mvngrad.MVNGradW(model.parameters(), lr=1e-2)
        if model is models[1]:
            release_gradients(optimizer)
        late = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [late], "weight_decay": 0.0})
        for _ in range(3):
            model(X).square().mean().backward()
            late.grad = torch.arange(3.0)
            optimizer.step()
            optimizer.zero_grad()
        assert (late != 1).tolist() == [False, True, True]
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


def test_after_a_failed_backward_training_continues():
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("on purpose")

    model = make_model()
    optimizer = mvngrad.MVNGradW(model.parameters())
    release_gradients(optimizer)
    before = copy.deepcopy(model[0].state_dict())
    with pytest.raises(ArithmeticError, match="on purpose"):
        model[1:](Fail.apply(model[0](X))).sum().backward()
    torch.testing.assert_close(model[0].state_dict(), before)
    optimizer.zero_grad()
    train(model, optimizer, 2)
    assert {optimizer.state[param]["step"].item() for param in model.parameters()} == {2}


def test_gradients_are_freed_in_backward_and_everything_with_the_optimizer():
    model = make_model()
    optimizer = mvngrad.MVNGradW(model.parameters())
    gradients, alive = [], []

    def count_alive(param):
        gradients.append(param.grad.untyped_storage()._weak_ref())
        alive.append(sum(not torch.UntypedStorage._expired(each) for each in gradients))

    handles = [param.register_post_accumulate_grad_hook(count_alive) for param in model.parameters()]
    release_gradients(optimizer, bucket_bytes=1)
    for _ in range(2):
        model(X).mean().backward()
        optimizer.step()
    assert alive == [1] * 2 * len(handles)
    params = [weakref.ref(param) for param in model.parameters()]
    last = model[2]
    del model, optimizer
    gc.collect()
    assert {param() for param in params} == {None, *last.parameters()}
    last(torch.ones(1, last.in_features)).mean().backward()  # its hooks are left, and do nothing
    assert not isinstance(last.weight.grad, ReleasedGradient)


@pytest.mark.parametrize("fused", [None, True])
def test_only_a_bucket_and_the_gradient_of_a_tied_embedding_exist_at_a_time(fused):
    """Six layers of 4 KB in buckets of two. The embedding's gradient is complete when backward reaches its input."""
    embedding = torch.nn.Embedding(64, 32)
    layers = Sequential(*(Linear(32, 32, bias=False) for _ in range(6)))
    optimizer = mvngrad.MVNGradW([embedding.weight, *layers.parameters()], state_dtype="int8", lean=True, fused=fused)
    gradients, alive = [], []

    def count_bytes(param):
        gradients.append((param.grad.untyped_storage()._weak_ref(), param.grad.nbytes))
        alive.append(sum(size for storage, size in gradients if not torch.UntypedStorage._expired(storage)))

    for param in (embedding.weight, *layers.parameters()):
        param.register_post_accumulate_grad_hook(count_bytes)
    release_gradients(optimizer, bucket_bytes=2 * 4096)
    tokens = torch.arange(8)
    for _ in range(3):
        logits = torch.nn.functional.linear(layers(embedding(tokens)), embedding.weight)
        torch.nn.functional.cross_entropy(logits, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert alive == 3 * [4096, 8192, 4096, 8192, 4096, 8192, embedding.weight.nbytes]


def test_backward_calls_flush_once_at_its_end(monkeypatch):
    """Not once for each parameter, also after a backward that failed."""
    calls, flush = [], GradientRelease.flush
    monkeypatch.setattr(GradientRelease, "flush", lambda self: calls.append(len(self._bucket)) or flush(self))
    model = make_model()
    optimizer = mvngrad.MVNGradW(model.parameters())
    release_gradients(optimizer)
    for fails in (False, True, False):
        calls.clear()
        hidden = model[0](X)
        loss = model[1:](hidden).mean()
        if fails:
            hidden.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            assert not calls
            optimizer.zero_grad()
        else:
            loss.backward()
            assert calls == [len([*model.parameters()])]
            optimizer.step()


def test_a_batch_cannot_be_skipped_by_zero_grad():
    for zero_grad in ("optimizer", "model"):
        model = make_model()
        optimizer = mvngrad.MVNGradW(model.parameters())
        release_gradients(optimizer)
        model(X).mean().backward()
        (optimizer if zero_grad == "optimizer" else model).zero_grad()
        with pytest.raises(RuntimeError, match=r"call optimizer.step\(\) after every backward"):
            model(X).mean().backward()


def test_a_tensor_lr_changed_in_place_after_backward_is_refused():
    model, lr = torch.nn.Linear(3, 2), torch.tensor(0.1)
    optimizer = mvngrad.MVNGradW(model.parameters(), lr=lr)
    release_gradients(optimizer)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    lr.fill_(0.05)
    model(torch.ones(3)).sum().backward()
    lr.fill_(0.01)
    with pytest.raises(RuntimeError, match="lr was changed in place between backward and step"):
        optimizer.step()


def test_a_sparse_gradient_is_refused_by_name():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = mvngrad.MVNGradW(embedding.parameters())
    release_gradients(optimizer)
    with pytest.raises(ValueError, match="MVNGradW needs dense gradients"):
        embedding(torch.tensor([1])).sum().backward()


def test_gradients_and_options_set_after_backward_are_refused():
    def set_gradient(optimizer, *_):
        model[0].weight.grad = torch.ones_like(model[0].weight)

    def set_lr(optimizer, *_):
        optimizer.param_groups[1]["lr"] = 0.5

    for hook, message in ((set_gradient, "a gradient was set"), (set_lr, "lr was changed from 0.001 to 0.5")):
        model = make_model()
        optimizer = mvngrad.MVNGradW(make_groups(model))
        release_gradients(optimizer)
        handle = optimizer.register_step_pre_hook(hook)
        model(X).mean().backward()
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        handle.remove()


@pytest.mark.parametrize(
    "regroup",
    [
        lambda groups: groups.pop(0),
        lambda groups: groups[1]["params"].append(groups[0]["params"].pop(0)),
        lambda groups: groups[0]["params"].__setitem__(0, torch.nn.Parameter(torch.ones(1))),
    ],
    ids=["a group removed", "a parameter moved", "a parameter replaced"],
)
def test_parameters_in_other_groups_than_at_first_are_refused(regroup):
    a, b, c = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    groups = [{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.1}, {"params": [c], "lr": 1e-3}]
    optimizer = mvngrad.AdamW(groups, weight_decay=0.0)
    release = release_gradients(optimizer)
    regroup(optimizer.param_groups)
    with pytest.raises(RuntimeError, match=r"taken out of their groups .* call remove"):
        (a + b).sum().backward()
    assert a.item() == b.item() == 1.0
    a.grad = b.grad = None
    release.remove()


def test_a_model_may_be_cast_after_release():
    model = make_model()
    optimizer = mvngrad.MVNGradW(model.parameters(), stochastic_rounding=True)
    release_gradients(optimizer)
    model.bfloat16()
    before = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, steps=2)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("set_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, None], ids=str)
def test_gradients_may_have_another_dtype_than_their_parameters(dtype, set_first):
    results = []
    for release in (False, True):
        model = make_model(torch.bfloat16)
        optimizer = mvngrad.MVNGradW(model.parameters(), lr=1e-2)
        if release and not set_first:
            release_gradients(optimizer)
        for param in model.parameters():
            param.grad_dtype = dtype
        if release and set_first:
            release_gradients(optimizer)
        train(model, optimizer, 3)
        results.append((model.state_dict(), optimizer.state_dict()["state"]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_remove_works_after_the_optimizer_is_gone():
    model = make_model()
    release = release_gradients(mvngrad.MVNGradW(model.parameters()))
    gc.collect()
    release.remove()
    model(X).mean().backward()
    assert not isinstance(model[0].weight.grad, ReleasedGradient)


def test_release_continues_after_loading_a_checkpoint():
    results = []
    for release in (False, True):
        model = make_model()
        optimizer = mvngrad.MVNGradW(make_groups(model), lr=1e-2, state_dtype="int8")
        if release:
            release_gradients(optimizer, bucket_bytes=1000)
        train(model, optimizer, steps=3)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, steps=2)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        model(X).mean().backward()
        used = [param.grad for param in model.parameters() if param.requires_grad]
        assert all(isinstance(grad, ReleasedGradient) == release for grad in used)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, steps=2)
        results.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *results))


def test_remove_works_in_the_middle_of_a_step():
    model = make_model()
    optimizer = mvngrad.MVNGradW(model.parameters(), lr=1e-2)
    release = release_gradients(optimizer)
    model(X).mean().backward()
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match="set lr before backward"):
        optimizer.step()
    release.remove()
    assert all(param.grad is None for param in model.parameters())
    before = model[0].weight.detach().clone()
    model(X).mean().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_remove_and_copies_release_nothing():
    model = make_model()
    optimizer = mvngrad.MVNGradW(model.parameters())
    release = release_gradients(optimizer)
    with pytest.raises(ValueError, match="already; call remove"):
        release_gradients(optimizer)
    assert copy.deepcopy(optimizer).gradient_release is None
    release.remove()
    model(X).mean().backward()
    assert not any(isinstance(param.grad, ReleasedGradient) for param in model.parameters())
    with pytest.raises(TypeError, match="not SGD"):
        release_gradients(torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="differentiable=True needs the gradients"):
        release_gradients(mvngrad.MVNGradW(model.parameters(), differentiable=True))


def train_on_two_ranks(_):
    """FSDP2 with release equals FSDP2 without, also with accumulation before reducing; DDP is refused."""
    for roots in (1, 2):
        train_sharded(roots)
    model = DistributedDataParallel(make_model())
    optimizer = mvngrad.MVNGradW(model.parameters())
    with pytest.raises(RuntimeError, match="shard the model with FSDP2"):
        release_gradients(optimizer)


def train_sharded(roots):
    """With two roots, FSDP2 reduces the gradients of one after the first flush at the end of backward."""
    results = []
    for release in (False, True):
        model = make_model()
        parts = [model] if roots == 1 else [model[:3], model[3:]]
        for layer in (model[0], model[2], *parts):
            fully_shard(layer)
        optimizer = mvngrad.MVNGradW(model.parameters(), lr=1e-2, state_dtype="int8")
        if release:
            release_gradients(optimizer, bucket_bytes=1000)
        for _ in range(4):
            for part, rows in enumerate(X.chunk(2)):
                for root in parts:
                    root.set_requires_gradient_sync(part == 1)
                    rows = root(rows)
                rows.square().mean().backward()
            if release:
                assert all(isinstance(param.grad, ReleasedGradient) for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.full_tensor() for param in model.parameters()])
    assert all(map(torch.equal, *results))


def test_fsdp_releases_and_ddp_is_refused(tmp_path):
    on_two_ranks(train_on_two_ranks, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("options", FORMATS)
def test_release_lowers_the_peak_by_the_bytes_of_the_gradients(options):
    peaks, results = [], []
    for release in (False, True):
        torch.manual_seed(0)
        model = Sequential(*(Linear(1024, 1024, bias=False) for _ in range(16))).cuda()  # 64 MiB
        optimizer = mvngrad.MVNGradW(model.parameters(), lr=1e-2, **options)
        if release:
            release_gradients(optimizer, bucket_bytes=2**23)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(torch.ones(8, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            peak = torch.cuda.max_memory_allocated()
        peaks.append(peak)
        state = [value for param in model.parameters() for value in optimizer.state[param].values()]
        results.append([tensor.detach().cpu() for tensor in (*model.parameters(), *state)])
        del model, optimizer, state
        gc.collect()
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert peaks[0] - peaks[1] >= 2**26 - 2**23 - 2**22 - 2**21  # a bucket, and what is below the allocator's grain


def test_keys_of_a_group_that_are_not_options_may_change_between_backward_and_step():
    model = make_model()
    optimizer = mvngrad.MVNGrad(model.parameters())
    release_gradients(optimizer)
    group = optimizer.param_groups[0]
    group |= {"tokens": 0, "array": np.ones(3)}
    for _ in range(2):
        model(X).sum().backward()
        group["tokens"] += 1
        group["array"] = group["array"] + 1
        optimizer.step()
    model(X).sum().backward()
    group["eps"] = 1.0
    with pytest.raises(RuntimeError, match="eps was changed"):
        optimizer.step()


def test_inputs_of_buckets_that_differ_at_every_step_are_not_kept_for_ever():
    """As with layers or experts that are left out at random: each step steps other parameters."""
    results = []
    for release in (False, True):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(Linear(4, 4) for _ in range(6))
        optimizer = mvngrad.MVNGradW(layers.parameters(), lr=1e-2, state_dtype="int8")
        handle = release_gradients(optimizer, bucket_bytes=100) if release else None
        for step in range(1, 64):  # every selection of the six layers but none
            x = torch.ones(2, 4)
            for bit, layer in enumerate(layers):
                x = x + layer(x) if step >> bit & 1 else x
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if handle is not None:
                cached = sum(map(len, handle._inputs))
                assert cached == handle._members_cached <= CACHED_BACKWARDS * 12
        results.append((layers.state_dict(), optimizer.state_dict()["state"]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
