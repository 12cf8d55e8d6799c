"""The tables of an RL run that belong to no single component."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro
from annotated_types import Ge, Gt, Interval

from titan_rl.algorithms.registries import DEFAULT_ALGORITHM
from titan_rl.config.choice import Choice
from titan_rl.data.arithmetic import Arithmetic
from titan_rl.data.datasets import DATASETS
from titan_rl.resilience.watchdog import WatchdogSection
from titan_rl.titan.sharded_model import ReduceGradients


@dataclass(kw_only=True, slots=True)
class AlgorithmSection:
    """Table ``[algorithm]``."""

    # Suppressed: by the time tyro reads TorchTitan's command line, its defaults are in place.
    type: Annotated[str, tyro.conf.Suppress] = DEFAULT_ALGORITHM
    """A named composition, which sets the defaults of ``[advantage]`` and ``[loss]``, their ``type`` among
    them."""

    steps_per_iteration: Annotated[int, Ge(1)] = 1
    """Optimiser steps K on one batch of rollouts, each on a K-th of its groups."""

    old_logprobs: Literal["recompute", "generator"] = "recompute"
    """With more than one step: the old policy's log-probabilities are recomputed by the trainer, or taken
    from the generator while they agree with the trainer's on the first step (``max_mismatch``)."""

    max_mismatch: Annotated[float, Gt(0)] = 1e-3
    """Largest mean difference, in nats per token, at which the generator's log-probabilities are used; above
    it they are recomputed and a warning says so."""

    permute_rewards: bool = False
    """Control experiment: hand the rewards of each rank's rollouts to one another in a random order, before
    they are recorded. The held-out score must then not rise; if it does, something other than the reward
    teaches."""


@dataclass(kw_only=True, slots=True)
class DataSection:
    """Table ``[data]``."""

    source: Annotated[object, Choice(DATASETS)] = field(default_factory=Arithmetic.Config)
    """Where prompts come from: table ``[data.source]`` with ``type``."""

    prompts_per_iteration: Annotated[int, Ge(1)] = 32
    """Prompts of one iteration over all ranks; with ``sampling.group_size`` rollouts each."""

    system_prompt: str = ""
    """Put before every prompt as a system message; empty: none."""

    chat_template: Literal["auto", "on", "off"] = "auto"
    """Render with the tokenizer's chat template: if it has one, always, or never."""

    max_prompt_tokens: Annotated[int, Ge(1)] = 512
    """Longest prompt, in tokens after the chat template."""

    too_long: Literal["error", "skip"] = "error"
    """A longer prompt ends the run at start-up, or is left out and counted."""

    shuffle: bool = True
    """Draw each epoch in an order that depends on the seed and the epoch only."""


@dataclass(kw_only=True, slots=True)
class SamplingSection:
    """Table ``[sampling]``. The trainer scores under the same temperature."""

    group_size: Annotated[int, Ge(1)] = 8
    """Rollouts per prompt."""

    temperature: Annotated[float, Gt(0)] = 1.0
    """Logits are divided by it, in the generator and in the trainer."""

    max_tokens: Annotated[int, Ge(1)] = 256
    """Longest completion, in tokens."""

    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Must be 1 in training: a truncated distribution is not the policy's."""

    top_k: Annotated[int, Ge(0)] = 0
    """Must be 0 in training, for the same reason."""

    min_p: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Must be 0 in training, for the same reason."""

    timeout_seconds: Annotated[float, Gt(0)] = 1800.0
    """Deadline of one iteration's generation, and again of its rewards."""


@dataclass(kw_only=True, slots=True)
class BatchingSection:
    """Table ``[batching]``. Rows hold up to ``training.seq_len`` tokens."""

    pad_to: Literal["longest", "token_budget"] = "longest"
    """Length of a micro-batch's rows: its longest row, or always the budget (one shape, for compilation)."""

    reduce_gradients: ReduceGradients = "auto"
    """Add gradients up over ranks after every micro-batch, or once after the last, until when each rank keeps
    the whole gradient, and the whole weights between micro-batches, instead of its shard. ``"auto"``: after
    the last when the gradient takes at most 1 GiB. A pipeline waits for the last whatever stands here."""


