"""CIFAR-100: data, augmentation, network and recipe."""
