"""Augmentation equals torchvision's pixel by pixel, draws evenly, and is one pure function that compiles whole."""

import math

import pytest
import torch
from vision import torchvision

from mvngrad_lab.tasks.cifar100.augment import UNIFORMS, augment, choose, mixup, normalize
from mvngrad_lab.tasks.cifar100.randaugment import OPERATIONS

CENTRE, RIGHT_WAY_ROUND = 4.5 / 9, 0.75


def uniforms(*names, count=1, negative=False, top=CENTRE, left=CENTRE, flip=RIGHT_WAY_ROUND):
    """Numbers that draw these operations."""
    slots = [number for name in names for number in ((OPERATIONS.index(name) + 0.5) / 14, 0.25 if negative else 0.75)]
    return torch.tensor([[top, left, flip, *slots]]).repeat(count, 1)


def apply(name, images, negative=False, **options):
    images = torch.as_tensor(images, dtype=torch.uint8)
    return augment(images, uniforms(name, count=len(images), negative=negative), operations=1, **options)


@pytest.fixture
def pictures():
    """Smooth, pale, noisy, flat, of few values, dark, of every brightness: what float32 rounds in all its ways."""
    smooth = torch.nn.functional.interpolate(torch.rand(24, 3, 5, 5), 32, mode="bicubic").mul(255).clamp(0, 255)
    pale = smooth / 2 + 80
    noisy = (smooth + 20 * torch.randn(24, 3, 32, 32)).clamp(0, 255)
    flat = torch.tensor([0, 1, 7, 128, 254, 255]).view(-1, 1, 1, 1).expand(-1, 3, 32, 32)
    few = torch.tensor([3, 90, 200])[torch.randint(3, (6, 3, 32, 32))]
    single = torch.zeros(2, 3, 32, 32)
    single[:, :, 5, 6] = torch.tensor([[1], [255]])
    levels = torch.arange(1024).view(32, 32).expand(2, 3, 32, 32) // torch.tensor([4, 1]).view(2, 1, 1, 1) % 256
    noise = torch.randint(256, (24, 3, 32, 32))
    return torch.cat([images.to(torch.uint8) for images in (smooth, pale, noisy, flat, few, single, levels, noise)])


def ramp(size=32):
    """Pixel values that tell where a pixel was: red its row, green its column, blue 100."""
    rows = torch.arange(size, dtype=torch.uint8).view(-1, 1).expand(size, size) + 1
    return torch.stack([rows, rows.T, torch.full_like(rows, 100)])[None]


def grid(values, size=8):
    """An image whose pixels are `values` in turn, in all three channels."""
    return (
        torch.tensor([values[index % len(values)] for index in range(size**2)])
        .view(1, 1, size, size)
        .repeat(1, 3, 1, 1)
    )


# By their definitions


def test_crop_and_flip(pictures):
    padded = torch.nn.functional.pad(pictures, (4, 4, 4, 4))
    for top, left in [(0, 0), (8, 8), (4, 4), (1, 6)]:
        places = {"top": (top + 0.5) / 9, "left": (left + 0.5) / 9, "count": len(pictures)}
        expected = padded[:, :, top : top + 32, left : left + 32]
        assert torch.equal(augment(pictures, uniforms(**places), operations=0), expected)
        assert torch.equal(augment(pictures, uniforms(flip=0.25, **places), operations=0), expected.flip(3))


def test_identity(pictures):
    assert torch.equal(apply("Identity", pictures), pictures)


def test_translate_moves_by_four_of_32_pixels():
    """150/331 of the width at the 30th step: 4.35 pixels at the 9th, of which 4 are whole."""
    for negative, expected in ((False, [0, 0, 0, 0, *range(1, 29)]), (True, [*range(5, 33), 0, 0, 0, 0])):
        assert apply("TranslateX", ramp(), negative)[0, 1, 7].tolist() == expected
        assert apply("TranslateY", ramp(), negative)[0, 0, :, 7].tolist() == expected


