"""Variance or epsilon: what a floor under the divisor does on CIFAR-100."""
