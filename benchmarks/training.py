"""Work that the training side leaves out: padding, repeated prompts, passes and rows without effect.

    python -m benchmarks.training
    python -m benchmarks.training shared_prompts --pairs 11

A policy of about 10M parameters on one rank; each comparison gives the gradients of one step, equal within
1e-5. "Passes" starts at scored rollouts, as :class:`titan_rl.trainers.batch_maker.BatchMaker` gets them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from benchmarks.paired import Comparison, Outputs, Side, compare, parser, report
from benchmarks.small_run import SmallRun, log_normal_lengths, make_groups, one_rank
from titan_rl.algorithms.preset import derive_needs
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import pack
from titan_rl.rollout.samples import to_samples
from titan_rl.rollout.source import Taken
from titan_rl.titan.device import install
from titan_rl.trainers.batch_maker import BatchMaker
from titan_rl.trainers.optimization import StepBatch, align_ranks
from titan_rl.types import Sample

GROUP_SIZE = 8


def packing(pairs: int) -> Comparison:
    """Packed rows against rows of one sample each, filled up to the longest of their micro-batch."""
    row_tokens = 1024
    run = SmallRun(loss__kl__coefficient=0.0, training__seq_len=row_tokens, data__max_prompt_tokens=16)
    lengths = log_normal_lengths(16, median=64, sigma=0.9, longest=512)
    groups = make_groups([(16, lengths[i : i + GROUP_SIZE]) for i in range(0, 16, GROUP_SIZE)])
    samples = to_samples(groups)
    advantages = _advantages(samples)
    rows = 8
    padded = [
        _padded(samples[i : i + rows], advantages[i : i + rows], first=i)
        for i in range(0, len(samples), rows)
    ]
    packed = pack(samples, advantages, token_budget=row_tokens, rows_per_micro_batch=1)
    return compare(
        "packed against padded rows: gradients of a step",
        baseline=_side("padded", run, samples, lambda: padded),
        candidate=_side(
            "packed",
            run,
            samples,
            lambda: pack(samples, advantages, token_budget=row_tokens, rows_per_micro_batch=1),
        ),
        pairs=pairs,
        target=1.8,
        facts={
            "samples": len(samples),
            "completions": "log-normal, median 64, sigma 0.9, at most 512",
            "padding": f"{_padding(padded):.0%} and {_padding(packed):.0%}",
        },
    )


def shared_prompts(pairs: int) -> Comparison:
    """A group's prompt computed once for all its samples, against once for each."""
    prompt, completion, num_groups = 512, 64, 1
    run = SmallRun(loss__kl__coefficient=0.0, training__seq_len=4608, data__max_prompt_tokens=prompt)
    samples = to_samples(make_groups([(prompt, [completion] * GROUP_SIZE)] * num_groups))
    advantages = _advantages(samples)

    def packed(share_prompts: bool) -> Callable[[], list[MicroBatch]]:
        return lambda: pack(
            samples, advantages, token_budget=4608, rows_per_micro_batch=1, share_prompts=share_prompts
        )

    tokens = [sum(m.num_tokens for m in packed(share)()) for share in (False, True)]
    return compare(
        "one pass over a group's prompt against one for each sample: gradients of a step",
        baseline=_side("repeated", run, samples, packed(False)),
        candidate=_side("shared", run, samples, packed(True)),
        pairs=pairs,
        target=2.5,
        facts={
            "prompt tokens": prompt,
            "completion tokens": completion,
            "group": GROUP_SIZE,
            "groups": num_groups,
            "tokens computed": f"{tokens[0]} and {tokens[1]}",
        },
    )


def passes(pairs: int) -> Comparison:
    """What a step of GRPO without KL needs, against reference and old passes and rows of advantage 0."""
    options = {"loss__kl__coefficient": 0.0, "training__seq_len": 2048, "data__max_prompt_tokens": 64}
    run = SmallRun(**options)
    lengths = log_normal_lengths(16, median=120, sigma=0.6, longest=512)
    groups = make_groups([(32, lengths[i : i + 4]) for i in range(0, 16, 4)], equal_rewards=(1,))
    needs = derive_needs(run.advantage, run.loss_fn, steps_per_iteration=1)
    everything = dataclasses.replace(needs, old=True, reference=True)
    all_rows = dataclasses.replace(
        run.config, batching=dataclasses.replace(run.config.batching, skip_zero_advantages=False)
    )
    makers = {
        "all passes": BatchMaker(run.trainer(needs=everything, config=all_rows)),
        "needed passes": BatchMaker(run.trainer(needs=needs)),
    }

    def side(name: str) -> Side:
        def work() -> Outputs:
            batches = makers[name].make(Taken(groups=list(groups), dropped=[]))
            return run.gradients(batches) | {
                "samples": batches[0].num_samples,
                "tokens": batches[0].num_loss_tokens,
            }

        return Side(name=name, run=work)

    return compare(
        "no old, no reference pass, no rows of equal rewards: from scored rollouts to gradients",
        baseline=side("all passes"),
        candidate=side("needed passes"),
        pairs=pairs,
        target=1.4,
        facts={"samples": 16, "groups of equal rewards": "1 of 4", "coefficient of the KL": 0},
    )


def _padding(micro_batches: Sequence[MicroBatch]) -> float:
    positions = sum(m.input_ids.numel() for m in micro_batches)
    return 1.0 - sum(m.num_tokens for m in micro_batches) / positions


def _advantages(samples: Sequence[Sample]) -> list[float]:
    return [1.0 if sample.reward else -1.0 for sample in samples]


def _side(
    name: str, run: SmallRun, samples: Sequence[Sample], micro_batches: Callable[[], list[MicroBatch]]
) -> Side:
    def work() -> Outputs:
        return run.gradients([_batch(run, samples, micro_batches())])

    return Side(name=name, run=work)


def _batch(run: SmallRun, samples: Sequence[Sample], micro_batches: Sequence[MicroBatch]) -> StepBatch:
    return align_ranks(
        micro_batches,
        num_samples=len(samples),
        collectives=run.collectives,
        device=torch.device("cpu"),
    )


def _padded(samples: Sequence[Sample], advantages: Sequence[float], *, first: int) -> MicroBatch:
    """One sample a row, all rows of a micro-batch as long as the longest."""
    longest = max(len(sample.token_ids) for sample in samples)
    rows = [
        pack([s], [a], token_budget=longest, rows_per_micro_batch=1, pad_to="token_budget")[0]
        for s, a in zip(samples, advantages, strict=True)
    ]
    names = [
        f.name for f in dataclasses.fields(MicroBatch) if f.name not in ("sample_index", "document_lengths")
    ]
    index = torch.cat([row.sample_index for row in rows])
    numbers = torch.arange(first, first + len(rows))[:, None]
    return MicroBatch(
        **{name: torch.cat([getattr(row, name) for row in rows]) for name in names},
        sample_index=torch.where(index >= 0, numbers, -1),
        document_lengths=[row.document_lengths[0] for row in rows],
    )


BENCHMARKS = {"packing": packing, "shared_prompts": shared_prompts, "passes": passes}


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="by default all")
    given = options.parse_args()
    install()
    for name in given.names or BENCHMARKS:
        with one_rank():
            report(f"training_{name}", [BENCHMARKS[name](given.pairs)], folder=given.out)


if __name__ == "__main__":
    main()
