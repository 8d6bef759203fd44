"""Training augmentation where the images are, on the CPU or the GPU, as pure functions of tensors."""

from mvngrad.lab.augment.batch import mixup, normalize
from mvngrad.lab.augment.pipeline import UNIFORMS, augment

__all__ = ["UNIFORMS", "augment", "mixup", "normalize"]
