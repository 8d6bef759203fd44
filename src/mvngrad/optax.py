"""The optimizers as optax gradient transformations, made from the same `Rule.update` as the torch classes.

`scale_by_mvn_grad` and `scale_by_laprop` rescale gradients; `mvn_grad` and `laprop` add decoupled weight decay and the
learning rate, as `optax.adamw` does. optax has Adam and AdaBelief itself; `scale_by_rule` makes any cell.

>>> import jax.numpy as jnp, optax
>>> optimizer = mvn_grad(learning_rate=0.1)
>>> params = jnp.array([3.0, -2.0])
>>> state = optimizer.init(params)
>>> updates, state = optimizer.update(params, state, params)
>>> [round(float(x), 3) for x in optax.apply_updates(params, updates)]  # the first step is lr/b1 in each coordinate
[2.889, -1.889]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
except ModuleNotFoundError as error:
    if error.name not in ("jax", "numpy", "optax"):  # the package is installed, and its message says what is missing
        raise
    raise ImportError(f"mvngrad.optax needs {error.name}: pip install 'mvngrad[jax]'") from error

from mvngrad.rule import LAPROP, LEAN, MVNGRAD, Arithmetic, Hyper, Rule, may_be_nonzero

Number = Any
"""A float, or a 0-d array: under `optax.inject_hyperparams` hyper-parameters are traced."""
Mask = Any | Callable[[optax.Params], Any] | None


class ScaleByRuleState(NamedTuple):
    """The step count, and the averages that the cell keeps: trees like the parameters, or None."""

    count: jax.Array  # type: ignore[assignment]  # tuple has a method of this name, which optax's states hide too
    m: optax.Updates | None = None
    v: optax.Updates | None = None
    s: optax.Updates | None = None
    u: optax.Updates | None = None


class JaxArithmetic(Arithmetic):
    """Plain operators on JAX arrays, with bias corrections that stay accurate in float32."""

    def correction(self, beta: Number, t: Number) -> Any:
        """1 - beta^t. In float32 the plain formula is off by 1e-5 for beta = 0.999."""
        return _get_correction(jnp.asarray(beta, t.dtype), jnp.asarray(beta - 1, t.dtype), t)


@jax.jit  # traced once, not for every array
def _get_correction(beta: jax.Array, beta_minus_1: jax.Array, t: jax.Array) -> jax.Array:
    """1 - beta^t, by the plain formula below 0.5: it avoids log(0), whose derivative is infinite.

    The unused branch gets a harmless value: its derivative is multiplied by 0, and 0 times infinity is NaN.
    """
    is_small = beta < 0.5
    power = jnp.where(is_small & (t > 0), beta, 1) ** t  # the derivative of 0^0 is NaN
    plain = jnp.where(t > 0, 1 - power, 0)  # not 1 - 1: XLA would add TINY of the rule to the first 1, and lose it
    log_beta = jnp.log1p(jnp.where(is_small, 0, beta_minus_1))
    return jnp.where(is_small, plain, -jnp.expm1(t * log_beta))


def _sqrt(x: jax.Array) -> jax.Array:
    """The root, with a derivative of 0 at 0, where s and v start: that of jnp.sqrt is infinite, and 0 times it NaN."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


JAX = JaxArithmetic(_sqrt, jnp.maximum)

HYPER_NAMES = {"betas[0]": "beta1", "betas[1]": "beta2"}
OPTAX_NAMES = {"betas[0]": "b1", "betas[1]": "b2", "eps_s": "eps_root", "beta_mean": "b_mean"}
"""For messages: the names in a `Hyper`, and in optax, of hyper-parameters that `Rule.check` calls as torch does."""


