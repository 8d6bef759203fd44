"""The rule as a Triton kernel: one program a block of `BLOCK` coordinates, of whichever tensor the block belongs to.

`advance` counts the step and leaves, for each tensor, the numbers that its blocks share; `update` takes it.
This is a translation of `Rule.update`, and of how `rounding` and `blocks` keep state in fewer bits; the tests hold it
to the originals. Tensors are found through a table of addresses; the host's side is in `mvngrad.optim.launch`.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(128)


@triton.jit
def _weight(t, log_beta):
    """1 - beta^t for any t >= 0, by Taylor's series where subtracting would lose digits."""
    y = t * log_beta
    series = 1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7 * (1 + y / 8))))))
    return tl.where(y > -0.5, -y * series, 1 - tl.exp(y))


@triton.jit(do_not_specialize=["seed"])
def advance(table, shared, tensors, found_at, seed, log1, log2, CHECKED: tl.constexpr):
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = i < tensors
    # A tensor's address where there is none would do, but a load that nobody makes must not have one either.
    at = tl.load(table + tl.where(mask, i, 0)).to(tl.pointer_type(tl.float32))
    t = tl.load(at)
    if CHECKED:  # an overflow is no step
        t += tl.where(tl.load(found_at) == 0, 1.0, 0.0)
    else:
        t += 1
    tl.store(at, t, mask=mask)
    tl.store(shared + i, 1 / _weight(t, log1), mask=mask)
    tl.store(shared + tensors + i, tl.sqrt(_weight(t, log2)), mask=mask)
    tl.store(shared + 2 * tensors + i, 1 / tl.sqrt(_weight(t - 1, log2) + 1e-30), mask=mask)
    place = tl.load(table + 3 * tensors + i, mask=mask, other=0).to(tl.uint32)
    key = _mixed(_mixed(place * 0x9E3779B9 + seed.to(tl.uint32)) + t.to(tl.uint32))
    tl.store(shared + 3 * tensors + i, key.to(tl.float32, bitcast=True), mask=mask)


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


# Rounding at random: mvngrad.optim.rounding


@triton.jit
def _mixed(word):
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _to_bfloat16(value, noise):
    bits = (value.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)


# State in 8 bits: mvngrad.optim.blocks. A program has one block, so its scales are numbers.