@pytest.mark.parametrize("negative", [False, True])
def test_shear_moves_each_row_by_009_of_its_distance_from_the_corner(negative):
    across, down = apply("ShearX", ramp(), negative), apply("ShearY", ramp(), negative)
    for row in range(32):
        source = [round(column + (-0.09 if negative else 0.09) * (row + 0.5)) for column in range(32)]
        expected = [column + 1 if 0 <= column < 32 else 0 for column in source]
        assert across[0, 1, row].tolist() == expected
        assert down[0, 0, :, row].tolist() == expected


@pytest.mark.parametrize(("negative", "turn"), [(False, 1), (True, -1)])
def test_rotate_turns_about_the_middle_counter_clockwise(negative, turn):
    """By 30 degrees at the 30th step."""
    turned = apply("Rotate", ramp(), negative, magnitude=30)
    angle = turn * math.radians(30)
    for row, column in [(16, 16), (10, 20), (20, 9), (2, 30), (0, 0)]:
        x, y = column - 15.5, row - 15.5
        source = (
            round(15.5 + math.sin(angle) * x + math.cos(angle) * y),
            round(15.5 + math.cos(angle) * x - math.sin(angle) * y),
        )
        inside = all(0 <= place < 32 for place in source)
        assert turned[0, :2, row, column].tolist() == ([source[0] + 1, source[1] + 1] if inside else [0, 0])


def test_brightness_scales():
    """By 1.27 or 0.73."""
    values = grid([0, 10, 100, 250])
    assert apply("Brightness", values)[0, 0, 0, :4].tolist() == [0, 12, 127, 255]
    assert apply("Brightness", values, negative=True)[0, 0, 0, :4].tolist() == [0, 7, 73, 182]


def test_color_moves_away_from_grey_or_towards_it():
    image = torch.tensor([200, 100, 50]).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    shade = int(0.2989 * 200 + 0.587 * 100 + 0.114 * 50)
    for negative, factor in ((False, 1.27), (True, 0.73)):
        expected = [int(factor * value + (1 - factor) * shade) for value in (200, 100, 50)]
        assert apply("Color", image, negative)[0, :, 3, 3].tolist() == expected


def test_contrast_moves_away_from_the_mean_shade_or_towards_it():
    image = grid([40, 200])
    mean = (int(0.9999 * 40) + int(0.9999 * 200)) / 2
    for negative, factor in ((False, 1.27), (True, 0.73)):
        expected = [min(max(int(factor * value + (1 - factor) * mean), 0), 255) for value in (40, 200)]
        assert apply("Contrast", image, negative)[0, 0, 0, :2].tolist() == expected


def test_sharpness_moves_away_from_the_blurred_image_or_towards_it():
    image = torch.full((1, 3, 8, 8), 50)
    image[:, :, 3, 3] = 180
    image[:, :, 0, 7] = 180  # at the border nothing is blurred
    middle, beside = round((8 * 50 + 5 * 180) / 13), round((12 * 50 + 180) / 13)
    for negative, factor in ((False, 1.27), (True, 0.73)):
        changed = apply("Sharpness", image, negative)[0, 0]
        assert changed[3, 3] == int(factor * 180 + (1 - factor) * middle)
        assert changed[2, 4] == int(factor * 50 + (1 - factor) * beside)
        assert changed[0, 7] == 180


def test_posterize_drops_bits():
    """One at the 9th step, four at the 30th."""
    values = grid([0, 1, 255, 146])
    assert apply("Posterize", values)[0, 0, 0, :4].tolist() == [0, 0, 254, 146]
    assert apply("Posterize", values, magnitude=30)[0, 0, 0, :4].tolist() == [0, 0, 240, 144]


def test_solarize_inverts_the_bright():
    """From 178.5 on at the 9th step, everything at the 30th."""
    values = grid([0, 178, 179, 255])
    assert apply("Solarize", values)[0, 0, 0, :4].tolist() == [0, 178, 76, 0]
    assert apply("Solarize", values, magnitude=30)[0, 0, 0, :4].tolist() == [255, 77, 76, 0]


