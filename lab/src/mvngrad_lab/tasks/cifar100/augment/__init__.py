"""Training augmentation where the images are, on the CPU or the GPU, as pure functions of tensors."""

from mvngrad_lab.tasks.cifar100.augment.batch import mixup, normalize
from mvngrad_lab.tasks.cifar100.augment.pipeline import UNIFORMS, augment

__all__ = ["UNIFORMS", "augment", "mixup", "normalize"]
