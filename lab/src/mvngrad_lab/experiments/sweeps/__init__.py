"""The paper's hyperparameter sweeps, and smaller ones of our own. `mvngrad sweep` runs them."""
