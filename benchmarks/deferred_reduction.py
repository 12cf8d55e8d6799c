"""Gradients added up over ranks once per step, against after every micro-batch, over gloo.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.deferred_reduction

Two FSDP ranks, a policy of about 10M parameters, 8 micro-batches each. The gate compares whole gradients.
"""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from benchmarks.paired import Outputs, Side, compare, parser, report
from benchmarks.small_run import SmallRun, make_groups
from titan_rl.batching.pack import pack
from titan_rl.rollout.samples import to_samples
from titan_rl.titan.device import install
from titan_rl.titan.sharded_model import ReduceGradients
from titan_rl.trainers.optimization import align_ranks

MICRO_BATCHES = 8


def main() -> None:
    """Measure on all ranks; the first one prints and writes."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    given = options.parse_args()
    install()
    dist.init_process_group("gloo")
    run = SmallRun(
        loss__kl__coefficient=0.0, training__seq_len=given.tokens, data__max_prompt_tokens=given.tokens // 4
    )
    samples = to_samples(
        make_groups(
            [(given.tokens // 4, [given.tokens // 4] * 4)] * (MICRO_BATCHES // 2), seed=dist.get_rank()
        )
    )
    draw = random.Random(dist.get_rank())
    micro_batches = pack(
        samples,
        [draw.choice([-1.0, 1.0]) for _ in samples],
        token_budget=given.tokens,
        rows_per_micro_batch=1,
    )
    batch = align_ranks(
        micro_batches, num_samples=len(samples), collectives=run.collectives, device=torch.device("cpu")
    )

    def side(name: str, when: ReduceGradients) -> Side:
        def work() -> Outputs:
            run.policy.reduce_gradients(when)
            return run.gradients([batch])

        return Side(name=name, run=work, prepare=dist.barrier)

    comparison = compare(
        "one reduction of gradients per step against one per micro-batch: gradients of a step",
        baseline=side("every micro-batch", "every_micro_batch"),
        candidate=side("last micro-batch", "last_micro_batch"),
        pairs=given.pairs,
        target=1.2,
        facts={"micro-batches": len(batch.micro_batches), "tokens of each": given.tokens, "ranks": 2},
    )
    if dist.get_rank() == 0:
        report("deferred_reduction", [comparison], folder=given.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
