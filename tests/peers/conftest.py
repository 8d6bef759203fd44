import os
from importlib import import_module

import numpy as np
import pytest
import torch
from family import jax_in_float64


@pytest.fixture(scope="session")
def peer():
    """A function that imports another project's package. If it is missing, the test is skipped; in CI it fails."""
    return import_module if os.environ.get("CI") == "true" else pytest.importorskip


class Problem:
    """A start, 100 gradients from 1e-4 to 1e2 in size, and a schedule, the same for every implementation."""

    def __init__(self, peer):
        rng = np.random.default_rng(0)
        scale = 10.0 ** rng.integers(-4, 3, 50)
        self.peer = peer
        self.x = rng.standard_normal(50)
        self.gradients = scale * (1 + rng.standard_normal((100, 50)))

    def lr(self, t):
        return 1e-2 * 0.97**t

    def path(self, optimizer, **options):
        """The parameters of a torch optimizer after each step."""
        param = torch.nn.Parameter(torch.tensor(self.x))
        optimizer = optimizer([param], **options)
        path = []
        for t, g in enumerate(self.gradients):
            optimizer.param_groups[0]["lr"] = self.lr(t)
            param.grad = torch.tensor(g)
            optimizer.step()
            path.append(param.detach().numpy().copy())
        return np.array(path)

    def optax_path(self, transform):
        """The same for the gradient transformation that `transform(optax)` makes."""
        jax, optax = self.peer("jax"), self.peer("optax")
        path = []
        with jax_in_float64():
            transform = transform(optax)
            x = jax.numpy.asarray(self.x)
            state = transform.init(x)
            for g in self.gradients:
                updates, state = transform.update(jax.numpy.asarray(g), state, x)
                x = optax.apply_updates(x, updates)
                path.append(np.asarray(x))
        return np.array(path)

    def error(self, path, reference):
        """The largest difference along the path, relative to the largest magnitude of each coordinate."""
        assert path.shape == reference.shape == self.gradients.shape
        assert path.dtype == reference.dtype == np.float64
        return (abs(path - reference).max(axis=0) / abs(reference).max(axis=0)).max()


@pytest.fixture
def problem(peer):
    return Problem(peer)
