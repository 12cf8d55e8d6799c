"""What makes a run repeatable and safe to stop: seeds, run state, status, lock, signals, checkpoints."""