def scale_by_rule(rule: Rule, hyper: Hyper, mu_dtype: Any = None) -> optax.GradientTransformation:
    """Rescale updates by any of the four optimizers, for example `mvngrad.rule.ADABELIEF`.

    The learning rate of `hyper` is not used: chain `optax.scale_by_learning_rate`, and `optax.add_decayed_weights` for
    weight decay. The averages have the dtype of the parameters, but float32 for 16-bit ones. The arithmetic is in the
    widest dtype of gradients and averages, and at least float32. The updates have the dtype of the gradients, or that
    of the parameters, if these are given and wider.

    Args:
        rule: `ADAM`, `ADABELIEF`, `LAPROP`, `MVNGRAD` or `LEAN` of `mvngrad.rule`.
        hyper: its hyper-parameters. Its eps_s is 0 by default, where `scale_by_mvn_grad` has 1e-16.
        mu_dtype: dtype in which m and u are stored; None is that of the other averages. They are rounded to the
            nearest, so that in bfloat16 they freeze at decays above 0.99.
    """
    _check_supported(rule, hyper)
    hyper = hyper._replace(lr=-1.0)  # a step from 0 at rate -1 is the direction
    mu_dtype = None if mu_dtype is None else _parse_mu_dtype(mu_dtype)

    def init(params: optax.Params) -> ScaleByRuleState:
        def zeros(name: str) -> optax.Updates:
            dtype = mu_dtype if name in "mu" else None
            return jax.tree.map(lambda x: jnp.zeros_like(x, dtype=dtype or _arithmetic_dtype(x)), params)

        return ScaleByRuleState(jnp.zeros([], jnp.int32), **{name: zeros(name) for name in rule.state_names})

    def update(
        updates: optax.Updates, state: ScaleByRuleState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByRuleState]:
        gradients, structure = jax.tree.flatten(updates)
        averages = {name: getattr(state, name, None) for name in rule.state_names}
        _check_trees(rule, structure, averages)
        count = optax.safe_increment(state.count)
        dtypes = [jnp.result_type(gradient) for gradient in gradients]
        if params is not None:  # which may have more than the updates, such as the functions of an Equinox module
            dtypes = jax.tree.leaves(jax.tree.map(_promote, updates, params, is_leaf=lambda x: x is None))
        leaves = {name: list(map(jnp.asarray, jax.tree.leaves(tree))) for name, tree in averages.items()}
        directions: list[jax.Array] = []
        for i, gradient in enumerate(map(jnp.asarray, gradients)):
            dtype = _arithmetic_dtype(gradient)
            for name, values in leaves.items():  # the state of float64 parameters is float64, even if gradients are not
                _check_average(rule, name, values[i], gradient)
                dtype = _get_wider(dtype, values[i].dtype)
            old = {name: values[i].astype(dtype) for name, values in leaves.items()}
            g, t = gradient.astype(dtype), count.astype(dtype)
            direction, new = rule.update(jnp.zeros_like(g), g, old, t, hyper, JAX)
            directions.append(direction.astype(dtypes[i]))
            for name, values in leaves.items():
                values[i] = new[name].astype(values[i].dtype)
        trees = {name: jax.tree.unflatten(structure, values) for name, values in leaves.items()}
        return jax.tree.unflatten(structure, directions), ScaleByRuleState(count, **trees)

    return optax.GradientTransformation(init, update)


def _check_supported(rule: Rule, hyper: Hyper) -> None:
    """Raise a ValueError for a hyper-parameter that is out of range, or that `scale_by_rule` cannot obey."""
    decays = isinstance(hyper.weight_decay, jax.core.Tracer) or float(hyper.weight_decay) != 0
    if hyper.maximize or hyper.decoupled or decays:
        raise ValueError(
            "scale_by_rule: hyper has maximize, decoupled or weight_decay, which an update without parameters cannot "
            "obey; chain optax.add_decayed_weights for decay, and optax.scale(-1) before to maximize"
        )
    for name in ("eps_s", "beta_mean", "z_clip"):
        value, default = getattr(hyper, name), getattr(Hyper(), name)
        if name not in rule.options and (isinstance(value, jax.core.Tracer) or value != default):
            raise ValueError(f"scale_by_rule: {rule.name} has no {name}; leave it out")
    _check_hyper(rule, hyper._replace(lr=0.0), HYPER_NAMES)  # lr is not used


