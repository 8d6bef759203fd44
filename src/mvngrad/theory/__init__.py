"""The paper's theorems as simulations that run on the rule itself."""
