"""The rule as a Triton kernel: each program steps `LOOPS` blocks of `BLOCK` coordinates of one tensor.

`advance` counts the step and computes, for each tensor, the numbers that its blocks share; `update` takes the step.
This is a translation of `Rule.update` and of the arithmetic of `formats.py`, and is tested against both. Tensors are
found through the table of `backends/table.py`.

float64 parameters are stepped in float64, by `wide_advance` and `wide_update`, all others in float32.
"""

import inspect
from collections import namedtuple
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from mvngrad.optim import formats
from mvngrad.optim.backends.table import Row
from mvngrad.rule import TINY as RULE_TINY

LANES = tl.constexpr(128)
TINY = tl.constexpr(RULE_TINY)
GOLDEN = tl.constexpr(formats.GOLDEN % 2**32)
SCALE_BLOCK, CUT, FINE, COARSE, LEAST, OFFSET, OFFSET_BITS, INVERSE_TOP, TOP_FACTOR = (
    tl.constexpr(value)
    for value in (
        formats.BLOCK, formats.CUT, formats.FINE, formats.COARSE, formats.LEAST, formats.OFFSET, formats.OFFSET_BITS,
        1 / formats.TOP, formats.UP * formats.TOP,
    )
)  # fmt: skip
STEP, PARAM, GRAD, INDEX = (tl.constexpr(row.value) for row in list(Row)[:4])
M, R, U, M_SCALE, R_SCALE, U_SCALE, LOW = (tl.constexpr(row.value) for row in list(Row)[4:])


@triton.jit
def _correction(t, log_beta):
    """1 - beta^t for any t >= 0, by Taylor's series where subtracting would lose digits."""
    y = t * log_beta
    TERMS: tl.constexpr = 16 if y.dtype == tl.float64 else 8
    series = 1 + y / TERMS
    for n in tl.static_range(1, TERMS - 1):
        series = 1 + y / (TERMS - n) * series
    return tl.where(y > -0.5, -y * series, 1 - tl.exp(y))


@triton.jit(do_not_specialize=["seed"])
def advance(
    table, per_tensor, tensors, found_inf_at, seed, log1, log2,
    T: tl.constexpr, C: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
):  # fmt: skip
    """Count the step, and write the four rows of `per_tensor`, with c_m and k as in the rule: 1 / c_m, k, 1 / k at the
    step before, and the seed of the tensor's random bits. T is the dtype of step counts, C that of the arithmetic."""
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = i < tensors
    # Masked lanes still need a valid pointer, so they read entry 0.
    at = tl.load(table + tensors * STEP + tl.where(mask, i, 0)).to(tl.pointer_type(T))
    t = tl.load(at)
    if HAS_FOUND_INF:  # an overflow does not count as a step
        t += tl.where(tl.load(found_inf_at) == 0, 1.0, 0.0)
    else:
        t += 1
    tl.store(at, t, mask=mask)
    t = t.to(C)
    tl.store(per_tensor + i, 1 / _correction(t, log1), mask=mask)
    tl.store(per_tensor + tensors + i, tl.sqrt(_correction(t, log2)), mask=mask)
    tl.store(per_tensor + 2 * tensors + i, 1 / tl.sqrt(_correction(t - 1, log2) + TINY), mask=mask)
    index = tl.load(table + tensors * INDEX + i, mask=mask, other=0).to(tl.uint32)
    key = _hash32(_hash32(index * GOLDEN + seed.to(tl.uint32)) + t.to(tl.uint32))
    tl.store(_get_keys(per_tensor, tensors) + i, key, mask=mask)


@triton.jit
def _get_keys(per_tensor, tensors):
    return (per_tensor + 3 * tensors).to(tl.pointer_type(tl.uint32))


@triton.jit
def _load(at, offsets, mask, MASKED: tl.constexpr, C: tl.constexpr):
    value = tl.load(at + offsets, mask=mask, other=0.0) if MASKED else tl.load(at + offsets)
    return value.to(C)


@triton.jit
def _store(at, offsets, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at + offsets, value.to(at.dtype.element_ty), mask=mask)
    else:
        tl.store(at + offsets, value.to(at.dtype.element_ty))


# Rounding at random, as in formats.py


