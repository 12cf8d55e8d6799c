"""The pieces of ``python -m benchmarks.against_trl``: workloads, models, rewards, and one runner per side."""
