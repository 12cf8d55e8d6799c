"""Command-line helpers around training: check, plan, compare, list checkpoints, export, prepare a model."""