def test_autocontrast_stretches_each_channel_that_has_two_values():
    image = grid([50, 101, 152])
    image[:, 1], image[:, 2] = 77, grid([0, 255, 9])[:, 0]
    assert apply("AutoContrast", image)[0, :, 0, :3].tolist() == [[0, 127, 255], [77, 77, 77], [0, 255, 9]]


def test_equalize_spreads_by_rank():
    """1024 pixels, of which 256 each have 4 values: 768 are below the brightest, and 768 // 255 = 3 share a level."""
    image = grid([10, 11, 200, 250], size=32)
    assert apply("Equalize", image)[0, 0, 0, :4].tolist() == [0, (256 + 1) // 3, (512 + 1) // 3, 255]
    mostly_bright = torch.full((1, 3, 32, 32), 90)
    mostly_bright[:, :, 0] = 5  # 32 below the brightest: too few to spread
    assert torch.equal(apply("Equalize", mostly_bright), mostly_bright.to(torch.uint8))


# By torchvision's


@pytest.mark.parametrize("magnitude", [0, 9, 20, 30])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_equals_torchvisions(pictures, name, magnitude):
    """Bit by bit; at 20, shears fall in the middle of two pixels, where float32 decides."""
    module = torchvision("torchvision.transforms.autoaugment")
    strength, signed = module.RandAugment()._augmentation_space(31, (32, 32))[name]
    strength = strength[magnitude].item() if strength.ndim else 0.0
    nearest = module.InterpolationMode.NEAREST
    for negative in (False, True):
        value = -strength if signed and negative else strength
        expected = torch.stack([module._apply_op(image, name, value, nearest, None) for image in pictures])
        assert torch.equal(apply(name, pictures, negative, magnitude=magnitude), expected)


def test_the_order_of_operations_is_torchvisions():
    assert tuple(torchvision("torchvision.transforms").RandAugment()._augmentation_space(31, (32, 32))) == OPERATIONS


# Chance


def chi_square(counts, probability):
    """Whether counts are as even as fair dice's would be but for one time in 1/probability (Wilson and Hilferty)."""
    degrees = len(counts) - 1
    mean = counts.sum() / len(counts)
    statistic = ((counts - mean) ** 2 / mean).sum().item()
    quantile = torch.special.ndtri(torch.tensor(1 - probability)).item()
    return statistic < degrees * (1 - 2 / (9 * degrees) + quantile * math.sqrt(2 / (9 * degrees))) ** 3


def test_every_choice_is_equally_likely_and_by_itself():
    count = 200_000
    chosen = choose(torch.rand(count, UNIFORMS), crop=4, operations=2)
    assert chi_square((9 * chosen.top + chosen.left).bincount(minlength=81), 1e-3)
    assert chi_square(chosen.flipped.long().bincount(minlength=2), 1e-3)
    pairs = (chosen.operation * 2 + chosen.negative.long()) @ torch.tensor([28, 1])
    assert chi_square(pairs.bincount(minlength=28 * 28), 1e-3)


def test_the_ends_of_the_interval_are_choices_too():
    for number, last in ((0.0, 0), (1 - 2**-24, 1)):
        chosen = choose(torch.full((1, UNIFORMS), number), crop=4, operations=2)
        assert chosen.top.tolist() == chosen.left.tolist() == [8 * last]
        assert chosen.operation.tolist() == [[13 * last] * 2]


def test_two_operations_follow_one_another(pictures):
    both = augment(pictures, uniforms("Rotate", "Equalize", count=len(pictures)))
    assert torch.equal(both, apply("Equalize", apply("Rotate", pictures)))
    assert not torch.equal(both, apply("Rotate", apply("Equalize", pictures)))


def test_no_flip_and_no_crop_where_none_is_asked_for(pictures):
    plain = augment(pictures, torch.rand(len(pictures), UNIFORMS), crop=0, flip=False, operations=0)
    assert torch.equal(plain, pictures)


def test_each_image_by_itself_and_always_the_same(pictures):
    numbers = torch.rand(len(pictures), UNIFORMS)
    kept, whole = pictures.clone(), augment(pictures, numbers)
    assert torch.equal(pictures, kept)
    assert torch.equal(augment(pictures, numbers), whole)
    alone = [augment(image[None], number[None]) for image, number in zip(pictures, numbers, strict=True)]
    assert torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize(
    ("shape", "dtype", "numbers", "options", "says"),
    [
        ((2, 3, 32, 32), torch.float32, (2, 7), {}, r"images is torch.float32 .* uint8"),
        ((2, 3, 20, 32), torch.uint8, (2, 7), {}, r"\[2, 3, 20, 32\]; augment needs"),
        ((2, 3, 32, 32), torch.uint8, (3, 7), {}, r"uniforms has shape \[3, 7\]; 2 images"),
        ((2, 3, 32, 32), torch.uint8, (2, 7), {"operations": 3}, r"operations=3 need at least \[2, 9\]"),
        ((2, 3, 32, 32), torch.uint8, (2, 7), {"magnitude": 31}, r"magnitude=31 is out of range; .* use 0 to 30"),
    ],
)
def test_wrong_arguments_are_named(shape, dtype, numbers, options, says):
    with pytest.raises(ValueError, match=says):
        augment(torch.zeros(shape, dtype=dtype), torch.rand(numbers), **options)


# After it


def test_normalized_pixels_have_the_means_and_deviations_of_cifar100():
    black_to_white = normalize(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 3, 1, 2))
    assert black_to_white.dtype == torch.float32
    mean, deviation = torch.tensor([0.5071, 0.4865, 0.4409]), torch.tensor([0.2673, 0.2564, 0.2762])
    torch.testing.assert_close(black_to_white[0, :, 0], torch.stack([-mean / deviation, (1 - mean) / deviation], 1))


