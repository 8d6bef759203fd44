"""The family as torch optimizers: one Optimizer, thin named cells, one file for each backend."""
