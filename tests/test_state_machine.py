"""Random sequences of what users do between steps, each step compared with the rule in float64.

Before a step, parameters, gradients and state are read as a user would read them, through `param.grad` and
`optimizer.state`. The rule steps them in float64; after `optimizer.step()` the same reading must agree. A backend that
writes to freed memory, or misses a change of layout or sign bit, fails here.

`MVNGRAD_SEQUENCES=10000 pytest tests/test_state_machine.py` runs a long search; with `-m gpu`, on a CUDA device.
"""

import copy
import os
import pickle
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from family import NAMES, NUMPY, each_device
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import mvngrad
from mvngrad.optim import backends, optimizer as optimizer_module
from mvngrad.optim.formats import arithmetic_dtype, get_stored_names, load_state
from mvngrad.optim.tensors import view_as_real as real_view
from mvngrad.rule import LEAN, Hyper

SEQUENCES = int(os.environ.get("MVNGRAD_SEQUENCES", "40"))
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (300,)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.uint8: 0.3}
CASTS = {
    torch.float32: (torch.float64, torch.bfloat16),
    torch.float64: (torch.float32,),
    torch.bfloat16: (torch.float32,),
    torch.complex64: (torch.complex128,),
    torch.complex128: (torch.complex64,),
}


def read(tensor):
    """A tensor's values as float64 or complex128, bits resolved."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).clone().numpy()


def real(values):
    return np.stack([values.real, values.imag], -1) if np.iscomplexobj(values) else values


def address(p):
    return p.data_ptr() if p.numel() else id(p)


def read_state(cell, state):
    """The state of a parameter in float64, from any format."""
    values = load_state(cell.state_names, {name: value.detach() for name, value in state.items()}, torch.float64)
    return {name: read(value) for name, value in values.items()}


class OptimizerMachine(RuleBasedStateMachine):
    options: dict  # select the backend; set by the test, as the next two
    device = "cpu"
    compiles = False

    @initialize(
        name=st.sampled_from(NAMES),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.complex64, torch.bfloat16]),
        state=st.sampled_from([None, None, torch.float32, torch.bfloat16, "int8"]),
        lean=st.booleans(),
        seed=st.integers(0, 100),
    )
    def begin(self, name, dtype, state, lean, seed):
        self.compiled = None
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.cls = getattr(mvngrad, name)
        self.new_options = {"state_dtype": state, **self.options}
        if lean and "lean" in self.cls.rule.options:
            self.new_options["lean"] = True
        self.optimizer = self.make([self.new_param((3, 5)), self.new_param((7,))])

    def make(self, params):
        return self.cls(params, lr=0.01, **self.new_options)

    def random(self, shape, like=None):
        dtype, device = (self.dtype, self.device) if like is None else (like.dtype, like.device)
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=self.generator, dtype=wide).to(device, dtype)

    def new_param(self, shape):
        return torch.nn.Parameter(self.random(shape))

    @property
    def params(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def pick(self, index):
        return self.params[index % len(self.params)]

    # Gradients

    @rule(kind=st.sampled_from(["dense", "transposed", "expanded", "negative", "conjugate", "strided", "zero"]))
    def set_gradients(self, kind):
        for p in self.params:
            if p.requires_grad:
                p.grad = self.gradient(p, kind)

    def gradient(self, p, kind):
        dense = self.random(p.shape, p)
        if kind == "transposed" and p.dim() > 1:
            return dense.mT.contiguous().mT
        if kind == "expanded" and p.dim():
            return self.random(p.shape[-1:], p).expand(p.shape)
        if kind == "negative" and not p.is_complex():
            return torch._neg_view(dense)
        if kind == "conjugate" and p.is_complex():
            return dense.conj()
        if kind == "strided" and p.dim():
            return self.random((*p.shape, 2), p)[..., 0]
        return torch.zeros_like(dense) if kind == "zero" else dense

    @rule(kind=st.sampled_from(["dense", "strided"]))
    def accumulate_through_two_uses(self, kind):
        """As for a weight that two layers share."""
        for p in self.params:
            if p.grad is not None and (p.grad.is_neg() or p.grad.is_conj() or not p.grad.is_contiguous()):
                p.grad = None  # torch cannot add to all of these in place
            if p.requires_grad:
                loss = sum((p * self.gradient(p, kind)).sum().abs() for _ in range(2))
                loss.backward()

    @rule(to_none=st.booleans())
    def zero_grad(self, to_none):
        negated = any(p.grad is not None and (p.grad.is_neg() or p.grad.is_conj()) for p in self.params)
        self.optimizer.zero_grad(set_to_none=to_none or negated)  # torch cannot zero these in place

    @rule(index=st.integers(0, 5))
    def drop_one_gradient(self, index):
        self.pick(index).grad = None

    # Parameters and state

    @rule(shape=st.sampled_from(SHAPES), new_group=st.booleans())
    def add_parameter(self, shape, new_group):
        if len(self.params) < 6:
            if new_group:
                self.optimizer.add_param_group({"params": [self.new_param(shape)], "lr": 0.1})
            else:  # as libraries that grow a layer do
                self.optimizer.param_groups[0]["params"].append(self.new_param(shape))

    @rule(index=st.integers(0, 5), requires_grad=st.booleans())
    def freeze_or_unfreeze(self, index, requires_grad):
        p = self.pick(index)
        p.requires_grad_(requires_grad)
        if not requires_grad:
            p.grad = None

    @rule(index=st.integers(0, 5), transposed=st.booleans())
    def swap_parameter_data(self, index, transposed):
        p = self.pick(index)
        p.data = p.data.mT.contiguous().mT if transposed and p.dim() > 1 else p.data.clone()

    @rule(first=st.integers(0, 5), second=st.integers(0, 5))
    def tie_parameters(self, first, second):
        """Let two parameters have the same memory, as libraries do that tie weights by their data."""
        p, q = self.pick(first), self.pick(second)
        if p is not q and (p.shape, p.dtype, p.device) == (q.shape, q.dtype, q.device):
            q.data = p.data

    @rule(index=st.integers(0, 5), choice=st.integers(0, 1))
    def cast_parameter(self, index, choice):
        """As model.to(dtype), which leaves the optimizer's state alone."""
        p = self.pick(index)
        self.compiled = None  # torch's compiler does not guard the dtypes of an optimizer's parameters
        choices = CASTS[p.dtype]
        gradient, p.grad = p.grad, None
        p.data = p.data.to(choices[choice % len(choices)])
        p.grad = None if gradient is None else gradient.to(p.dtype)

    @rule(away=st.booleans(), state_too=st.booleans())
    def move(self, away, state_too):
        """To other memory or, on a GPU, to the CPU and back, as the common recipe `optimizer_to` does."""
        device = "cpu" if away else self.device
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        for p in self.params:
            gradient, p.grad = p.grad, None
            p.data = p.data.to(device, copy=True)
            p.grad = None if gradient is None else gradient.to(device)
        for value in values if state_too or self.device != "cpu" else []:
            value.data = value.data.to(device, copy=True)

    @rule()
    def swap_state_data(self):
        for state in self.optimizer.state.values():
            for value in state.values():
                value.data = value.data.clone()

    @rule()
    def replace_state_tensors(self):
        for state in self.optimizer.state.values():
            for name in state:
                state[name] = state[name].clone()

    @rule(index=st.integers(0, 5))
    def forget_state_of_one(self, index):
        self.optimizer.state.pop(self.pick(index), None)

    @rule()
    def clear_state(self):
        self.optimizer.state.clear()

    # Copies and checkpoints

    @rule(how=st.sampled_from(["deepcopy", "pickle"]))
    def copy_whole_optimizer(self, how):
        gradients = [p.grad for p in self.params]
        self.optimizer = (
            copy.deepcopy(self.optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(self.optimizer))
        )
        for p, gradient in zip(self.params, gradients, strict=True):
            p.grad = gradient

    @rule(new_optimizer=st.booleans())
    def load_own_state_dict(self, new_optimizer):
        saved = copy.deepcopy(self.optimizer.state_dict())
        if new_optimizer:
            groups = [{"params": group["params"]} for group in self.optimizer.param_groups]
            self.optimizer = self.make(groups)
        self.optimizer.load_state_dict(saved)

    # Hyper-parameters

    @rule(lr=st.sampled_from([0.0, 1e-3, 0.1]), tensor=st.booleans())
    def change_lr(self, lr, tensor):
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(lr) if tensor and self.tensor_lr else lr

    tensor_lr = True

    @rule(betas=st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.3, 0.99)]), decay=st.sampled_from([0.0, 0.1]))
    def change_betas_and_decay(self, betas, decay):
        for group in self.optimizer.param_groups:
            group["betas"], group["weight_decay"] = betas, decay

    @rule(z_clip=st.sampled_from([None, 0.5]), eps=st.sampled_from([1e-8, 1e-3]), maximize=st.booleans())
    def change_options(self, z_clip, eps, maximize):
        for group in self.optimizer.param_groups:
            group["maximize"], group["eps"] = maximize, eps
            if "z_clip" in group:
                group["z_clip"] = z_clip

    @rule(capturable=st.booleans(), eager=st.booleans())
    def switch_backend(self, capturable, eager):
        for group in self.optimizer.param_groups:
            group["capturable"] = capturable
            group.update({"foreach": False, "fused": False} if eager else {"foreach": None, "fused": None})
            if not eager:
                group.update(self.options)

    # The step

    @rule(in_thread=st.booleans())
    def step(self, in_thread):
        shared = {}  # parameters with the same memory are stepped one after the other
        expected = [self.oracle(group, p, shared) for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [None if p.grad is None else read(p.grad) for p in self.params]
        if in_thread:
            errors = []
            thread = threading.Thread(target=self.step_and_store_error, args=(errors,))
            thread.start()
            thread.join()
            if errors:
                raise errors[0]
        else:
            self.take_step()
        for p, (averages, count), before in zip(self.params, expected, gradients, strict=True):
            self.compare(p, shared[address(p)], averages, count)
            assert (p.grad is None) == (before is None)
            if before is not None:
                np.testing.assert_array_equal(read(p.grad), before, "the step changed a gradient")

    def take_step(self):
        if not self.compiles:
            self.optimizer.step()
            return
        if self.compiled is None or self.compiled[0] is not self.optimizer:
            torch._dynamo.reset()
            self.compiled = self.optimizer, torch.compile(self.optimizer.step, backend="eager")
        self.compiled[1]()

    def step_and_store_error(self, errors):
        try:
            self.take_step()
        except Exception as error:
            errors.append(error)

    def oracle(self, group, p, shared):
        """State and count after the step, by the rule; `shared` gets the parameter, by its address."""
        cell, state = self.optimizer.get_rule(group), self.optimizer.state.get(p, {})
        x = shared.setdefault(address(p), real(read(p)))
        count = float(state["step"]) if state else 0.0
        old = read_state(cell, state) if state else cell.init(np.zeros_like(x))
        if p.grad is None:
            return (old if state else {}), count
        hyper = Hyper(
            lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            eps_s=group.get("eps_s", 0.0), weight_decay=group["weight_decay"], decoupled=self.cls.decoupled,
            beta_mean=group.get("beta_mean"), z_clip=group.get("z_clip"), maximize=group["maximize"],
        )  # fmt: skip
        shared[address(p)], new = cell.update(x, real(read(p.grad)), old, count + 1, hyper, NUMPY)
        return new, count + 1

    def compare(self, p, x, averages, count):
        state = self.optimizer.state.get(p, {})
        tolerance = TOLERANCE[torch.float32 if p.dtype == torch.complex64 else arithmetic_dtype(real_view(p))]
        if state:
            assert float(state["step"]) == count
            cell = self.optimizer.rule if not self.new_options.get("lean") else LEAN
            assert {*get_stored_names(cell.state_names, self.new_options["state_dtype"]), "step"} == set(state)
            values = read_state(cell, state)
            for name, value in averages.items():
                stored = real_view(state[name]).dtype
                self.assert_close(values[name], value, max(tolerance, TOLERANCE[stored]))
        else:
            assert not averages
        self.assert_close(real(read(p)), x, max(tolerance, TOLERANCE[real_view(p).dtype]))

    @staticmethod
    def assert_close(values, want, tolerance):
        """Relative to the largest value, because averages cancel: a mean near 0 has the error of its gradients."""
        scale = max(float(np.abs(want).max(initial=0.0)), 1e-12)
        np.testing.assert_allclose(values, want, rtol=tolerance, atol=scale * tolerance)


BACKENDS = {
    "eager": {"foreach": False},
    "foreach": {"foreach": True},
    "cpu": {"fused": True},
    "kernel": {},
    "compiled": {"foreach": False},
}
SHARE = {"compiled": 20}
"""It compiles, so it takes one sequence where the others take so many."""


@pytest.fixture
def use_backend(request, backend, device, monkeypatch):
    """Let a backend take every step that it can, also on a CPU."""
    if backend == "kernel":
        request.getfixturevalue("by_kernel")
    elif backend == "cpu":
        request.getfixturevalue("cpp_compiler")
        if device != "cpu":
            pytest.skip("this backend runs on the CPU only")
    elif backend == "foreach" and device == "cpu":

        def choose(group):
            chosen = backends.choose_backend(group)
            owns = all(backends.owns_memory(p) for p in group["params"])
            return "foreach" if group["foreach"] and owns and not backends.share_memory(group["params"]) else chosen

        monkeypatch.setattr(optimizer_module, "choose_backend", choose)
    with torch._dynamo.config.patch(recompile_limit=10**6) if backend == "compiled" else nullcontext():
        yield


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.usefixtures("use_backend")
@each_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_agrees_with_the_rule_after_any_changes(backend, device):
    names = {"options": BACKENDS[backend], "device": device, "compiles": backend == "compiled"}
    run_state_machine_as_test(
        type("Machine", (OptimizerMachine,), names),
        settings=settings(
            max_examples=max(1, SEQUENCES // SHARE.get(backend, 1)),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
