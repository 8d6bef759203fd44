"""Claims of the paper, verdicts on them, and one page that shows both. Imports neither torch nor the training."""
