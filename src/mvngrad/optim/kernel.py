"""The rule as a Triton kernel: one program a block of `BLOCK` coordinates, of whichever tensor the block belongs to.

This is a translation of `Rule.update` and the tests hold it to the original. Tensors are found through a table of
addresses; the host's side of a launch is in `mvngrad.optim.launch`.
"""

import triton
import triton.language as tl


@triton.jit
def _weight(t, log_beta):
    """1 - beta^t for any t >= 1, by Taylor's series where subtracting would lose digits."""
    y = t * log_beta
    series = 1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7 * (1 + y / 8))))))
    return tl.where(y > -0.5, -y * series, 1 - tl.exp(y))


@triton.jit
def _load(at, offsets, mask, MASKED: tl.constexpr):
    value = tl.load(at + offsets, mask=mask, other=0.0) if MASKED else tl.load(at + offsets)
    return value.to(tl.float32)


@triton.jit
def _store(at, offsets, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at + offsets, value.to(at.dtype.element_ty), mask=mask)
    else:
        tl.store(at + offsets, value.to(at.dtype.element_ty))


@triton.jit
def _address(table, column, tensors, i, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + column * tensors + i).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # lets the compiler load 16 bytes at once
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _update(
    x_at, g_at, m_at, r_at, u_at, offsets, mask, t, lr, scale,
    w_mean, beta1, w1, log1, beta2, w2, log2, eps, eps_s, decay, z_clip,
    MASKED: tl.constexpr, VARIANCE: tl.constexpr, AFTER: tl.constexpr, COUPLED: tl.constexpr,
    DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, CLIP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    x = _load(x_at, offsets, mask, MASKED)
    g = _load(g_at, offsets, mask, MASKED)
    if SCALED:
        g = g / scale
    if MAXIMIZE:
        g = -g
    if COUPLED:
        g += decay * x
    if DECOUPLED:
        x *= 1 - lr * decay

    spread = g
    if VARIANCE or not AFTER:
        m = _load(m_at, offsets, mask, MASKED)
        m += w_mean * (g - m)
        _store(m_at, offsets, m, mask, MASKED)
        if VARIANCE:
            spread = g - m
    r = beta2 * _load(r_at, offsets, mask, MASKED) + w2 * spread * spread + eps_s
    _store(r_at, offsets, r, mask, MASKED)

    c_m = _weight(t, log1)
    k = tl.sqrt(_weight(t, log2))
    if AFTER:
        root = tl.sqrt_rn(r) + eps * k
        if CLIP:
            root = tl.maximum(root, tl.abs(g) * (k / z_clip))
        u = beta1 * _load(u_at, offsets, mask, MASKED) + w1 * k * tl.div_rn(g, root)
        _store(u_at, offsets, u, mask, MASKED)
        x -= lr / c_m * u
    else:
        x -= lr / c_m * tl.div_rn(m, tl.sqrt_rn(r) / k + eps)
    _store(x_at, offsets, x, mask, MASKED)


@triton.jit
def update(
    table, sizes, owners, places, tensors, lr, lr_at, scale_at, found_at,
    w_mean, beta1, w1, log1, beta2, w2, log2, eps, eps_s, decay, z_clip,
    X: tl.constexpr, G: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, VARIANCE: tl.constexpr,
    AFTER: tl.constexpr, COUPLED: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, CLIP: tl.constexpr,
    SCALED: tl.constexpr, CHECKED: tl.constexpr, LR_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    i = tl.load(owners + block)
    start = tl.load(places + block).to(tl.int64) * BLOCK
    size = tl.load(sizes + i)
    if CHECKED:  # an overflow anywhere leaves everything as it was
        size = tl.where(tl.load(found_at) == 0, size, 0)
    if LR_ON_DEVICE:
        lr = tl.load(lr_at).to(tl.float32)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_at)
    t = tl.load(tl.load(table + i).to(tl.pointer_type(tl.float32))) + 1
    x_at = _address(table, 1, tensors, i, X, ALIGNED)
    g_at = _address(table, 2, tensors, i, G, ALIGNED)
    m_at = x_at.to(tl.pointer_type(tl.float32))
    u_at = m_at
    column = 3
    if VARIANCE or not AFTER:
        m_at = _address(table, column, tensors, i, tl.float32, ALIGNED)
        column += 1
    r_at = _address(table, column, tensors, i, tl.float32, ALIGNED)
    if AFTER:
        u_at = _address(table, column + 1, tensors, i, tl.float32, ALIGNED)

    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:  # full blocks know no mask, so their loads are 16 bytes wide
        _update(
            x_at, g_at, m_at, r_at, u_at, offsets, offsets < size, t, lr, scale,
            w_mean, beta1, w1, log1, beta2, w2, log2, eps, eps_s, decay, z_clip,
            False, VARIANCE, AFTER, COUPLED, DECOUPLED, MAXIMIZE, CLIP, SCALED,
        )  # fmt: skip
    else:
        _update(
            x_at, g_at, m_at, r_at, u_at, offsets, offsets < size, t, lr, scale,
            w_mean, beta1, w1, log1, beta2, w2, log2, eps, eps_s, decay, z_clip,
            True, VARIANCE, AFTER, COUPLED, DECOUPLED, MAXIMIZE, CLIP, SCALED,
        )  # fmt: skip