@triton.jit
def _hash32(word):
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _round_to_bfloat16(value, noise):
    bits = (value.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)


# Split master weights, as in formats.py


@triton.jit
def _load_master(x_at, low_at, offsets, mask, MASKED: tl.constexpr):
    high = tl.load(x_at + offsets, mask=mask, other=0.0) if MASKED else tl.load(x_at + offsets)
    low = tl.load(low_at + offsets, mask=mask, other=0) if MASKED else tl.load(low_at + offsets)
    SHIFT: tl.constexpr = 16 - low_at.dtype.element_ty.primitive_bitwidth
    high = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    low = low.to(tl.int32) << SHIFT
    low = tl.where((high & 0x7FFFFFFF) == 0, tl.maximum(low, 0), low)  # a weight set to 0 by hand
    return (high + low).to(tl.float32, bitcast=True)


@triton.jit
def _store_master(x_at, low_at, offsets, value, noise, mask, MASKED: tl.constexpr):
    SHIFT: tl.constexpr = 16 - low_at.dtype.element_ty.primitive_bitwidth
    bits = value.to(tl.int32, bitcast=True)
    if SHIFT:  # rounded at random
        bits += (noise >> 8).to(tl.int32)
    high = (bits + 0x8000) >> 16
    low = tl.where(value == value, (bits - (high << 16)) >> SHIFT, 0)
    high = tl.where(value == value, high, 0x7FC0)
    _store(x_at, offsets, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask, MASKED)
    _store(low_at, offsets, low, mask, MASKED)


# State in 8 bits, as in formats.py. Each call works on one block, so its scales are numbers.


