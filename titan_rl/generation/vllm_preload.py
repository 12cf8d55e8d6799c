"""Imports vLLM in the way in which a rank does: for a process from which ranks are forked.

Where it is not installed nothing happens here: each rank says so.
"""

import contextlib

from titan_rl.errors import ConfigError
from titan_rl.generation import vllm

with contextlib.suppress(ConfigError):
    vllm.import_engine(run_threads=None)
