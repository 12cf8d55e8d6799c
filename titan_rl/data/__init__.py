"""Prompts: datasets, their train and held-out split, the order of the draw, and the chat template."""