def _parse_mu_dtype(mu_dtype: Any) -> Any:
    """The dtype that `mu_dtype` names; a TypeError if it names no dtype, a ValueError if not one of real floats."""
    try:
        dtype = jax.dtypes.canonicalize_dtype(mu_dtype)
    except TypeError as error:
        raise TypeError(
            f"mu_dtype={mu_dtype!r} is no dtype of JAX; pass jnp.bfloat16, 'bfloat16' or None, and to "
            "optax.inject_hyperparams static_args=('mask', 'mu_dtype')"
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"mu_dtype={dtype} is invalid; it must be a real floating-point dtype, or None")
    return dtype


def _check_hyper(rule: Rule, hyper: Hyper, names: Mapping[str, str]) -> None:
    """Raise a ValueError for a value out of range; values that are traced cannot be checked."""
    for dtype in (value.dtype for value in hyper if isinstance(value, (jax.Array, np.ndarray, np.generic))):
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
            raise ValueError(
                f"{rule.name}: hyper-parameters are in {dtype}, where 0.999 may be 1; make them float32. "
                "optax.inject_hyperparams casts them to the dtype of the parameters; pass hyperparam_dtype=jnp.float32"
            )
    valid = Hyper(beta_mean=0.9)
    known = (other if isinstance(value, jax.core.Tracer) else value for value, other in zip(hyper, valid, strict=True))
    rule.check(Hyper(*known), names=names)


def _check_trees(rule: Rule, structure: Any, averages: Mapping[str, optax.Updates]) -> None:
    """Raise a ValueError if an average is missing in the state, or is not a tree like the updates."""
    missing = [name for name, tree in averages.items() if tree is None]
    if missing and structure.num_leaves > 0:
        raise ValueError(
            f"{rule.name}: the state has no {', '.join(missing)}: it is of another optimizer, of a whole chain, or of "
            "another `lean`; pass the state that init of this transformation makes"
        )
    for name, tree in averages.items():
        if (found := jax.tree.structure(tree)) != structure:
            raise ValueError(
                f"{rule.name}: updates and {name} of the state are different trees, {structure} and {found}; call init "
                "with parameters in the tree of the updates"
            )


def _check_average(rule: Rule, name: str, average: jax.Array, gradient: jax.Array) -> None:
    """Raise a ValueError if an array of the state does not fit its update: it would be broadcast or used as codes."""
    if average.shape != gradient.shape or not jnp.issubdtype(average.dtype, jnp.floating):
        raise ValueError(
            f"{rule.name}: {name} of the state is {average.dtype} of {average.shape} for an update that is "
            f"{gradient.dtype} of {gradient.shape}; is it the state of other parameters? 8-bit state of torch must be "
            "converted: mvngrad.convert_state_dict(state_dict, None)"
        )


