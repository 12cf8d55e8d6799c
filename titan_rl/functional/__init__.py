"""Pure functions on tensors: no configuration, no I/O, no process group."""
