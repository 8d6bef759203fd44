"""Fused kernels of the language models."""