def test_mixup_mixes_images_and_labels_alike():
    images, labels = torch.randn(5, 3, 4, 4), torch.tensor([0, 3, 3, 1, 2])
    mixed, targets = mixup(images, labels, torch.tensor(0.7), classes=4)
    torch.testing.assert_close(mixed[2], 0.7 * images[2] + 0.3 * images[1])
    torch.testing.assert_close(mixed[0], 0.7 * images[0] + 0.3 * images[4])
    torch.testing.assert_close(targets[1], torch.tensor([0.3, 0, 0, 0.7]))
    torch.testing.assert_close(targets[2], torch.tensor([0, 0, 0, 1.0]))
    torch.testing.assert_close(targets.sum(1), torch.ones(5))
    assert torch.equal(mixup(images, labels, torch.tensor(1.0), classes=4)[0], images)


# Compiled


@pytest.fixture
def every_pair(pictures):
    """Images, half of them without a black border, and numbers with which each pair of operations is drawn 4 times."""
    pairs = torch.arange(14 * 14).repeat(4)
    numbers = torch.rand(len(pairs), UNIFORMS)
    numbers[len(pairs) // 2 :, :2] = CENTRE
    numbers[:, 3], numbers[:, 5] = (pairs // 14 + 0.5) / 14, (pairs % 14 + 0.5) / 14
    return pictures[torch.randint(len(pictures), (len(pairs),))], numbers


@pytest.mark.usefixtures("cpp_compiler")
def test_compiled_as_one_graph_it_is_the_same_function(every_pair):
    compiled = torch.compile(augment, fullgraph=True)
    assert torch.equal(compiled(*every_pair), augment(*every_pair))


@pytest.mark.gpu
def test_on_the_gpu_it_is_the_same_function_eager_and_captured(every_pair):
    """What waits for the device cannot be captured."""
    expected = augment(*every_pair)
    there = [tensor.cuda() for tensor in every_pair]
    assert torch.equal(augment(*there).cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = augment(*there)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured.cpu(), expected)


@pytest.mark.gpu
def test_compiled_for_the_gpu_it_is_the_same_function(every_pair):
    """Also where a product could be fused with its sum, in Color and Sharpness: factors are float64 by birth."""
    images, uniforms = (tensor.cuda() for tensor in every_pair)
    compiled = torch.compile(augment, fullgraph=True)
    assert torch.equal(compiled(images, uniforms, operations=1), augment(images, uniforms, operations=1))
