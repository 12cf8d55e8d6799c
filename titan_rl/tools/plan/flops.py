"""Floating-point operations of a step and of an iteration's completions. Pure arithmetic.

A multiplication and an addition count as two. Attention is counted without regard to causality, as TorchTitan
counts it for the model's utilisation, but over the tokens of a sample: packed samples do not attend to one
another.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.titan.architecture import Architecture
from titan_rl.titan.meta_model import ShardSizes, unit_of
from titan_rl.tools.plan.memory import Models
from titan_rl.tools.plan.run_facts import RunFacts
from titan_rl.trainers.batch_arithmetic import BatchPlan


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations over all ranks, if every sample is of full length.

    Attributes:
        training: Forward and backward passes of an optimiser step: policy and critic.
        recomputation: Of the forward pass in that step.
        scoring: Old, reference, critic and teacher passes of a step's samples; those of a reward model also
            of its greedy baselines.
        generation: Prompts and completions of an iteration, greedy baselines among them.
    """

    training: float
    recomputation: float
    scoring: float
    generation: float


def forward_flops_per_token(a: Architecture, sizes: ShardSizes, *, context: float) -> float:
    """One token's forward pass through every weight that it meets, and its attention.

    ``2 x active parameters + 2 x layers x heads x (query + value width) x context``, three times of which is
    what TorchTitan's ``get_nparams_and_flops`` counts for training, with a whole row for the context.

    Args:
        a: The model's architecture.
        sizes: The model's.
        context: Tokens that it attends to.
    """
    active = 0.0
    experts = next((x for x in a.experts if x is not None), None)
    for parameter in sizes.parameters:
        if unit_of(parameter.name) == "tok_embeddings" and not a.is_tied:
            continue  # a look-up
        is_routed = experts is not None and "routed_experts" in parameter.name
        active += parameter.numel * (experts.top_k / experts.num_experts if experts and is_routed else 1.0)
    return 2 * active + 2 * a.num_layers * a.num_heads * (a.qk_head_dim + a.v_head_dim) * context


def work(facts: RunFacts, models: Models, batch: BatchPlan) -> Work:
    """Count an optimiser step and an iteration's generation.

    A backward pass costs twice its forward pass (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). A
    completion's tokens attend to half of it on average, and to all of the prompt, which is computed once for
    its group and its greedy baseline. The critic is counted like the policy.

    Args:
        facts: The run.
        models: Sizes.
        batch: Counts.
    """
    a, policy = facts.architecture, models.policy
    per_token = forward_flops_per_token(a, policy, context=facts.sample_tokens)
    tokens = batch.tokens_per_step
    trained = 1 + facts.needs_critic
    again = {"none": 0.0, "selective": 0.5, "full": 1.0, "budget": 1.0 - facts.memory_budget}
    scorings = facts.needs_old + facts.needs_reference + facts.needs_critic
    prompt = facts.prompt_tokens * forward_flops_per_token(a, policy, context=facts.prompt_tokens / 2)
    mean_context = facts.prompt_tokens + facts.completion_tokens / 2
    completion = facts.completion_tokens * forward_flops_per_token(a, policy, context=mean_context)
    completions = batch.samples + batch.baselines
    return Work(
        training=3 * per_token * tokens * trained,
        recomputation=again[facts.recomputation] * per_token * tokens * trained,
        scoring=per_token * tokens * scorings + _other_models(facts, models, batch),
        generation=batch.prompts * prompt + completions * completion,
    )


def _other_models(facts: RunFacts, models: Models, batch: BatchPlan) -> float:
    """A step's passes of the teacher, and of the reward model, which scores baselines too."""
    total = 0.0
    if models.teacher is not None:
        architecture = models.teacher_architecture or facts.architecture
        each = forward_flops_per_token(architecture, models.teacher, context=facts.sample_tokens)
        total += each * batch.tokens_per_step
    if models.reward_model is not None:
        each = forward_flops_per_token(facts.architecture, models.reward_model, context=facts.sample_tokens)
        scored = batch.samples_per_step + batch.baselines / facts.steps_per_iteration
        total += each * scored * facts.sample_tokens
    return total