@triton.jit
def _decode_signed(codes, scale):
    size = (((codes & 127) << CUT) + OFFSET_BITS).to(tl.float32, bitcast=True) - OFFSET
    value = size * INVERSE_TOP * scale
    return (value.to(tl.int32, bitcast=True) | ((codes & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _encode_signed(value, noise):
    size = tl.abs(value)
    scale = tl.maximum(tl.max(size.to(tl.int32, bitcast=True), axis=0), LEAST).to(tl.float32, bitcast=True)
    part = size * (TOP_FACTOR / scale) + OFFSET
    codes = ((part.to(tl.int32, bitcast=True) + (noise << (CUT - 16))) >> CUT) - (OFFSET_BITS >> CUT)
    codes = tl.minimum(codes, 127)
    return codes | ((value.to(tl.int32, bitcast=True) >> 24) & 128), scale


@triton.jit
def _decode_squares(codes, first, cut):
    return tl.where(codes > 0, ((codes + (first - 1)) << cut).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def _encode_squares(value, noise):
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    high = tl.max(bits, axis=0)
    low = tl.min(tl.where(bits > 0, bits, 0x7FFFFFFF), axis=0)
    cut = FINE
    for k in tl.static_range(FINE, COARSE):
        cut += tl.where(-((-high) >> k) - (low >> k) > 254, 1, 0)
    first = tl.maximum(-((-high) >> cut) - 254, 1)
    codes = ((bits + (noise << (cut - 16))) >> cut) - (first - 1)
    return tl.where(bits > 0, tl.maximum(codes, 1), 0), first, cut


# State as the floats that the step computes with


@triton.jit
def _load_state(
    at, scales, block, count, offsets, mask,
    MASKED: tl.constexpr, S: tl.constexpr, C: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    if S == tl.uint8:
        codes = tl.load(at + offsets, mask=mask, other=0) if MASKED else tl.load(at + offsets)
        scale = tl.load(scales + block)
        if SQUARES:
            value = _decode_squares(codes.to(tl.int32), scale, tl.load(scales + count + block))
        else:
            value = _decode_signed(codes.to(tl.int32), scale)
    else:
        value = _load(at, offsets, mask, MASKED, C)
    return value.to(C)


@triton.jit
def _store_state(
    at, scales, block, count, value, offsets, mask, noise, MASKED: tl.constexpr, S: tl.constexpr, SQUARES: tl.constexpr
):
    if S == tl.uint8:
        value = value.to(tl.float32)
        if MASKED:  # coordinates beyond the tensor must not affect the block's scale
            value = tl.where(mask, value, 0.0)
        if SQUARES:
            value, scale, cut = _encode_squares(value, noise.to(tl.int32))
            tl.store(scales + count + block, cut)
        else:
            value, scale = _encode_signed(value, noise.to(tl.int32))
        tl.store(scales + block, scale)
    elif S == tl.bfloat16:
        value = _round_to_bfloat16(value.to(tl.float32), noise)
    _store(at, offsets, value, mask, MASKED)


# If state is rounded, the last bit of a root or quotient is not worth its time.


@triton.jit
def _root(a, EXACT: tl.constexpr, FAST: tl.constexpr):
    """sqrt(a): rounded correctly if EXACT, by an approximate instruction of NVIDIA's if FAST, else as Triton does."""
    if a.dtype == tl.float64:  # exact as it is
        root = tl.sqrt(a)
    elif EXACT:
        root = tl.sqrt_rn(a)
    elif FAST:
        root = tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)
    else:
        root = tl.sqrt(a)
    return root


@triton.jit
def _divide(a, b, EXACT: tl.constexpr, FAST: tl.constexpr):
    """a / b, as `_root`."""
    if a.dtype == tl.float64:
        quotient = a / b
    elif EXACT:
        quotient = tl.div_rn(a, b)
    elif FAST:
        quotient = a * tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], tl.float32, True, 1)
    else:
        quotient = a / b
    return quotient


@triton.jit
def _update(
    x_at, low_at, g_at, m_at, r_at, u_at, m_scales, r_scales, u_scales, offsets, block, size, key, inverse_c_m, k,
    inverse_k_before, lr, grad_scale, mean_weight, beta1, weight1, beta2, weight2, eps, eps_s, decay, z_clip,
    MASKED: tl.constexpr, S: tl.constexpr, C: tl.constexpr, CENTERED: tl.constexpr, MOMENTUM_LAST: tl.constexpr,
    LEAN: tl.constexpr, COUPLED: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, CLIP: tl.constexpr,
    SCALED: tl.constexpr, ROUND_X: tl.constexpr, MASTER: tl.constexpr, FAST: tl.constexpr,
    DECAY_AT_MOST_HALF: tl.constexpr,
):  # fmt: skip
    """Step one block, and return for each of its coordinates the squares of the gradient and of x's change over lr.

    `block` is its index in the tensor, and that of its scales if state is in 8 bits. MASKED: it is the last, and
    only `size` coordinates of the tensor exist. Otherwise as `Rule.update`.
    """
    mask = offsets < size
    count = (size + SCALE_BLOCK - 1) // SCALE_BLOCK
    NARROW: tl.constexpr = S == tl.uint8 or S == tl.bfloat16
    EXACT: tl.constexpr = not NARROW
    word = key
    if NARROW or ROUND_X:
        word = _hash32(offsets.to(tl.uint32) ^ key)

    x = _load_master(x_at, low_at, offsets, mask, MASKED) if MASTER else _load(x_at, offsets, mask, MASKED, C)
    g = _load(g_at, offsets, mask, MASKED, C)
    if SCALED:
        g = g / grad_scale
    gradient = g
    if MAXIMIZE:
        g = -g
    if COUPLED:
        g += decay * x
    if DECOUPLED:
        x *= 1 - lr * decay

    r = _load_state(r_at, r_scales, block, count, offsets, mask, MASKED, S, C, True)
    if MOMENTUM_LAST:
        u = _load_state(u_at, u_scales, block, count, offsets, mask, MASKED, S, C, False)
    deviation = g
    if CENTERED or not MOMENTUM_LAST:
        if LEAN:
            m = u * (_root(r, EXACT, FAST) * inverse_k_before + eps)
        else:
            m = _load_state(m_at, m_scales, block, count, offsets, mask, MASKED, S, C, False)
        if DECAY_AT_MOST_HALF:  # interpolate starting from g, as torch's lerp: from a large m, rounding would lose g
            m = g - mean_weight * (g - m)
        else:
            m += mean_weight * (g - m)
        if not LEAN:
            _store_state(m_at, m_scales, block, count, m, offsets, mask, word & 0xFFFF, MASKED, S, False)
        if CENTERED:
            deviation = g - m
    r = beta2 * r + weight2 * deviation * deviation + eps_s
    _store_state(r_at, r_scales, block, count, r, offsets, mask, word >> 16, MASKED, S, True)

    if MOMENTUM_LAST:
        root = _root(r, EXACT, FAST) + eps * k
        if CLIP:
            root = tl.maximum(root, tl.abs(g) * (k / z_clip), propagate_nan=tl.PropagateNan.ALL)
        u = beta1 * u + weight1 * k * _divide(g, root, EXACT, FAST)
        _store_state(u_at, u_scales, block, count, u, offsets, mask, (word >> 8) & 0xFFFF, MASKED, S, False)
        direction = u
    else:
        direction = _divide(m, _root(r, EXACT, FAST) / k + eps, EXACT, FAST)
    x -= lr * inverse_c_m * direction
    if MASTER:
        _store_master(x_at, low_at, offsets, x, (word * GOLDEN) >> 16, mask, MASKED)
    else:
        if ROUND_X:
            x = _round_to_bfloat16(x, (word * GOLDEN) >> 16)
        _store(x_at, offsets, x, mask, MASKED)
    change = inverse_c_m * direction  # of x, over lr
    if MASKED:
        change = tl.where(mask, change, 0.0)
    return gradient * gradient, change * change


@triton.jit
def _load_pointer(table, tensors, i, ROW: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + tensors * ROW + i).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # lets the compiler load 16 bytes at once
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def update(
    lr, sums_at, table, per_tensor, sizes, owners, positions, tensors, lr_at, grad_scale_at, found_inf_at,
    mean_weight, beta1, weight1, beta2, weight2, eps, eps_s, decay, z_clip,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, C: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    LOOPS: tl.constexpr, CENTERED: tl.constexpr, MOMENTUM_LAST: tl.constexpr, LEAN: tl.constexpr, COUPLED: tl.constexpr,
    DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, CLIP: tl.constexpr, SCALED: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr, LR_ON_DEVICE: tl.constexpr, ROUND_X: tl.constexpr, MASTER: tl.constexpr,
    FAST: tl.constexpr, DECAY_AT_MOST_HALF: tl.constexpr, WRITES_SUMS: tl.constexpr,
):  # fmt: skip
    """Take the step. X, G and S are the dtypes of parameters, gradients and state, C that of the arithmetic."""
    program = tl.program_id(0)
    if HAS_FOUND_INF:  # an overflow anywhere leaves everything unchanged
        if tl.load(found_inf_at) != 0:
            if WRITES_SUMS:
                tl.store(sums_at + 2 * program, float("inf"))
                tl.store(sums_at + 2 * program + 1, 0.0)
            return
    i = tl.load(owners + program)
    first = tl.load(positions + program).to(tl.int64) * LOOPS
    size = tl.load(sizes + i)
    if LR_ON_DEVICE:
        lr = tl.load(lr_at).to(C)
    grad_scale = 1.0
    if SCALED:
        grad_scale = tl.load(grad_scale_at)
    inverse_c_m = tl.load(per_tensor + i)
    k = tl.load(per_tensor + tensors + i)
    inverse_k_before = k
    if LEAN:
        inverse_k_before = tl.load(per_tensor + 2 * tensors + i)
    NARROW: tl.constexpr = S == tl.uint8 or S == tl.bfloat16
    key = i.to(tl.uint32)
    if NARROW or ROUND_X:
        key = tl.load(_get_keys(per_tensor, tensors) + i)

    MEAN: tl.constexpr = (CENTERED or not MOMENTUM_LAST) and not LEAN
    x_at = _load_pointer(table, tensors, i, PARAM, X, ALIGNED)
    low_at = x_at
    if MASTER:
        low_at = _load_pointer(table, tensors, i, LOW, tl.int8 if MASTER == 24 else tl.int16, ALIGNED)
    g_at = _load_pointer(table, tensors, i, GRAD, G, ALIGNED)
    r_at = _load_pointer(table, tensors, i, R, S, ALIGNED)
    m_at = r_at  # never read if the cell has no m; the same for u and scales
    u_at = r_at
    if MEAN:
        m_at = _load_pointer(table, tensors, i, M, S, ALIGNED)
    if MOMENTUM_LAST:
        u_at = _load_pointer(table, tensors, i, U, S, ALIGNED)
    m_scales = x_at.to(tl.pointer_type(tl.float32))
    r_scales = x_at.to(tl.pointer_type(tl.int32))
    u_scales = m_scales
    if S == tl.uint8:
        r_scales = _load_pointer(table, tensors, i, R_SCALE, tl.int32, False)
        if MEAN:
            m_scales = _load_pointer(table, tensors, i, M_SCALE, tl.float32, False)
        if MOMENTUM_LAST:
            u_scales = _load_pointer(table, tensors, i, U_SCALE, tl.float32, False)

    if WRITES_SUMS:
        gradient_squares = tl.zeros([BLOCK], C)
        change_squares = tl.zeros([BLOCK], C)
    for block in tl.range(first, first + LOOPS, num_stages=1):
        start = block * BLOCK
        offsets = start + tl.arange(0, BLOCK)
        if NARROW:  # 4 adjacent values per thread, as in float32, so that threads exchange none
            offsets = tl.max_contiguous(offsets, 4)
        if start + BLOCK <= size:  # full blocks need no mask, so their loads are 16 bytes wide
            gradient_square, change_square = _update(
                x_at, low_at, g_at, m_at, r_at, u_at, m_scales, r_scales, u_scales, offsets, block, size, key,
                inverse_c_m, k, inverse_k_before, lr, grad_scale, mean_weight, beta1, weight1, beta2, weight2, eps,
                eps_s, decay, z_clip,
                MASKED=False, S=S, C=C, CENTERED=CENTERED, MOMENTUM_LAST=MOMENTUM_LAST, LEAN=LEAN, COUPLED=COUPLED,
                DECOUPLED=DECOUPLED, MAXIMIZE=MAXIMIZE, CLIP=CLIP, SCALED=SCALED, ROUND_X=ROUND_X, MASTER=MASTER,
                FAST=FAST, DECAY_AT_MOST_HALF=DECAY_AT_MOST_HALF,
            )  # fmt: skip
            if WRITES_SUMS:
                gradient_squares += gradient_square
                change_squares += change_square
        elif start < size:
            gradient_square, change_square = _update(
                x_at, low_at, g_at, m_at, r_at, u_at, m_scales, r_scales, u_scales, offsets, block, size, key,
                inverse_c_m, k, inverse_k_before, lr, grad_scale, mean_weight, beta1, weight1, beta2, weight2, eps,
                eps_s, decay, z_clip,
                MASKED=True, S=S, C=C, CENTERED=CENTERED, MOMENTUM_LAST=MOMENTUM_LAST, LEAN=LEAN, COUPLED=COUPLED,
                DECOUPLED=DECOUPLED, MAXIMIZE=MAXIMIZE, CLIP=CLIP, SCALED=SCALED, ROUND_X=ROUND_X, MASTER=MASTER,
                FAST=FAST, DECAY_AT_MOST_HALF=DECAY_AT_MOST_HALF,
            )  # fmt: skip
            if WRITES_SUMS:
                gradient_squares += gradient_square
                change_squares += change_square
    if WRITES_SUMS:  # each program its own: adding them up in any order would round differently each time
        tl.store(sums_at + 2 * program, tl.sum(gradient_squares, axis=0))
        tl.store(sums_at + 2 * program + 1, tl.sum(change_squares, axis=0))


FLOATS = (
    "lr", "mean_weight", "beta1", "weight1", "beta2", "weight2", "eps", "eps_s", "decay", "z_clip", "log1", "log2",
)  # fmt: skip


def _take_float64(kernel: Any) -> Any:
    """The kernel with its floats passed as float64; without an annotation Triton passes them as float32."""
    narrow = kernel.fn
    wide: Any = FunctionType(narrow.__code__, narrow.__globals__)
    parameters = inspect.signature(narrow).parameters.values()
    wide.__signature__ = inspect.Signature(
        [each.replace(annotation=tl.float64) if each.name in FLOATS else each for each in parameters]
    )
    return triton.jit(wide, do_not_specialize=["seed"])


wide_advance, wide_update = _take_float64(advance), _take_float64(update)

# The arguments of the two kernels by name; launches pass them in order.
AdvanceArguments: Any
UpdateArguments: Any
AdvanceArguments, UpdateArguments = (
    namedtuple("Arguments", inspect.signature(kernel.fn).parameters) for kernel in (advance, update)
)
