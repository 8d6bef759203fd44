"""ResNet-18 is torchvision's, with the first layers for small images."""

import pytest
import torch
from torch import nn
from vision import torchvision

from mvngrad_lab.tasks.cifar100.model import resnet18


@pytest.fixture
def reference():
    model = torchvision("torchvision.models").resnet18(num_classes=100)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return model


def test_size_and_shapes():
    model = resnet18()
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_220_132
    assert resnet18(10)(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    shapes = []
    for module in model.modules():
        module.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[1:])))
    model(torch.randn(2, 3, 32, 32))
    assert shapes[0] == (64, 32, 32)  # neither stride nor pooling before the first stage
    assert (512, 4, 4) in shapes


def test_convolutions_are_kaiming_normal_with_fan_out():
    for module in resnet18().modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)
            assert module.bias is None


@pytest.mark.parametrize("training", [True, False])
def test_outputs_equal_torchvisions_with_the_same_weights(reference, training):
    """The two have the same tensors in the same order, under other names."""
    ours = resnet18().train(training)
    ours.load_state_dict(dict(zip(ours.state_dict(), reference.state_dict().values(), strict=True)))
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(ours(images), reference.train(training)(images), rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, other)
