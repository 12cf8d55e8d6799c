"""``titan-rl conformance``: every loss and advantage that we have, on a user's data."""
