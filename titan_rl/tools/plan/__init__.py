"""``titan-rl plan``: what a run would need, computed on one CPU before anything is submitted."""