@dataclass(kw_only=True, slots=True)
class RLBatchingSection(BatchingSection):
    """Table ``[batching]`` of an RL run."""

    share_prompts: Literal["auto", "on", "off"] = "auto"
    """Compute the prompt of a group once for all of its samples in a row, instead of once for each. The
    gradient is the same. ``"auto"``: where the attention of the model, and of a teacher, can do it."""

    skip_zero_advantages: bool = True
    """Leave samples with advantage 0 (groups of equal rewards) out of the forward-backward when no KL penalty
    would train them: their gradient is exactly 0. They still count where the loss is normalised, but the
    other ``loss/`` metrics are then means over the computed samples only."""


@dataclass(kw_only=True, slots=True)
class ReferenceSection:
    """Table ``[reference]``: the frozen model of the KL term, the policy as it was before the first step."""

    offload_to_cpu: bool = False
    """Keep its shards in host memory between uses. On a CPU there is nowhere to move them: refused."""


@dataclass(kw_only=True, slots=True)
class RewardModelSection:
    """Table ``[reward_model]``: a trained reward model that scores rollouts, beside ``[[reward]]`` tables.

    Held-out prompts are scored by the ``[[reward]]`` tables, and by the model when there are none.
    """

    path: str
    """The export of a run with ``trainer = "reward_model"``, or a ``step-N`` checkpoint of one whose
    architecture is the policy's."""

    weight: float = 1.0
    """Factor of its score in the total reward."""

    is_alone: bool = False
    """Whether training sees its score alone, so that the ``[[reward]]`` tables only measure."""


@dataclass(kw_only=True, slots=True)
class ResilienceSection:
    """Table ``[resilience]``, as every trainer has it."""

    grace_seconds: Annotated[float, Gt(0)] = 25.0
    """From SIGTERM or Ctrl-C until the ranks end, with a checkpoint if a safe point came in time. torchrun
    kills them after 30 s unless it is started with ``--shutdown-timeout``."""

    stop_after_minutes: Annotated[float, Ge(0)] = 0.0
    """Age of the process at which the run saves and ends (``time_limit``), before a batch system ends it.
    0: no limit."""

    max_failed_saves: Annotated[int, Ge(1)] = 3
    """So many checkpoints in a row that cannot be written end the run; until then training goes on."""

    keep_best: Annotated[int, Ge(0)] = 1
    """Checkpoints with the best held-out scores that are kept besides the latest
    ``checkpoint.keep_latest_k``."""

    bad_step: Literal["skip", "roll_back", "abort"] = "skip"
    """What happens when a gradient is NaN, infinite or a spike: the step is left out, or the run goes back to
    its newest checkpoint and on with other data, or it ends."""

    spike_factor: Annotated[float, Ge(0)] = 1000.0
    """A gradient is a spike when its norm is so many times the median of the last 64 applied steps, and above
    ``training.max_norm``. 0: never."""

    max_skipped_steps: Annotated[int, Ge(0)] = 3
    """The run ends after more skipped steps in a row (a bad gradient, or nothing to train on), and when it
    would go back to one checkpoint more often."""

    # Suppressed: TorchTitan's command line starts none.
    watchdog: Annotated[WatchdogSection | None, tyro.conf.Suppress] = field(default_factory=WatchdogSection)
    """Deadlines after which a rank that hangs is ended with the others; ``"none"``: no watchdog."""


@dataclass(kw_only=True, slots=True)
class RLResilienceSection(ResilienceSection):
    """Table ``[resilience]`` of an RL run."""

    max_failed_reward_fraction: Annotated[float, Interval(ge=0, le=1)] = 0.5
    """The run ends when a larger share of an iteration's rewards failed."""

    journal_parameters: bool = False
    """Put the SHA-256 of all weights, the critic's too, into the journal after every iteration. Each tensor
    is gathered once more for it."""
