"""Rounding at random is unbiased, to a neighbour, and reproducible; and the 8-bit format."""

import math

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import mvngrad
from mvngrad.optim import formats
from mvngrad.optim.formats import Noise, Rounding, hash32, round_to_bfloat16

quick = settings(deadline=None, max_examples=100)
EVERY = torch.arange(2**16, dtype=torch.int32)
"""Every value of 16 random bits once: a mean over them is the expectation of a rounding."""
HALF = 2**15


# bfloat16


def numbers(low, high):
    """Sign, octave and fraction of a few numbers, with octaves from low to high equally likely."""
    octaves = st.integers(low, high - 1)
    return st.lists(st.tuples(st.sampled_from([-1.0, 1.0]), octaves, st.integers(0, 2**23 - 1)), min_size=1, max_size=9)


@settings(deadline=None, max_examples=25)
@given(numbers(-126, 127))
@example([(1.0, 0, 0), (1.0, 0, 1), (1.0, 0, 2**23 - 1), (-1.0, -126, 0), (-1.0, -126, 2**16 - 1), (1.0, 126, 2**15)])
def test_rounding_to_bfloat16_is_unbiased_and_to_a_neighbour(drawn):
    x = torch.tensor([sign * 2.0**octave * (1 + part * 2.0**-23) for sign, octave, part in drawn])
    below = x.view(torch.int32) & -(2**16)
    above = (below + 2**16).view(torch.float32).double()
    below = below.view(torch.float32).double()
    rounded = round_to_bfloat16(x.expand(2**16, -1), EVERY[:, None]).double()
    assert ((rounded == below) | (rounded == above)).all()
    assert torch.equal(rounded.mean(0), x.double())


@pytest.mark.parametrize("noise", [0, 1, HALF - 1, HALF, 2**16 - 1])
def test_rounding_leaves_bfloat16_numbers_unchanged(noise):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    assert torch.equal(round_to_bfloat16(every.float(), torch.full(every.shape, noise)), every)


@pytest.mark.parametrize("bits", [0x7F800000, 0x7FC00000, 0x7FFFFFFF], ids=["inf", "nan", "nan-of-a-gpu"])
@pytest.mark.parametrize("sign", [0, -(2**31)], ids=["positive", "negative"])
def test_rounding_to_bfloat16_keeps_values_that_are_not_finite(bits, sign):
    x = torch.tensor(bits + sign, dtype=torch.int32).view(torch.float32).expand(2**16)
    torch.testing.assert_close(round_to_bfloat16(x, EVERY).float(), x, rtol=0, atol=0, equal_nan=True)


def test_rounding_to_bfloat16_keeps_zero():
    assert not round_to_bfloat16(torch.zeros(2**16), EVERY).any()


# 8 bits


def make_block(values):
    """One block that begins with these values, filled up with zeros."""
    row = torch.zeros(formats.BLOCK)
    row[: len(values)] = torch.tensor(values, dtype=torch.float32)
    return row


def signed(row, noise):
    codes, scale = formats.encode_signed(row, noise)
    return formats.decode_signed(codes.to(torch.uint8).to(torch.int32), scale)


def squares(row, noise):
    codes, first, cut = formats.encode_squares(row, noise)
    assert codes.min() >= 0
    assert codes.max() <= 255
    return formats.decode_squares(codes.to(torch.uint8).to(torch.int32), first, cut)


def signed_steps(row):
    """The largest distance to the next code: an eighth of a value, and constant below 2^-16 of the largest.

    The scale of a block is at least the smallest normal number.
    """
    size = row.double().abs()
    return size / 8 + size.max().clamp(min=2.0**-126) * 2**-18


def square_steps(row, noise=HALF):
    _, _, cut = formats.encode_squares(row, noise)
    return row * 2.0 ** (cut.double() - 23) + 2.0 ** (cut.double() - 149)  # the second term is for denormal numbers


# The inverse of a larger scale is denormal, and not exact to the last place.
floats = st.floats(-(2.0**124), 2.0**124, width=32)
signed_values = st.lists(floats, min_size=1, max_size=8) | st.builds(lambda x, n: [x] * n, floats, st.integers(1, 256))
positives = st.floats(2.0**-149, 2.0**126, width=32)
square_values = st.lists(positives | st.just(0.0), min_size=1, max_size=8) | st.builds(
    lambda x, n: [x] * n, positives, st.integers(1, 256)
)
noises = st.integers(0, 2**16 - 1)
each_encoding = pytest.mark.parametrize("round_trip", [signed, squares], ids=["signed", "squares"])


