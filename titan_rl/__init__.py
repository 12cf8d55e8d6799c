"""titan_rl: RL post-training as an ordinary TorchTitan trainer.

Importing this package imports neither torch nor TorchTitan, so that command lines and reward workers
start fast. Start at :mod:`titan_rl.trainers.rl` for the loop and docs/tour.md for a walk through it.
"""

__version__ = "0.1.0"
