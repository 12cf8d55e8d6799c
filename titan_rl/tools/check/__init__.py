"""``titan-rl check``: whether a small model of a user's run trains the same however it is laid out."""
