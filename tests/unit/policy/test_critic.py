"""The critic on one rank of FSDP: its values, steps, statistics, weights to start from, and checkpoints."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.distributed import utils as dist_utils

from tests.unit.titan.tiny_models import load_titan, make_peer
from tests.unit.titan.trainer_fakes import one_part, one_rank
from titan_rl.batching.pack import pack
from titan_rl.errors import ConfigError
from titan_rl.functional.value import standard_deviation
from titan_rl.policy.critic import Critic, build_critic
from titan_rl.policy.value_loss import ClippedValueLoss, ValueInputs, value_statistics
from titan_rl.titan import device
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.sections import OptimizerSection
from titan_rl.titan.value_model import init_head, value_sibling
from titan_rl.types import Sample

device.install()

LENGTHS = (12, 5, 9, 3, 7, 11)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """What a trainer holds that the critic is built from."""
    directory = tmp_path_factory.mktemp("policy")
    make_peer("llama").save_pretrained(directory)
    backend, store = dist_utils.get_spmd_backend(), directory / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    trainer = one_rank(directory)
    trainer.policy = one_part(load_titan(directory))
    trainer.model_parts = trainer.policy.parts
    yield trainer
    dist.destroy_process_group()
    dist_utils.set_spmd_backend(backend)


def make_critic(trainer, *, seed=3, total_steps=100, loss=None, **options) -> Critic:
    options.setdefault("optimizer", OptimizerSection(lr=2e-3))
    return build_critic(
        Critic.Config(**options),
        trainer,
        policy=trainer.policy,
        collectives=Collectives(trainer.parallel_dims, torch.device("cpu")),
        seed=seed,
        total_steps=total_steps,
        loss=loss,
    )


def samples(seed=0, lengths=LENGTHS, vocab=4):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(vocab, (length,), generator=generator).tolist()
        made.append(Sample(tokens, [i >= 2 for i in range(length)], [0.0] * length, 0.0, index, 0, False))
    return made


def batches(seed=0, lengths=LENGTHS, rows=2):
    return pack(samples(seed, lengths), [0.0] * len(lengths), token_budget=16, rows_per_micro_batch=rows)


@dataclass
class Data:
    """Micro-batches with returns: how many of the tokens seen so far were a 3, in some unit."""

    seed: int = 0
    lengths: tuple[int, ...] = LENGTHS
    scale: float = 1.0
    shift: float = 0.0
    rows: int = 2

    def __post_init__(self):
        self.micro_batches = batches(self.seed, self.lengths, self.rows)
        self.returns = [torch.where(m.loss_mask, self._counts(m), 0.0) for m in self.micro_batches]
        self.count = sum(m.num_loss_tokens for m in self.micro_batches)

    def _counts(self, micro_batch):
        counts = torch.zeros(micro_batch.input_ids.shape)
        for row, lengths in enumerate(micro_batch.document_lengths):
            start = 0
            for length in lengths:
                is_three = micro_batch.input_ids[row, start : start + length] == 3
                counts[row, start : start + length] = is_three.cumsum(0).float()
                start += length
        return self.shift + self.scale * counts

    def step(self, critic, *, old_values=None, returns=None):
        return critic.train_step(
            self.micro_batches,
            returns=self.returns if returns is None else returns,
            old_values=critic(self.micro_batches) if old_values is None else old_values,
            num_loss_tokens=self.count,
        )

    def error(self, critic):
        """Mean squared error at the trained tokens, in units of reward."""
        found = zip(self.micro_batches, critic(self.micro_batches), self.returns, strict=True)
        return sum(float((v - r)[m.loss_mask].square().sum()) for m, v, r in found) / self.count


def weights(critic):
    return {name: p.full_tensor().clone() for name, p in critic.model.parts[0].named_parameters()}


# ------------------------------------------------------------------------------------------------- values


def test_a_value_has_seen_the_tokens_up_to_its_own_and_none_after(trainer):
    critic = make_critic(trainer, head_init_std=0.5)
    (micro_batch, *_) = batches(lengths=(10,))
    changed = micro_batch.input_ids.clone()
    changed[0, 6] += 1
    before, after = critic([micro_batch, replace(micro_batch, input_ids=changed)])
    assert before.dtype == torch.float32
    assert torch.equal(before[0, :6], after[0, :6])
    assert (before[0, 6:] != after[0, 6:]).all()  # the value after the last token among them
    assert not before.requires_grad


def test_values_stand_at_real_tokens_alone(trainer):
    critic = make_critic(trainer, head_init_std=0.5)
    seen = 0
    for micro_batch, values in zip(batches(), critic(batches()), strict=True):
        real = micro_batch.sample_index >= 0
        assert values[real].ne(0).all()
        assert values[~real].eq(0).all()
        seen += int((~real).sum())
    assert seen > 0


def test_without_a_deviation_every_value_starts_at_zero(trainer):
    assert all(values.eq(0).all() for values in make_critic(trainer)(batches()))


# ------------------------------------------------------------------------------------------------ training


def test_the_critic_learns_how_many_tokens_of_a_kind_it_has_seen(trainer):
    critic = make_critic(trainer, clip_range=0.0, optimizer=OptimizerSection(lr=3e-3))
    train, held_out = (Data(seed=seed, lengths=LENGTHS * 6, rows=40) for seed in (0, 1))
    before, held_out_before = train.error(critic), held_out.error(critic)
    for _ in range(60):
        result = train.step(critic)
        assert result.is_applied
    assert train.error(critic) < before / 50
    assert held_out.error(critic) < held_out_before / 10
    assert result.metrics["critic/explained_variance"] > 0.9
    assert critic.applied_steps == 60


def test_returns_far_from_zero_are_learnt_with_normalisation_and_not_without(trainer):
    train = Data(lengths=LENGTHS * 6, rows=40, scale=100.0, shift=3000.0)
    masks = [m.loss_mask for m in train.micro_batches]
    returns = torch.cat([r[mask] for r, mask in zip(train.returns, masks, strict=True)])
    errors = []
    for normalise in (True, False):
        critic = make_critic(
            trainer, normalise_values=normalise, clip_range=0.2, optimizer=OptimizerSection(lr=3e-3)
        )
        for _ in range(60):
            old = critic(train.micro_batches)
            critic.observe(train.returns, masks)
            train.step(critic, old_values=old)
        errors.append(train.error(critic) / float(returns.var()))
    assert errors[0] < 0.1
    assert errors[1] > 100


def test_a_gradient_of_the_loss_is_that_of_the_formula(trainer):
    critic = make_critic(trainer, head_init_std=0.5, clip_range=0.1)
    data = Data()
    values = critic(data.micro_batches)
    old = [v + 0.3 * (m.positions % 3 - 1) for v, m in zip(values, data.micro_batches, strict=True)]
    parts = critic.accumulate(
        data.micro_batches, returns=data.returns, old_values=old, num_loss_tokens=data.count
    )
    (model,) = critic.model.parts
    got = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total, clipped = torch.zeros(()), 0
    for micro_batch, target, start in zip(data.micro_batches, data.returns, old, strict=True):
        with trainer.train_context():
            values = critic.model.forward(micro_batch).states.squeeze(-1)
            near = torch.maximum(torch.minimum(values, start + 0.1), start - 0.1)
            larger = torch.maximum((values - target) ** 2, (near - target) ** 2)
            loss = 0.5 * larger[micro_batch.loss_mask].sum() / data.count
            loss.backward()
        total += loss.detach()
        moved = (near - target) ** 2 > (values - target) ** 2
        clipped += int(moved[micro_batch.loss_mask].sum())
    assert 0 < clipped < data.count
    assert sum(float(p["loss"]) for p in parts) == pytest.approx(float(total), rel=1e-6)
    assert sum(float(p["clip_fraction"]) for p in parts) == pytest.approx(clipped / data.count, rel=1e-6)
    for name, parameter in model.named_parameters():
        expected = parameter.grad.full_tensor()
        assert (got[name] - expected).norm() <= 1e-5 * expected.norm() + 1e-8
        assert expected.norm() > 1e-6


def test_without_a_bound_no_value_is_clipped():
    values, old, returns = (torch.tensor([[x]]) for x in (5.0, 0.0, 6.0))
    inputs = ValueInputs(
        values=values, returns=returns, old_values=old, loss_mask=torch.ones(1, 1) > 0, num_loss_tokens=2
    )
    loss, metrics = ClippedValueLoss(0.0)(inputs)
    assert loss.item() == 0.25
    assert metrics["clip_fraction"].item() == 0.0
    loss, metrics = ClippedValueLoss(0.5)(inputs)
    assert loss.item() == 0.25 * 5.5**2
    assert metrics["clip_fraction"].item() == 0.5


def test_a_large_gradient_is_scaled_down_to_the_norm(trainer):
    critic, data = make_critic(trainer, head_init_std=0.5, max_norm=0.01), Data(scale=5.0)
    result = data.step(critic)
    assert result.grad_norm > 1.0
    state = critic.optimizers.state_dict()
    first = [v.full_tensor() for key, v in state.items() if key.endswith("exp_avg")]
    # After one step the first moment is a tenth of the gradient that Adam saw.
    assert math.sqrt(sum(float(v.square().sum()) for v in first)) == pytest.approx(0.001, rel=1e-3)


def test_the_schedule_is_its_own_and_waits_while_steps_are_skipped(trainer):
    schedule = LRSchedulersContainer.Config(warmup_steps=4, decay_ratio=0.0)
    critic, data = make_critic(trainer, head_init_std=0.5, lr_scheduler=schedule), Data()
    before = weights(critic)
    bad = [r.clone() for r in data.returns]
    bad[0][data.micro_batches[0].loss_mask] = torch.nan
    rates, applied = [], []
    for returns in (bad, None, bad, None):
        result = data.step(critic, returns=returns)
        rates.append(result.metrics["critic/lr"])
        applied.append(result.is_applied)
        if len(applied) == 1:
            assert all(torch.equal(value, before[name]) for name, value in weights(critic).items())
            assert math.isnan(result.grad_norm)
    assert applied == [False, True, False, True]
    assert rates == pytest.approx([5e-4, 5e-4, 1e-3, 1e-3])
    assert (critic.applied_steps, critic.skipped_steps) == (2, 2)
    assert all(value.isfinite().all() for value in weights(critic).values())


def test_a_loss_of_the_users_takes_the_place_of_ours(trainer):
    def absolute_error(inputs):
        error = torch.where(inputs.loss_mask, (inputs.values - inputs.returns).abs(), 0.0)
        loss = error.sum() / inputs.num_loss_tokens
        return loss, {"absolute_error": loss.detach()}

    critic, data = make_critic(trainer, loss=absolute_error), Data()
    result = data.step(critic)
    expected = sum(
        float(r[m.loss_mask].abs().sum()) for m, r in zip(data.micro_batches, data.returns, strict=True)
    )
    assert result.metrics["critic/absolute_error"] == pytest.approx(expected / data.count, rel=1e-6)
    assert "critic/loss" not in result.metrics


def test_the_policy_warms_up_for_the_iterations_that_are_asked_for(trainer):
    critic = make_critic(trainer, warmup_iterations=2)
    assert [critic.is_warming_up(iteration) for iteration in range(4)] == [True, True, False, False]
    assert not make_critic(trainer).is_warming_up(0)
    assert make_critic(trainer, warmup_iterations="all").is_warming_up(10**9)


# ---------------------------------------------------------------------------------- statistics and metrics


def test_metrics_are_means_over_the_trained_tokens_in_units_of_reward(trainer):
    for options in ({}, {"normalise_values": True}):
        critic, data = make_critic(trainer, head_init_std=0.5, **options), Data(scale=3.0, shift=-4.0)
        masks = [m.loss_mask for m in data.micro_batches]
        old = critic(data.micro_batches)
        critic.observe(data.returns, masks)
        if options:
            old = critic(data.micro_batches)
            critic.observe([], [])  # as at the start of the next iteration, without new returns
        result = data.step(critic, old_values=old)
        values, returns = (
            torch.cat([x[mask] for x, mask in zip(of, masks, strict=True)]).double()
            for of in (old, data.returns)
        )
        explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
        metrics = result.metrics
        assert metrics["critic/value"] == pytest.approx(float(values.mean()), rel=1e-4)
        assert metrics["critic/return"] == pytest.approx(float(returns.mean()), rel=1e-6)
        assert metrics["critic/explained_variance"] == pytest.approx(float(explained), rel=1e-4)
        assert metrics["critic/grad_norm"] == result.grad_norm > 0


def test_statistics_of_returns_that_do_not_vary_explain_nothing(trainer):
    critic, data = make_critic(trainer), Data(scale=0.0, shift=1.0)
    assert math.isnan(data.step(critic).metrics["critic/explained_variance"])


def test_statistics_are_sums_over_the_global_count():
    inputs = ValueInputs(
        values=torch.tensor([[1.0, 2.0, 9.0]]),
        returns=torch.tensor([[3.0, 5.0, 9.0]]),
        old_values=torch.zeros(1, 3),
        loss_mask=torch.tensor([[True, True, False]]),
        num_loss_tokens=4,
    )
    found = {name: value.item() for name, value in value_statistics(inputs).items()}
    assert found == {"value": 0.75, "return": 2.0, "return_square": 8.5, "error_square": 3.25}


@pytest.mark.parametrize("has_been_observed", [False, True])
def test_new_statistics_change_no_value_and_training_goes_on_in_their_units(trainer, has_been_observed):
    """But the first statistics of a head that nobody has trained do: its values become the mean."""
    critic, data = make_critic(trainer, head_init_std=0.5, normalise_values=True), Data(scale=7.0, shift=40.0)
    if has_been_observed:
        other = Data(seed=1, shift=5.0)
        critic.observe(other.returns, [m.loss_mask for m in other.micro_batches])
    masks = [m.loss_mask for m in data.micro_batches]
    before = critic(data.micro_batches)
    critic.observe(data.returns, masks)
    after = critic(data.micro_batches)
    mean, deviation = float(critic.moments.mean), float(standard_deviation(critic.moments))
    values, moved, returns = (
        torch.cat([x[mask] for x, mask in zip(of, masks, strict=True)]).double()
        for of in (before, after, data.returns)
    )
    if has_been_observed:
        torch.testing.assert_close(moved, values, rtol=1e-5, atol=2e-5)
    else:
        torch.testing.assert_close(moved, mean + deviation * values, rtol=1e-5, atol=2e-5)
    parts = critic.accumulate(
        data.micro_batches, returns=data.returns, old_values=before, num_loss_tokens=data.count
    )
    # The value has not moved away from the old one, so nothing is clipped.
    assert sum(float(p["clip_fraction"]) for p in parts) == 0.0
    expected = 0.5 * ((moved - returns) / deviation).square().mean()
    assert sum(float(p["loss"]) for p in parts) == pytest.approx(float(expected), rel=1e-4)


def test_a_head_that_was_loaded_keeps_its_values_from_the_first_statistics_on(trainer, tmp_path):
    reward_model = value_sibling(trainer, trainer.policy)
    init_head(reward_model, std=0.5, seed=1)
    dcp.save(reward_model.state_dict(), checkpoint_id=str(tmp_path / "step-9"))
    critic = make_critic(trainer, initial_load_path=str(tmp_path / "step-9"), normalise_values=True)
    data = Data(scale=7.0, shift=40.0)
    before = critic(data.micro_batches)
    critic.observe(data.returns, [m.loss_mask for m in data.micro_batches])
    assert critic.moments.count == data.count
    for a, b in zip(before, critic(data.micro_batches), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5)


def test_statistics_run_over_iterations_and_leave_out_what_is_not_finite(trainer):
    critic = make_critic(trainer, normalise_values=True)
    first, second = Data(seed=0, scale=2.0), Data(seed=1, shift=5.0)
    for data in (first, second):
        critic.observe(data.returns, [m.loss_mask for m in data.micro_batches])
    every = torch.cat(
        [r[m.loss_mask] for d in (first, second) for m, r in zip(d.micro_batches, d.returns, strict=True)]
    ).double()
    moments = critic.moments
    assert moments.count == len(every)
    assert float(moments.mean) == pytest.approx(float(every.mean()), rel=1e-9)
    assert float(moments.squared_deviations / (moments.count - 1)) == pytest.approx(
        float(every.var()), rel=1e-9
    )
    bad = [torch.where(m.loss_mask, torch.inf, 0.0) for m in first.micro_batches]
    critic.observe(bad, [m.loss_mask for m in first.micro_batches])
    assert critic.moments == moments


def test_without_normalisation_returns_are_not_observed(trainer):
    critic, data = make_critic(trainer, head_init_std=0.5), Data(shift=5.0)
    before = weights(critic)
    critic.observe(data.returns, [m.loss_mask for m in data.micro_batches])
    assert critic.moments.count == 0
    assert all(torch.equal(value, before[name]) for name, value in weights(critic).items())


# ----------------------------------------------------------------------- where it starts, and checkpoints


def test_it_starts_from_the_policy_or_from_the_checkpoint_that_is_named(trainer, tmp_path):
    (policy,) = trainer.policy.parts
    plain = make_critic(trainer, head_init_std=0.5)
    backbone = {name: p.detach() for name, p in policy.named_parameters() if "lm_head" not in name}
    assert len(backbone) >= 19
    assert all(torch.equal(weights(plain)[name], value) for name, value in backbone.items())

    reward_model = value_sibling(trainer, trainer.policy)
    with torch.no_grad():
        for parameter in reward_model.parameters():
            parameter.add_(0.25)
    dcp.save(reward_model.state_dict(), checkpoint_id=str(tmp_path / "reward" / "step-9"))
    loaded = weights(make_critic(trainer, initial_load_path=str(tmp_path / "reward" / "step-9")))
    for name, parameter in reward_model.parts[0].named_parameters():
        assert torch.equal(loaded.pop(name), parameter.full_tensor())
    assert loaded.keys() == {"lm_head.bias"}
    assert loaded["lm_head.bias"].eq(0).all()

    dcp.save(dict(policy.state_dict()), checkpoint_id=str(tmp_path / "policy" / "step-9"))
    path = str(tmp_path / "policy" / "step-9")
    of_policy = weights(make_critic(trainer, initial_load_path=path, head_init_std=0.5))
    assert all(torch.equal(of_policy[name], value) for name, value in weights(plain).items())


def test_a_path_to_nothing_is_refused_by_its_key(trainer, tmp_path):
    with pytest.raises(ConfigError, match=r"critic\.initial_load_path must be a TorchTitan checkpoint"):
        make_critic(trainer, initial_load_path=str(tmp_path / "step-1"))


class NoData:
    """A data loader without a state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def manager(trainer, folder) -> CheckpointManager:
    """TorchTitan's checkpointer of a run, as its trainer builds it."""
    parts = trainer.model_parts
    optimizers = default_adamw(1e-3).build(model_parts=parts)
    return CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0).build(
        dataloader=NoData(),
        model_parts=parts,
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=10),
        states={},
        sd_adapter=None,
        base_folder=str(folder),
    )