def scale_by_mvn_grad(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 1e-16,
    *,
    b_mean: Number | None = None,
    z_clip: Number | None = None,
    lean: bool = False,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Rescale updates by MVN-Grad: divide by the standard deviation, then apply momentum.

    Args:
        b1: decay of the momentum u, and of the mean m.
        b2: decay of the variance s.
        eps: added to the root of s.
        eps_root: added to s at every step, so that its root stays above sqrt(eps_root / (1 - b2)).
        b_mean: decay of m alone; None is b1.
        z_clip: largest magnitude of a normalized gradient; None is no bound.
        lean: rebuild m from u and s instead of storing it: two averages instead of three.
        mu_dtype: dtype in which m and u are stored, as in `scale_by_rule`.
    """
    hyper = Hyper(beta1=b1, beta2=b2, eps=eps, eps_s=eps_root, beta_mean=b_mean, z_clip=z_clip)
    if lean and b_mean is not None:
        raise ValueError(f"b_mean={b_mean!r} has no use with lean=True, which stores no mean; leave b_mean=None")
    rule = LEAN if lean else MVNGRAD
    _check_hyper(rule, hyper, OPTAX_NAMES)
    return scale_by_rule(rule, hyper, mu_dtype)


def scale_by_laprop(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, *, z_clip: Number | None = None, mu_dtype: Any = None
) -> optax.GradientTransformation:
    """Rescale updates by LaProp: divide by the root mean square, then apply momentum.

    Arguments as in `scale_by_mvn_grad`.
    """
    hyper = Hyper(beta1=b1, beta2=b2, eps=eps, z_clip=z_clip)
    _check_hyper(LAPROP, hyper, OPTAX_NAMES)
    return scale_by_rule(LAPROP, hyper, mu_dtype)


def mvn_grad(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 1e-16,
    *,
    b_mean: Number | None = None,
    z_clip: Number | None = None,
    lean: bool = False,
    mu_dtype: Any = None,
    weight_decay: Number = 0.0,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """MVN-Grad with decoupled weight decay, `mvngrad.MVNGradW` for JAX.

    `weight_decay` is multiplied by the learning rate, as in `optax.adamw`, and 0 by default (`MVNGradW` has 0.01, adamw
    1e-4); `mask` selects the parameters it applies to. Other arguments as in `scale_by_mvn_grad`.
    """
    scale = scale_by_mvn_grad(b1, b2, eps, eps_root, b_mean=b_mean, z_clip=z_clip, lean=lean, mu_dtype=mu_dtype)
    return _chain_decay_and_rate(scale, learning_rate, weight_decay, mask)


def laprop(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    z_clip: Number | None = None,
    mu_dtype: Any = None,
    weight_decay: Number = 0.0,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """LaProp with decoupled weight decay, `mvngrad.LaPropW` for JAX. Arguments as in `mvn_grad`."""
    scale = scale_by_laprop(b1, b2, eps, z_clip=z_clip, mu_dtype=mu_dtype)
    return _chain_decay_and_rate(scale, learning_rate, weight_decay, mask)


def _chain_decay_and_rate(
    scale: optax.GradientTransformation, learning_rate: optax.ScalarOrSchedule, weight_decay: Number, mask: Mask
) -> optax.GradientTransformationExtraArgs:
    if may_be_nonzero(weight_decay):
        decay = optax.add_decayed_weights(weight_decay, mask)
    else:  # params are not needed, and the state is a tree as with decay, so that a run can resume with or without it
        decay = optax.identity() if mask is None else optax.masked(optax.identity(), mask)
    return optax.chain(scale, decay, optax.scale_by_learning_rate(learning_rate))


def _promote(gradient: Any, param: Any) -> Any:
    return None if gradient is None else _get_wider(jnp.result_type(gradient), jnp.result_type(param))


def _get_wider(a: Any, b: Any) -> Any:
    """The wider of two floating-point dtypes, or float32 for two of one width.

    Unlike `jnp.promote_types`, also for 8-bit floats and with `jax.numpy_dtype_promotion("strict")`.
    """
    if a == b:
        return a
    if a.itemsize == b.itemsize:
        return jnp.dtype(jnp.float32)
    return max(a, b, key=lambda dtype: dtype.itemsize)


def _arithmetic_dtype(x: Any) -> Any:
    """The dtype to compute in: that of `x`, but float32 for narrower floats. Raises a TypeError for other dtypes."""
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"mvngrad.optax takes real arrays, not {dtype}; wrap it: optax.contrib.split_real_and_imaginary(...)"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"mvngrad.optax takes floating-point arrays, not {dtype}; leave it out of the tree, or give it "
            "optax.set_to_zero() by optax.partition"
        )
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype
