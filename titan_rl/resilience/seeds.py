"""Seeds derived from names, so that no order of events and no world size can change them."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on the parts alone.

    Args:
        parts: What the seed is for, outermost first, for example run seed, prompt id, sample index, turn.

    Returns:
        An integer in [0, 2**63).

    >>> derive_seed(1, "arithmetic/12+30", 0, 0) == derive_seed(1, "arithmetic/12+30", 0, 0)
    True
    >>> derive_seed(1, "a", 0) == derive_seed(1, "a", 1)
    False
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