@quick
@given(signed_values, noises)
@example([1e-45, 0.0], 0)
@example([1e-39, -1e-40, 0.0, 1e-45], HALF)
@example([1e37, 1e-37], 2**16 - 1)
@example([0.0] * 256, 0)
def test_a_signed_value_moves_by_less_than_a_step_and_keeps_its_sign(values, noise):
    row = make_block(values)
    back = signed(row, noise)
    assert ((back - row).abs() <= signed_steps(row)).all()
    assert (back * row.sign() >= 0).all()
    assert not back[row == 0].any()
    if row.abs().max() >= 2.0**-126:
        assert back.abs().max() == row.abs().max()


@quick
@given(square_values, noises)
@example([1e-45, 1e38], 0)
@example([1e-45, 2e-45, 1e-39], 0)
@example([1.0] * 256, 2**16 - 1)
@example([0.0] * 256, 2**16 - 1)
def test_a_square_moves_by_less_than_a_step_and_never_becomes_zero(values, noise):
    row = make_block(values)
    back = squares(row, noise)
    _, first, cut = formats.encode_squares(row, noise)
    least = formats.decode_squares(torch.ones(1, dtype=torch.int32), first, cut)
    assert ((back - row).abs() <= square_steps(row, noise))[row >= least].all()
    assert (back[(row > 0) & (row < least)] == least).all()
    assert (back[row > 0] > 0).all()
    assert not back[row == 0].any()


@quick
@given(square_values, noises)
def test_squares_within_63_octaves_all_have_a_code_near_them(values, noise):
    row = make_block(values)
    row = row.where(row > row.max() * 2.0**-63, 0)
    assert ((squares(row, noise) - row).abs() <= square_steps(row, noise)).all()


@quick
@given(signed_values, noises)
@example([1e-45, 0.0], 0)
@example([1e-38, 3e-39], 0)
def test_encoding_decoded_signed_values_changes_nothing(values, noise):
    once = signed(make_block(values), noise)
    assert torch.equal(signed(once, HALF), once)


@quick
@given(square_values, noises)
@example([1e-45, 1e38], 0)
@example([1e-45, 2e-45, 1e-39], 0)
def test_encoding_decoded_squares_changes_nothing(values, noise):
    once = squares(make_block(values), noise)
    assert torch.equal(squares(once, HALF), once)


