"""Rewards: the built-in reward functions, and the worker processes that run them with a deadline."""
