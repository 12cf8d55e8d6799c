"""Prompts in, scored groups of rollouts out: who generates what, rewards, held-out evaluation."""
