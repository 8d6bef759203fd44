"""Our AdaBelief equals its authors' without rectification, and optax's."""

import pytest

from mvngrad import AdaBelief, AdaBeliefW

pytestmark = pytest.mark.filterwarnings("ignore:.*gradients are barely normalized")  # at eps_s=1e-2, intended
each_betas = pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.6)])
each_eps = pytest.mark.parametrize("eps", [1e-16, 1e-8, 1e-2])  # both peers use one value for eps and eps_s
each_decay = pytest.mark.parametrize(
    ("optimizer", "decay"), [(AdaBelief, 0.0), (AdaBelief, 0.1), (AdaBeliefW, 0.1)], ids=["plain", "coupled", "W"]
)


@each_decay
@each_eps
@each_betas
def test_adabelief_equals_the_authors_release(problem, peer, optimizer, decay, eps, betas):
    options = {"betas": betas, "eps": eps, "weight_decay": decay}
    reference = problem.path(
        peer("adabelief_pytorch").AdaBelief,
        weight_decouple=optimizer.decoupled,
        fixed_decay=False,
        rectify=False,
        degenerated_to_sgd=False,
        print_change_log=False,
        **options,
    )
    assert problem.error(problem.path(optimizer, eps_s=eps, **options), reference) <= 1e-12


@each_eps
@each_betas
def test_adabelief_equals_optax(problem, eps, betas):
    reference = problem.optax_path(lambda optax: optax.adabelief(problem.lr, *betas, eps=eps, eps_root=eps))
    assert problem.error(problem.path(AdaBelief, betas=betas, eps=eps, eps_s=eps), reference) <= 1e-12


def test_adabeliefw_equals_optax_with_decoupled_decay(problem):
    reference = problem.optax_path(
        lambda optax: optax.chain(
            optax.scale_by_belief(0.9, 0.99, eps=1e-8, eps_root=1e-8),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(problem.lr),
        )
    )
    path = problem.path(AdaBeliefW, betas=(0.9, 0.99), eps=1e-8, eps_s=1e-8, weight_decay=0.1)
    assert problem.error(path, reference) <= 1e-12
