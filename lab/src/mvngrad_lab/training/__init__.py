"""Training loops: recipes, runs, checkpoints, resuming, several processes."""
