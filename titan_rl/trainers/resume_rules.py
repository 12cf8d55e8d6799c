"""What a run that is resumed may have changed: every key is free, warned about, or refused.

The configuration that was in force when a checkpoint was saved lies in the checkpoint. What stands in no
file, such as the contents of the prompts, is compared in :mod:`titan_rl.resilience.state`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from titan_rl.errors import ConfigError

Verdict = Literal["free", "warned", "refused"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens when a key has changed.

    Attributes:
        verdict: Whether the run goes on, and whether it says so.
        why: In words that follow "because".
    """

    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class Change:
    """A key that differs from the checkpoint.

    Attributes:
        key: Dotted.
        old: In the checkpoint.
        new: In this start.
        rule: That of the key.
    """

    key: str
    old: Any
    new: Any
    rule: Rule


_NEXT = "it takes effect from the next iteration on"
_RESTORED = "the checkpoint restores it, so that a new value would have no effect"
_SPEED = "it changes speed and memory, and numbers by rounding at most"
_RECORDS = "it changes what is recorded, not what is learnt"
_CONTENTS = "the prompts are compared by their contents instead"

RULES: dict[str, Rule] = {
    "activation_checkpoint": Rule("free", _SPEED),
    "advantage": Rule("warned", _NEXT),
    "algorithm": Rule("warned", _NEXT),
    "batching": Rule("free", _SPEED),
    "checkpoint": Rule("free", "it says when and where to save"),
    "checkpoint.initial_load_path": Rule("warned", "the reference is loaded from there again"),
    "comm": Rule("free", _SPEED),
    "compile": Rule("free", _SPEED),
    "critic": Rule(
        "warned", "a critic that the checkpoint lacks cannot be restored, and one it has is dropped"
    ),
    "critic.clip_range": Rule("warned", _NEXT),
    "critic.lr_scheduler": Rule("warned", _NEXT),
    "critic.max_norm": Rule("warned", _NEXT),
    "critic.optimizer": Rule("refused", _RESTORED),
    "critic.optimizer.implementation": Rule("warned", _SPEED),
    "critic.optimizer.lr": Rule("warned", "it takes effect after the critic's first step"),
    "data": Rule("warned", _NEXT),
    "data.chat_template": Rule("free", _CONTENTS),
    "data.max_prompt_tokens": Rule("free", _CONTENTS),
    "data.mixture": Rule("refused", "the cursor counts its documents"),
    "data.shuffle": Rule("refused", "it decides which prompts the cursor has passed"),
    "data.source": Rule("free", _CONTENTS),
    "data.system_prompt": Rule("free", _CONTENTS),
    "data.too_long": Rule("free", _CONTENTS),
    "debug": Rule("free", _RECORDS),
    "debug.deterministic": Rule("warned", "the run is no longer repeatable bit for bit"),
    "debug.seed": Rule("refused", "it decides which prompts are drawn"),
    "dump_folder": Rule("free", "it says where the run is"),
    "evaluation": Rule("warned", "scores before and after the change cannot be compared"),
    "evaluation.interval_steps": Rule("free", _RECORDS),
    "evaluation.minimum_gain": Rule("free", _RECORDS),
    "generator": Rule("free", _SPEED),
    "generator.type": Rule("warned", "another engine draws other completions from the same seeds"),
    "lora": Rule("refused", "the adapters of a checkpoint belong to one table"),
    "loss": Rule("warned", _NEXT),
    "lr_scheduler": Rule("warned", "the rest of the schedule is another one"),
    "metrics": Rule("free", _RECORDS),
    "model": Rule("refused", "the tensors of a checkpoint belong to one model"),
    "model.allow_random_init": Rule("free", "the weights come from the checkpoint"),
    "model.attn_backend": Rule("free", _SPEED),
    "model.export": Rule("free", _RECORDS),
    "model.hf_assets_path": Rule("warned", "tokenizer and reference are read from there again"),
    "optimizer": Rule("refused", _RESTORED),
    "optimizer.implementation": Rule("warned", _SPEED),
    "optimizer.lr": Rule("warned", "it takes effect after the first step, which is made with the old one"),
    "parallelism": Rule("free", "checkpoints reshard, and prompts and seeds depend on no rank"),
    "profiler": Rule("free", _RECORDS),
    "reference": Rule("free", _SPEED),
    "refill": Rule("warned", _NEXT),
    "resilience": Rule("free", "it says when to save, to stop and to give up"),
    "reward": Rule("warned", _NEXT),
    "reward_model": Rule("warned", _NEXT),
    "reward_workers": Rule("free", _SPEED),
    "sampling": Rule("warned", _NEXT),
    "sampling.timeout_seconds": Rule("free", _SPEED),
    "shaping": Rule("warned", _NEXT),
    "teacher": Rule("warned", _NEXT),
    "teacher.offload_to_cpu": Rule("free", _SPEED),
    "training": Rule("warned", _NEXT),
    "training.disable_cuda_graphs": Rule("free", _SPEED),
    "training.enable_cpu_offload": Rule("free", _SPEED),
    "training.gc_debug": Rule("free", _RECORDS),
    "training.gc_freq": Rule("free", _SPEED),
    "training.steps": Rule(
        "warned", "a schedule that decays is laid out over it unless lr_scheduler.total_steps is set"
    ),
    "validation": Rule("free", _RECORDS),
    "weight_sync": Rule("free", "it bounds what is confirmed, not what is learnt"),
}
"""By key or table; the longest that fits counts."""


def rule_of(key: str) -> Rule:
    """The rule of a dotted key.

    Raises:
        KeyError: no table of the key has one.

    >>> [rule_of(key).verdict for key in ("optimizer.lr", "optimizer.betas", "reward.0.weight")]
    ['warned', 'refused', 'warned']
    """
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        rule = RULES.get(".".join(parts[:length]))
        if rule is not None:
            return rule
    raise KeyError(key)


def judge(differences: Iterable[tuple[str, Any, Any]]) -> list[Change]:
    """Judge what has changed, those that are free left out.

    Args:
        differences: From :func:`titan_rl.config.differences.diff`. A key that the checkpoint's configuration
            does not have came with a newer version and is left out.

    Raises:
        ConfigError: a key may not change; all such keys together.
    """
    changes = [Change(key, old, new, rule_of(key)) for key, old, new in differences if old is not None]
    refused = [change for change in changes if change.rule.verdict == "refused"]
    if refused:
        first = refused[0]
        others = "".join(f" So has {change.key} to stay {change.old!r}." for change in refused[1:])
        raise ConfigError(
            first.key,
            f"stay {first.old!r} when a run is resumed, because {first.rule.why}",
            first.new,
            f"Restore it, or choose another dump_folder for a new run.{others}",
        )
    return [change for change in changes if change.rule.verdict == "warned"]


def markdown() -> str:
    """The rules as a table, for docs/reliability.md."""
    rows = [f"| `{key}` | {rule.verdict} | {rule.why} |" for key, rule in sorted(RULES.items())]
    return "\n".join(["| key or table | if it changed | because |", "|---|---|---|", *rows])
