"""Whether a name of another package exists. Imports nothing else: a process that loads vLLM runs it."""

import importlib
import inspect
import re
from importlib.util import find_spec


def exists(module_name: str, name: str) -> bool:
    """A module's attribute, a submodule, or an attribute of a class, declared or set on its instances."""
    try:
        target = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return False
    for part in name.split("."):
        if isinstance(target, type) and not hasattr(target, part):
            return any(
                part in inspect.get_annotations(cls)
                or re.search(rf"self\.{part}\b([^=\n(]*=|,\n)", inspect.getsource(cls))
                for cls in target.__mro__
                if cls.__module__.startswith(("torchtitan", "torch.distributed.pipelining", "vllm"))
            )
        if not hasattr(target, part):
            return hasattr(target, "__path__") and find_spec(f"{module_name}.{name}") is not None
        target = getattr(target, part)
    return True
