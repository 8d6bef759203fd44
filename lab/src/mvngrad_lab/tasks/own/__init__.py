"""A user's own model and data."""
