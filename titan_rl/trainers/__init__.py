"""TorchTitan trainers: reinforcement learning, supervised training, preferences and reward models."""
