"""Augmentation equals torchvision's pixel by pixel, draws evenly, and is one pure function that compiles whole."""

import pytest
import torch
from scipy import stats
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


def test_crop_and_flip_by_slices(pictures):
    padded = torch.nn.functional.pad(pictures, (4, 4, 4, 4))
    for top, left in [(0, 0), (8, 8), (4, 4), (1, 6)]:
        places = {"top": (top + 0.5) / 9, "left": (left + 0.5) / 9, "count": len(pictures)}
        expected = padded[:, :, top : top + 32, left : left + 32]
        assert torch.equal(augment(pictures, uniforms(**places), operations=0), expected)
        assert torch.equal(augment(pictures, uniforms(flip=0.25, **places), operations=0), expected.flip(3))


# Operations, compared with torchvision's


@pytest.mark.parametrize("magnitude", [0, 9, 20, 30])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_equals_torchvisions_bit_by_bit(pictures, name, magnitude):
    """At magnitude 20, shears fall in the middle of two pixels, where float32 decides."""
    module = torchvision("torchvision.transforms.autoaugment")
    strength, signed = module.RandAugment()._augmentation_space(31, (32, 32))[name]
    strength = strength[magnitude].item() if strength.ndim else 0.0
    nearest = module.InterpolationMode.NEAREST
    for negative in (False, True):
        value = -strength if signed and negative else strength
        expected = torch.stack([module._apply_op(image, name, value, nearest, None) for image in pictures])
        assert torch.equal(apply(name, pictures, negative, magnitude=magnitude), expected)


def test_order_of_operations_is_torchvisions():
    assert tuple(torchvision("torchvision.transforms").RandAugment()._augmentation_space(31, (32, 32))) == OPERATIONS


# Random choices


def test_choices_are_uniform_and_independent():
    count = 200_000
    chosen = choose(torch.rand(count, UNIFORMS), crop=4, operations=2)
    corners, flips = (9 * chosen.top + chosen.left).bincount(minlength=81), chosen.flipped.long().bincount(minlength=2)
    pairs = (chosen.operation * 2 + chosen.negative.long()) @ torch.tensor([28, 1])
    for counts in (corners, flips, pairs.bincount(minlength=28 * 28)):
        assert stats.chisquare(counts).pvalue > 1e-3


def test_ends_of_the_interval_are_valid_choices():
    for number, last in ((0.0, 0), (1 - 2**-24, 1)):
        chosen = choose(torch.full((1, UNIFORMS), number), crop=4, operations=2)
        assert chosen.top.tolist() == chosen.left.tolist() == [8 * last]
        assert chosen.operation.tolist() == [[13 * last] * 2]


def test_operations_are_applied_in_order(pictures):
    both = augment(pictures, uniforms("Rotate", "Equalize", count=len(pictures)))
    assert torch.equal(both, apply("Equalize", apply("Rotate", pictures)))
    assert not torch.equal(both, apply("Rotate", apply("Equalize", pictures)))


def test_crop_and_flip_can_be_disabled(pictures):
    plain = augment(pictures, torch.rand(len(pictures), UNIFORMS), crop=0, flip=False, operations=0)
    assert torch.equal(plain, pictures)


def test_images_are_augmented_independently_and_repeatably(pictures):
    numbers = torch.rand(len(pictures), UNIFORMS)
    kept, whole = pictures.clone(), augment(pictures, numbers)
    assert torch.equal(pictures, kept)
    assert torch.equal(augment(pictures, numbers), whole)
    alone = [augment(image[None], number[None]) for image, number in zip(pictures, numbers, strict=True)]
    assert torch.equal(torch.cat(alone), whole)


# Normalization and MixUp


def test_normalize_uses_means_and_deviations_of_cifar100():
    black_to_white = normalize(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 3, 1, 2))
    assert black_to_white.dtype == torch.float32
    mean, deviation = torch.tensor([0.5071, 0.4865, 0.4409]), torch.tensor([0.2673, 0.2564, 0.2762])
    torch.testing.assert_close(black_to_white[0, :, 0], torch.stack([-mean / deviation, (1 - mean) / deviation], 1))


def test_mixup_mixes_images_and_labels_equally():
    images, labels = torch.randn(5, 3, 4, 4), torch.tensor([0, 3, 3, 1, 2])
    mixed, targets = mixup(images, labels, torch.tensor(0.7), classes=4)
    torch.testing.assert_close(mixed[2], 0.7 * images[2] + 0.3 * images[1])
    torch.testing.assert_close(mixed[0], 0.7 * images[0] + 0.3 * images[4])
    torch.testing.assert_close(targets[1], torch.tensor([0.3, 0, 0, 0.7]))
    torch.testing.assert_close(targets[2], torch.tensor([0, 0, 0, 1.0]))
    torch.testing.assert_close(targets.sum(1), torch.ones(5))
    assert torch.equal(mixup(images, labels, torch.tensor(1.0), classes=4)[0], images)


# Compiled and captured


@pytest.fixture
def every_pair(pictures):
    """Images, half of them without a black border, and numbers with which each pair of operations is drawn 4 times."""
    pairs = torch.arange(14 * 14).repeat(4)
    numbers = torch.rand(len(pairs), UNIFORMS)
    numbers[len(pairs) // 2 :, :2] = CENTRE
    numbers[:, 3], numbers[:, 5] = (pairs // 14 + 0.5) / 14, (pairs % 14 + 0.5) / 14
    return pictures[torch.randint(len(pictures), (len(pairs),))], numbers


@pytest.mark.slow
@pytest.mark.usefixtures("cpp_compiler")
def test_compiled_as_one_graph_gives_the_same_images(every_pair):
    compiled = torch.compile(augment, fullgraph=True)
    assert torch.equal(compiled(*every_pair), augment(*every_pair))


@pytest.mark.gpu
def test_gpu_gives_the_same_images_eager_and_captured(every_pair):
    """A function that waits for the device cannot be captured."""
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
def test_compiled_for_the_gpu_gives_the_same_images(every_pair):
    """Also where a product could be fused with its sum, in Color and Sharpness, whose factors are float64."""
    images, uniforms = (tensor.cuda() for tensor in every_pair)
    compiled = torch.compile(augment, fullgraph=True)
    assert torch.equal(compiled(images, uniforms, operations=1), augment(images, uniforms, operations=1))
