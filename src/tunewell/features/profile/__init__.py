"""Show where the time of a training step goes, and the setting that would make it faster."""
