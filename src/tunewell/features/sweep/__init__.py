"""Train with every combination of some settings, and name the best run."""
