"""Log-probabilities and entropy at a vocabulary of 152k: in chunks, against whole logits.

    python -m benchmarks.logprobs

The full path is what a plain loop does: all logits, ``log_softmax``, gather, entropy, backward. Both
give log-probabilities, entropy and the gradients of hidden states and output projection.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.paired import (
    Outputs,
    Side,
    check_equal,
    compare,
    parser,
    peak_bytes,
    report,
    summarise,
)
from titan_rl.functional.logprobs import chunked_logprobs

VOCABULARY = 151_936
TEMPERATURE = 0.8


class Case:
    """Hidden states, an output projection, targets, and what each token's gradient is."""

    def __init__(self, tokens: int, dim: int, *, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, dim, generator=generator).to(dtype).requires_grad_()
        self.weight = (torch.randn(VOCABULARY, dim, generator=generator) / dim**0.5).to(dtype)
        self.weight.requires_grad_()
        self.targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
        self.upstream = torch.randn(tokens, generator=generator)

    def _outputs(self, logprobs: torch.Tensor, entropy: torch.Tensor) -> Outputs:
        hidden, weight = torch.autograd.grad((logprobs * self.upstream).sum(), (self.hidden, self.weight))
        return {"logprobs": logprobs.detach(), "entropy": entropy, "hidden": hidden, "weight": weight}

    def full(self) -> Outputs:
        """All logits at once."""
        logits = F.linear(self.hidden, self.weight) / TEMPERATURE
        logps = logits.log_softmax(-1)
        logprobs = logps.gather(-1, self.targets[:, None]).squeeze(-1)
        with torch.no_grad():
            entropy = -(logps.exp() * logps).sum(-1)
        return self._outputs(logprobs, entropy)

    def chunked(self) -> Outputs:
        """As the trainer does it."""
        logprobs, entropy = chunked_logprobs(
            self.hidden, self.weight, self.targets, temperature=TEMPERATURE, with_entropy=True
        )
        assert entropy is not None  # noqa: S101
        return self._outputs(logprobs, entropy.detach())


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--dim", type=int, default=1024, help="width of the hidden states")
    options.add_argument("--only", choices=("time", "memory"), help="by default both")
    given = options.parse_args()
    case = Case(given.tokens, given.dim, dtype=torch.float32)
    facts = {"tokens": given.tokens, "vocabulary": VOCABULARY, "width": given.dim, "dtype": "fp32"}
    full, chunked = Side(name="full", run=case.full), Side(name="chunked", run=case.chunked)
    question = "log-probabilities, entropy and gradients"
    comparisons = []
    if given.only != "memory":
        comparisons.append(
            compare(
                question, baseline=full, candidate=chunked, pairs=given.pairs, target=1 / 1.1, facts=facts
            )
        )
    if given.only != "time":
        check_equal(case.full(), case.chunked())
        comparisons.append(
            summarise(
                question,
                baseline=("full", [peak_bytes(case.full)]),
                candidate=("chunked", [peak_bytes(case.chunked)]),
                quantity="peak bytes",
                target=4.0,
                facts=facts,
            )
        )
    report(f"logprobs_{given.only}" if given.only else "logprobs", comparisons, folder=given.out)


if __name__ == "__main__":
    main()
