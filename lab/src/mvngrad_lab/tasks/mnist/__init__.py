"""MNIST: data, network and recipe."""
