"""The fused step on the CPU: a C++ kernel, compiled at first use."""
