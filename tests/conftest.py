"""Settings of all tests."""

from hypothesis import settings

# A busy machine is no failure of the code: examples are not timed.
settings.register_profile("titan_rl", deadline=None)
settings.load_profile("titan_rl")
