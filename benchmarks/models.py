"""The parameter shapes of the models that steps are timed on."""

from __future__ import annotations

Shapes = list[tuple[int, ...]]


def gpt2(layers: int, width: int, context: int, vocabulary: int = 50304) -> Shapes:
    """GPT-2 with tied embeddings and, as nanoGPT trains it, without biases."""
    w = width
    block: Shapes = [(w,), (3 * w, w), (w, w), (w,), (4 * w, w), (w, 4 * w)]
    return [(vocabulary, w), (context, w), *block * layers, (w,)]


def resnet18(classes: int = 100) -> Shapes:
    """ResNet-18 with the 3x3 stem of CIFAR."""
    shapes: Shapes = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            entry = before if block == 0 else width
            shapes += [(width, entry, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if entry != width:
                shapes += [(width, entry, 1, 1), (width,), (width,)]
        before = width
    return [*shapes, (classes, 512), (classes,)]


MODELS: dict[str, Shapes] = {
    "gpt2-30m": gpt2(6, 384, 512),
    "gpt2-124m": gpt2(12, 768, 1024),
    "resnet18": resnet18(),
    "tiny-2000": [(1000,)] * 2000,
}