def test_a_run_resumed_from_its_checkpoint_has_the_same_critic_bit_for_bit(trainer, tmp_path):
    options = {"head_init_std": 0.5, "normalise_values": True}
    schedule = LRSchedulersContainer.Config(warmup_steps=5, decay_ratio=0.0)
    data = Data(scale=3.0, shift=2.0)
    masks = [m.loss_mask for m in data.micro_batches]

    def iterate(critic):
        critic.observe(data.returns, masks)
        return data.step(critic).grad_norm

    critic = make_critic(trainer, lr_scheduler=schedule, **options)
    checkpointer = manager(trainer, tmp_path)
    checkpointer.states["critic"] = critic
    iterate(critic)
    data.step(critic, returns=[torch.full_like(r, torch.nan) for r in data.returns])
    iterate(critic)
    checkpointer.save(2)
    saved = weights(critic)
    uninterrupted = [iterate(critic) for _ in range(2)]

    resumed = make_critic(trainer, seed=4, lr_scheduler=schedule, **options)
    checkpointer = manager(trainer, tmp_path)
    checkpointer.states["critic"] = resumed
    assert not torch.equal(weights(resumed)["lm_head.weight"], saved["lm_head.weight"])
    checkpointer.load()
    assert all(torch.equal(value, saved[name]) for name, value in weights(resumed).items())
    assert (resumed.applied_steps, resumed.skipped_steps, int(resumed.moments.count)) == (
        2,
        1,
        2 * data.count,
    )
    assert [iterate(resumed) for _ in range(2)] == uninterrupted
    end = weights(critic)
    assert all(torch.equal(value, end[name]) for name, value in weights(resumed).items())
    assert not any(torch.equal(end[name], value) for name, value in saved.items())
    assert resumed.moments == critic.moments
    for a, b in zip(resumed.lr_schedulers, critic.lr_schedulers, strict=True):
        assert a.get_last_lr() == b.get_last_lr()
