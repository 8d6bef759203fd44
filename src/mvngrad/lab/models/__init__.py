"""The networks of the paper's experiments."""
