"""The fused step on CUDA: a Triton kernel, and the launches of it."""
