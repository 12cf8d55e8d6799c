"""Bring the policy's weights to the generator, and prove that it serves them."""
