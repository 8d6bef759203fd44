"""The network of the paper's CIFAR-100 experiments."""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut: the "basic block" of He et al., 2016."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_convolution(inputs, outputs, 3, stride), nn.ReLU(inplace=True), *_convolution(outputs, outputs, 3)
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.activation(self.residual(x) + self.shortcut(x))
        return activated


def resnet18(classes: int = 100) -> nn.Sequential:
    """ResNet-18 (He et al., 2016) for 32x32 images: the first convolution is 3x3 with stride 1, without pooling.

    Initialized as in torchvision: convolutions are Kaiming-normal with fan_out.

    >>> sum(p.numel() for p in resnet18().parameters())
    11220132
    """
    layers = [*_convolution(3, WIDTHS[0], 3), nn.ReLU(inplace=True)]
    for inputs, outputs in zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False):
        layers += [Block(inputs, outputs, stride=1 if outputs == WIDTHS[0] else 2), Block(outputs, outputs, stride=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], classes))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(outputs)]
