"""The adaptive KL coefficient: how strong the penalty has to be for the KL to stay at a target."""

from __future__ import annotations


def adapt_coefficient(
    coefficient: float, measured: float, *, target: float, num_samples: int, horizon_samples: int
) -> float:
    """One update of the proportional controller in log space.

    ``coefficient (1 + clip(measured / target - 1, -0.2, 0.2) num_samples / horizon_samples)``

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2, with the step size ``K_beta = 0.1`` written
    as ``num_samples / horizon_samples``, as TRL, verl and OpenRLHF do.

    Args:
        coefficient: The one that was used, >= 0.
        measured: Mean KL that was measured, nats, per token or per sample like the target.
        target: Mean KL that is wanted, > 0.
        num_samples: Samples that it was measured on.
        horizon_samples: Samples over which the coefficient changes by at most 20 percent.

    >>> round(adapt_coefficient(0.1, 0.5, target=0.1, num_samples=100, horizon_samples=1000), 6)
    0.102
    """
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * num_samples / horizon_samples)
