"""Our LaProp equals a chain of optax's parts, and its authors' release while the learning rate is constant."""

import numpy as np
import pytest

from mvngrad import LaProp, LaPropW

each_betas = pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.6), (0.0, 0.9)])
each_eps = pytest.mark.parametrize("eps", [1e-15, 1e-8, 1e-2])


@pytest.mark.parametrize(
    ("optimizer", "decay"), [(LaProp, 0.0), (LaProp, 0.1), (LaPropW, 0.1)], ids=["plain", "coupled", "W"]
)
@each_eps
@each_betas
def test_laprop_equals_optax_parts(problem, optimizer, decay, eps, betas):
    def transform(optax):
        rms = optax.scale_by_rms(betas[1], eps, eps_in_sqrt=False, bias_correction=True)
        laprop = optax.chain(rms, optax.ema(betas[0], debias=True))
        shrink = optax.add_decayed_weights(decay)
        order = (laprop, shrink) if optimizer.decoupled else (shrink, laprop)
        return optax.chain(*order, optax.scale_by_learning_rate(problem.lr))

    path = problem.path(optimizer, betas=betas, eps=eps, weight_decay=decay)
    assert problem.error(path, problem.optax_path(transform)) <= 1e-12


def authors_path(problem, betas, eps):
    """The authors' release: the learning rate is inside the average, corrected by an average of learning rates."""
    (beta1, beta2), x, m, v, average = betas, problem.x, 0.0, 0.0, 0.0
    path = []
    for t, g in enumerate(problem.gradients):
        lr = problem.lr(t)
        v = beta2 * v + (1 - beta2) * g**2
        m = beta1 * m + (1 - beta1) * lr * g / (np.sqrt(v / (1 - beta2 ** (t + 1))) + eps)
        average = beta1 * average + (1 - beta1) * lr
        x = x - m * lr / average
        path.append(x)
    return np.array(path)


@each_eps
@each_betas
def test_laprop_equals_the_authors_at_a_constant_learning_rate(problem, eps, betas, monkeypatch):
    monkeypatch.setattr(problem, "lr", lambda t: 1e-2)
    assert problem.error(problem.path(LaProp, betas=betas, eps=eps), authors_path(problem, betas, eps)) <= 1e-12


def test_laprop_differs_from_the_authors_under_a_schedule(problem):
    betas, eps = (0.9, 0.999), 1e-8
    assert problem.error(problem.path(LaProp, betas=betas, eps=eps), authors_path(problem, betas, eps)) > 1e-3
