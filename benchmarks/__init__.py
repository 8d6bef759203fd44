"""Measurements, side by side in one run. Each module runs with ``python -m benchmarks.NAME`` and writes results/."""