@each_encoding
@pytest.mark.parametrize("octaves", [0.5, 4, 12, 25, 50])
def test_rounding_to_8_bits_is_unbiased(round_trip, octaves):
    """For every range of a block, which determines the size of its steps."""
    row = torch.exp2(-octaves * torch.rand(formats.BLOCK, generator=torch.Generator().manual_seed(0)))
    if round_trip is signed:
        row[::2] *= -1
    back = round_trip(row.repeat(2**16 // 4, 1), EVERY[::4, None]).double()
    steps = signed_steps(row) if round_trip is signed else square_steps(row)
    # With every fourth value of the noise, the mean is exact to 2^-14 of a step; UP adds 2^-22 of a signed value.
    error = (back.mean(0) - row.double()).abs()
    assert (error <= 2**-13 * steps).all()
    assert (back.std(0) > 0).float().mean() > 0.5, "nothing was rounded"


@pytest.mark.parametrize("noise", [0, 1, HALF, 2**16 - 1])
def test_the_largest_value_of_a_signed_block_is_exact(noise):
    block = torch.randn(4096, formats.BLOCK, generator=torch.Generator().manual_seed(0))
    largest = block.abs().argmax(1, keepdim=True)
    assert torch.equal(signed(block, noise).gather(1, largest), block.gather(1, largest))


@each_encoding
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_8_bit_state_keeps_values_that_are_not_finite(round_trip, bad):
    row = torch.ones(formats.BLOCK)
    row[3] = bad
    for noise in (0, HALF, 2**16 - 1):
        assert not round_trip(row, noise)[3].isfinite()


def test_the_constants_of_8_bit_codes_are_consistent():
    assert torch.tensor(formats.OFFSET).view(torch.int32) == formats.OFFSET_BITS
    assert formats.decode_signed(torch.tensor([127, 255, 0, 128]), torch.tensor(3.0)).tolist() == [3, -3, 0, 0]


def test_a_block_with_a_smaller_range_has_finer_steps():
    cuts = []
    for octaves in (1, 3, 7, 15, 31, 60):
        row = torch.exp2(-octaves * torch.linspace(0, 1, formats.BLOCK))
        cuts.append(formats.encode_squares(row, HALF)[2].item())
    assert cuts == [16, 17, 18, 19, 20, 21]  # 128, 64, 32, 16, 8 and 4 steps an octave


# The random bits


def test_random_bits_differ_between_seeds_indices_steps_coordinates_and_states():
    param, stored = torch.zeros(1000), torch.zeros(1000, dtype=torch.bfloat16)

    def draw(seed=0, index=0, t=1.0, name="m"):
        return Rounding(seed).make_noise(index, t, param, stored)[name]

    others = [draw(seed=1), draw(index=1), draw(t=2.0), draw(name="s"), draw(name="u"), draw(name="x")]
    for other in others:
        assert (draw() == other).float().mean() < 0.01
    assert torch.equal(draw(), draw(t=torch.tensor(1.0)))
    assert draw().unique().numel() > 950


@pytest.mark.parametrize("name", ["m", "s", "v", "u", "x"])
def test_random_bits_are_uniform(name):
    noise = Noise(Rounding(5).make_key(2, 7), 2**18, torch.device("cpu"))[name]
    assert noise.min() >= 0
    assert noise.max() < 2**16
    counts = torch.bincount(noise >> 8, minlength=256).double()
    chi2 = ((counts - 1024).square() / 1024).sum()
    assert abs(chi2 - 255) < 6 * math.sqrt(2 * 255)
    assert noise.double().mean().item() == pytest.approx(2**15, abs=6 * 2**16 / math.sqrt(12 * 2**18))


def test_hash32_is_lowbias32():
    """Compared with lowbias32 of Wellons' hash-prospector, written in Python integers."""

    def lowbias32(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    words = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 0xDEADBEEF]
    signed_words = torch.tensor(words).to(torch.int32)
    assert [word % 2**32 for word in hash32(signed_words).tolist()] == [lowbias32(word) for word in words]


def test_only_bfloat16_parameters_and_narrow_state_draw_random_bits():
    wide, narrow = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)
    assert Rounding().make_noise(0, 1, wide, wide) is None
    assert Rounding(params=True).make_noise(0, 1, wide, wide) is None
    assert Rounding().make_noise(0, 1, narrow, wide) is None
    assert Rounding(params=True).make_noise(0, 1, narrow, wide) is not None
    assert Rounding().make_noise(0, 1, wide, narrow) is not None
    assert Rounding().make_noise(0, 1, wide, torch.zeros(3, dtype=torch.uint8)) is not None
    assert (
        Rounding().make_noise(0, 1, torch.zeros(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.complex64))
        is None
    )


@pytest.mark.parametrize(
    ("state_dtype", "shares"),
    [(torch.bfloat16, {0.9: 0.01, 0.99: 0.02, 0.999: 0.05}), ("int8", {0.9: 0.08, 0.99: 0.28, 0.999: 0.88})],
)
def test_errors_of_rounding_add_up_over_the_memory_of_an_average(state_dtype, shares):
    """If this fails: the table on the page about state."""
    for beta1, share in shares.items():
        params = [torch.nn.Parameter(torch.zeros(4096)) for _ in range(2)]
        optimizers = [
            mvngrad.MVNGrad([param], betas=(beta1, 0.999), state_dtype=dtype)
            for param, dtype in zip(params, (None, state_dtype), strict=True)
        ]
        generator = torch.Generator().manual_seed(0)
        for _ in range(100 + round(3 / (1 - beta1))):
            gradient = torch.randn(4096, generator=generator)
            for param, optimizer in zip(params, optimizers, strict=True):
                param.grad = gradient
                optimizer.step()
        exact, rounded = (
            formats.load_state(("u",), optimizer.state[param], torch.float32)["u"]
            for param, optimizer in zip(params, optimizers, strict=True)
        )
        error = (rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert error == pytest.approx(share, rel=0.1, abs=0.008)
