"""TorchTitan trainers: reinforcement learning, and supervised training on the same data."""
