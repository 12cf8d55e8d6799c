"""What a person sees of a run: stage times, the progress line, recorded rollouts, the summary."""
