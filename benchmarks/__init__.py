"""Benchmarks that compare arms within one run. ``python -m benchmarks.NAME`` runs one and writes into results/."""