@triton.jit
def _signed(codes, scale):
    size = (((codes & 127) << 20) + 0x37800000).to(tl.float32, bitcast=True) - 1.52587890625e-05
    value = size * 1.0666840280603525 * scale  # 1 / TOP
    return (value.to(tl.int32, bitcast=True) | ((codes & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _to_signed(value, noise):
    size = tl.abs(value)
    scale = tl.maximum(tl.max(size.to(tl.int32, bitcast=True), axis=0), 0x800000).to(tl.float32, bitcast=True)
    part = size * (0.9374849647247174 / scale) + 1.52587890625e-05  # UP * TOP
    codes = tl.minimum(((part.to(tl.int32, bitcast=True) + (noise << 4)) >> 20) - 0x378, 127)
    return codes | ((value.to(tl.int32, bitcast=True) >> 24) & 128), scale


@triton.jit
def _squares(codes, first, cut):
    return tl.where(codes > 0, ((codes + (first - 1)) << cut).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def _to_squares(value, noise):
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    high = tl.max(bits, axis=0)
    low = tl.min(tl.where(bits > 0, bits, 0x7FFFFFFF), axis=0)
    cut = 16
    for k in tl.static_range(16, 21):
        cut += tl.where(-((-high) >> k) - (low >> k) > 254, 1, 0)
    first = tl.maximum(-((-high) >> cut) - 254, 1)
    codes = ((bits + (noise << (cut - 16))) >> cut) - (first - 1)
    return tl.where(bits > 0, tl.maximum(codes, 1), 0), first, cut


# A slot of state, as float32


@triton.jit
def _open(at, scales, place, count, offsets, mask, MASKED: tl.constexpr, S: tl.constexpr, SQUARES: tl.constexpr):
    if S == tl.uint8:
        codes = tl.load(at + offsets, mask=mask, other=0) if MASKED else tl.load(at + offsets)
        scale = tl.load(scales + place)
        if SQUARES:
            value = _squares(codes.to(tl.int32), scale, tl.load(scales + count + place))
        else:
            value = _signed(codes.to(tl.int32), scale)
    else:
        value = _load(at, offsets, mask, MASKED)
    return value


@triton.jit
def _close(
    at, scales, place, count, value, offsets, mask, noise, MASKED: tl.constexpr, S: tl.constexpr, SQUARES: tl.constexpr
):
    if S == tl.uint8:
        if MASKED:  # what lies beyond the tensor has no part in the block's scale
            value = tl.where(mask, value, 0.0)
        if SQUARES:
            value, scale, cut = _to_squares(value, noise.to(tl.int32))
            tl.store(scales + count + place, cut)
        else:
            value, scale = _to_signed(value, noise.to(tl.int32))
        tl.store(scales + place, scale)
    elif S == tl.bfloat16:
        value = _to_bfloat16(value, noise)
    _store(at, offsets, value, mask, MASKED)


# Where state is rounded, the last place of a root or quotient is not worth its time.


@triton.jit
def _root(a, EXACT: tl.constexpr, FAST: tl.constexpr):
    if EXACT:
        root = tl.sqrt_rn(a)
    elif FAST:
        root = tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)
    else:
        root = tl.sqrt(a)
    return root


@triton.jit
def _divided(a, b, EXACT: tl.constexpr, FAST: tl.constexpr):
    if EXACT:
        quotient = tl.div_rn(a, b)
    elif FAST:
        quotient = a * tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], tl.float32, True, 1)
    else:
        quotient = a / b
    return quotient


@triton.jit
def _update(
    x_at, g_at, m_at, r_at, u_at, m_scales, r_scales, u_scales, offsets, place, size, key, inverse, k, inverse_k_before,
    lr, scale, near, beta1, w1, beta2, w2, eps, eps_s, decay, z_clip,
    MASKED: tl.constexpr, S: tl.constexpr, VARIANCE: tl.constexpr, AFTER: tl.constexpr, LEAN: tl.constexpr,
    COUPLED: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, CLIP: tl.constexpr, SCALED: tl.constexpr,
    ROUND_X: tl.constexpr, FAST: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    mask = offsets < size
    count = (size + 255) // 256
    EXACT: tl.constexpr = S == tl.float32
    word = key
    if S != tl.float32 or ROUND_X:
        word = _mixed(offsets.to(tl.uint32) ^ key)

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

    r = _open(r_at, r_scales, place, count, offsets, mask, MASKED, S, True)
    if AFTER:
        u = _open(u_at, u_scales, place, count, offsets, mask, MASKED, S, False)
    spread = g
    if VARIANCE or not AFTER:
        if LEAN:
            m = u * (_root(r, EXACT, FAST) * inverse_k_before + eps)
        else:
            m = _open(m_at, m_scales, place, count, offsets, mask, MASKED, S, False)
        if SHORT:  # from the nearer end, as torch's lerp: from the other, rounding would lose g beside a large m
            m = g - near * (g - m)
        else:
            m += near * (g - m)
        if not LEAN:
            _close(m_at, m_scales, place, count, m, offsets, mask, word & 0xFFFF, MASKED, S, False)
        if VARIANCE:
            spread = g - m
    r = beta2 * r + w2 * spread * spread + eps_s
    _close(r_at, r_scales, place, count, r, offsets, mask, word >> 16, MASKED, S, True)

    if AFTER:
        root = _root(r, EXACT, FAST) + eps * k
        if CLIP:
            root = tl.maximum(root, tl.abs(g) * (k / z_clip), propagate_nan=tl.PropagateNan.ALL)
        u = beta1 * u + w1 * k * _divided(g, root, EXACT, FAST)
        _close(u_at, u_scales, place, count, u, offsets, mask, (word >> 8) & 0xFFFF, MASKED, S, False)
        x -= lr * inverse * u
    else:
        x -= lr * inverse * _divided(m, _root(r, EXACT, FAST) / k + eps, EXACT, FAST)
    if ROUND_X:
        x = _to_bfloat16(x, (word * 0x9E3779B9) >> 16)
    _store(x_at, offsets, x, mask, MASKED)


@triton.jit
def _address(table, column, tensors, i, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + column * tensors + i).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # lets the compiler load 16 bytes at once
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def update(
    table, shared, sizes, owners, places, tensors, lr, lr_at, scale_at, found_at,
    near, beta1, w1, beta2, w2, eps, eps_s, decay, z_clip,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
    VARIANCE: tl.constexpr, AFTER: tl.constexpr, LEAN: tl.constexpr, COUPLED: tl.constexpr, DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr, CLIP: tl.constexpr, SCALED: tl.constexpr, CHECKED: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr, ROUND_X: tl.constexpr, FAST: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    if CHECKED:  # an overflow anywhere leaves everything as it was
        if tl.load(found_at) != 0:
            return
    block = tl.program_id(0)
    i = tl.load(owners + block)
    first = tl.load(places + block).to(tl.int64) * LOOPS
    size = tl.load(sizes + i)
    if LR_ON_DEVICE:
        lr = tl.load(lr_at).to(tl.float32)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_at)
    inverse = tl.load(shared + i)
    k = tl.load(shared + tensors + i)
    inverse_k_before = k
    if LEAN:
        inverse_k_before = tl.load(shared + 2 * tensors + i)
    key = i.to(tl.uint32)
    if S != tl.float32 or ROUND_X:
        key = tl.load(shared + 3 * tensors + i).to(tl.uint32, bitcast=True)

    x_at = _address(table, 1, tensors, i, X, ALIGNED)
    g_at = _address(table, 2, tensors, i, G, ALIGNED)
    m_at = x_at.to(tl.pointer_type(S))
    u_at = m_at
    column = 4
    MEAN: tl.constexpr = (VARIANCE or not AFTER) and not LEAN
    if MEAN:
        m_at = _address(table, column, tensors, i, S, ALIGNED)
        column += 1
    r_at = _address(table, column, tensors, i, S, ALIGNED)
    column += 1
    if AFTER:
        u_at = _address(table, column, tensors, i, S, ALIGNED)
        column += 1
    m_scales = x_at.to(tl.pointer_type(tl.float32))
    r_scales = x_at.to(tl.pointer_type(tl.int32))
    u_scales = m_scales
    if S == tl.uint8:
        if MEAN:
            m_scales = _address(table, column, tensors, i, tl.float32, False)
            column += 1
        r_scales = _address(table, column, tensors, i, tl.int32, False)
        if AFTER:
            u_scales = _address(table, column + 1, tensors, i, tl.float32, False)

    for place in tl.range(first, first + LOOPS, num_stages=1):
        start = place * BLOCK
        offsets = start + tl.arange(0, BLOCK)
        if S != tl.float32:  # 4 at once, as many as of float32: then no value must pass from thread to thread
            offsets = tl.max_contiguous(offsets, 4)
        if start + BLOCK <= size:  # full blocks know no mask, so their loads are 16 bytes wide
            _update(
                x_at, g_at, m_at, r_at, u_at, m_scales, r_scales, u_scales, offsets, place, size, key, inverse, k,
                inverse_k_before, lr, scale, near, beta1, w1, beta2, w2, eps, eps_s, decay, z_clip,
                False, S, VARIANCE, AFTER, LEAN, COUPLED, DECOUPLED, MAXIMIZE, CLIP, SCALED, ROUND_X, FAST, SHORT,
            )  # fmt: skip
        elif start < size:
            _update(
                x_at, g_at, m_at, r_at, u_at, m_scales, r_scales, u_scales, offsets, place, size, key, inverse, k,
                inverse_k_before, lr, scale, near, beta1, w1, beta2, w2, eps, eps_s, decay, z_clip,
                True, S, VARIANCE, AFTER, LEAN, COUPLED, DECOUPLED, MAXIMIZE, CLIP, SCALED, ROUND_X, FAST, SHORT,
            )  # fmt: skip
