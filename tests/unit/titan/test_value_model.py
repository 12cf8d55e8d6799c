"""A value model is the policy's backbone with a scalar head, whatever the policy ties or computes in."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.unit.titan.tiny_models import load_titan, make_peer, tokens
from tests.unit.titan.trainer_fakes import one_part, one_rank
from titan_rl.errors import ConfigError
from titan_rl.policy.reward_scorer import token_values
from titan_rl.titan import device
from titan_rl.titan.hf_config import spec_from_hf
from titan_rl.titan.value_model import (
    HEAD,
    build_value_model,
    copy_backbone,
    init_head,
    load_value_checkpoint,
    rescale_head,
    value_config,
    value_spec,
)

device.install()

MODELS = [("llama", False), ("llama", True), ("qwen3", False), ("qwen3", True)]


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    """A process group of this process alone, for FSDP."""
    backend = dist_utils.get_spmd_backend()
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    dist_utils.set_spmd_backend(backend)


def build(directory: Path, *, ac_config=None, head_bias=False, **training):
    trainer = one_rank(directory, **training)
    spec, config = trainer.config.model_spec, trainer.model_config
    model = build_value_model(trainer, spec, config, ac_config=ac_config, head_bias=head_bias)
    return model, trainer.train_context


def values_of(model, context, ids):
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    with context():
        return token_values(model, model.forward(SimpleNamespace(input_ids=ids, positions=positions)))


def hidden_states(policy, ids):
    policy._skip_lm_head = True
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    with torch.no_grad():
        return policy(ids, positions, policy.get_attention_masks(positions))


@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_values_are_the_policys_last_hidden_states_times_the_head(tmp_path, kind, tied):
    make_peer(kind, tie_word_embeddings=tied).save_pretrained(tmp_path)
    policy = load_titan(tmp_path)
    model, context = build(tmp_path)
    copy_backbone(one_part(policy), model)
    init_head(model, std=0.5, seed=3)
    ids = tokens(40)
    head = model.head.weight.full_tensor()
    expected = (hidden_states(policy, ids) @ head.T).squeeze(-1)
    values = values_of(model, context, ids)
    assert head.shape == (1, 48)
    assert expected.std() > 0.1
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    assert values.dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_the_policys_configuration_stays_and_the_value_models_ties_nothing(tmp_path, tied):
    make_peer("llama", tie_word_embeddings=tied).save_pretrained(tmp_path)
    spec = spec_from_hf(tmp_path)
    other = value_spec(spec)
    assert (spec.model.enable_weight_tying, spec.model.lm_head.out_features) == (tied, 96)
    assert (other.model.enable_weight_tying, other.model.lm_head.out_features) == (False, 1)
    assert other.model.layers is not spec.model.layers
    model = value_config(spec.model).build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        model.init_weights(buffer_device=None)
    assert all(parameter.isfinite().all() for parameter in model.parameters())  # a tied embedding is skipped
    assert model.lm_head.weight.eq(0).all()
    assert model.tok_embeddings.weight.std() > 0


def test_training_the_value_model_leaves_the_policy_alone_and_reaches_every_weight(tmp_path):
    make_peer("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    policy = load_titan(tmp_path)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    model, context = build(tmp_path, ac_config=FullAC.Config())
    copy_backbone(one_part(policy), model)
    init_head(model, std=0.5, seed=3)
    ids = tokens(30)
    values_of(model, context, ids).square().mean().backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.parts[0].named_parameters()}
    assert len(gradients) == 25
    assert all(gradient.norm() > 1e-6 for gradient in gradients.values())
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())


def test_activation_checkpointing_changes_no_gradient(tmp_path):
    make_peer("llama").save_pretrained(tmp_path)
    policy, ids, found = load_titan(tmp_path), tokens(30), []
    for ac_config in (None, FullAC.Config()):
        model, context = build(tmp_path, ac_config=ac_config)
        copy_backbone(one_part(policy), model)
        init_head(model, std=0.5, seed=3)
        values_of(model, context, ids).sum().backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_in_bf16_the_head_still_computes_in_fp32(tmp_path):
    make_peer("llama").save_pretrained(tmp_path)
    model, context = build(tmp_path, mixed_precision_param="bfloat16")
    init_head(model, std=20.0, seed=3)
    with torch.no_grad():
        values = values_of(model, context, tokens(40))
    assert values.dtype == torch.float32
    assert values.abs().max() > 16
    # Rounded to bf16 hardly any would survive.
    assert (values != values.bfloat16().float()).float().mean() > 0.9


def test_a_head_depends_on_its_seed_alone_and_a_deviation_of_zero_makes_zeros(tmp_path):
    make_peer("llama", hidden_size=480, num_attention_heads=60).save_pretrained(tmp_path)
    model, _ = build(tmp_path)
    torch.manual_seed(1)
    init_head(model, std=0.1, seed=5)
    first = model.head.weight.full_tensor().clone()
    init_head(model, std=0.1, seed=6)
    assert not torch.equal(first, model.head.weight.full_tensor())
    torch.manual_seed(2)
    init_head(model, std=0.1, seed=5)
    assert torch.equal(first, model.head.weight.full_tensor())
    assert 0.09 < first.std() < 0.11
    init_head(model, std=0.0, seed=5)
    assert model.head.weight.full_tensor().eq(0).all()


def test_a_rescaled_head_gives_the_same_values_on_another_scale(tmp_path):
    make_peer("llama").save_pretrained(tmp_path)
    model, context = build(tmp_path, head_bias=True)
    init_head(model, std=0.5, seed=3)
    ids = tokens(20)
    with torch.no_grad():
        before = values_of(model, context, ids)
        for factor, shift in ((0.5, 3.0), (4.0, -1.0)):
            rescale_head(model, factor=factor, shift=shift)
        after = values_of(model, context, ids)
    assert before.std() > 0.1
    torch.testing.assert_close(after, 4.0 * (0.5 * before + 3.0) - 1.0, rtol=0, atol=1e-5)


def test_a_bias_that_the_checkpoint_lacks_stays(tmp_path):
    make_peer("llama").save_pretrained(tmp_path / "model")
    source, _ = build(tmp_path / "model")
    init_head(source, std=0.5, seed=3)
    dcp.save(source.state_dict(), checkpoint_id=str(tmp_path / "step-7"))
    target, _ = build(tmp_path / "model", head_bias=True)
    rescale_head(target, factor=1.0, shift=2.0)
    assert load_value_checkpoint(target, str(tmp_path / "step-7"))
    assert target.head.bias.full_tensor().item() == 2.0
    assert torch.equal(target.head.weight.full_tensor(), source.head.weight.full_tensor())


def test_a_checkpoint_of_a_value_model_comes_back_with_its_head(tmp_path):
    make_peer("llama").save_pretrained(tmp_path / "model")
    source, context = build(tmp_path / "model")
    init_head(source, std=0.5, seed=3)
    dcp.save(source.state_dict(), checkpoint_id=str(tmp_path / "step-7"))
    target, _ = build(tmp_path / "model")
    assert load_value_checkpoint(target, str(tmp_path / "step-7"))
    with torch.no_grad():
        got, expected = (values_of(model, context, tokens(20)) for model in (target, source))
    assert expected.std() > 0.1
    assert torch.equal(got, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_of_a_language_models_checkpoint_everything_but_the_head_is_taken(tmp_path, tied):
    make_peer("qwen3", tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    policy = load_titan(tmp_path / "model")
    dcp.save(dict(policy.state_dict()), checkpoint_id=str(tmp_path / "step-7"))
    target, context = build(tmp_path / "model")
    init_head(target, std=0.5, seed=3)
    head = target.head.weight.full_tensor().clone()
    assert not load_value_checkpoint(target, str(tmp_path / "step-7"))
    assert torch.equal(target.head.weight.full_tensor(), head)
    ids = tokens(20)
    with torch.no_grad():
        got = values_of(target, context, ids)
    expected = (hidden_states(policy, ids) @ head.T).squeeze(-1)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_what_is_no_checkpoint_of_this_architecture_is_refused_by_its_key(tmp_path):
    make_peer("llama").save_pretrained(tmp_path / "model")
    make_peer("llama", intermediate_size=88).save_pretrained(tmp_path / "other")
    target, _ = build(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"critic\.initial_load_path must be a TorchTitan checkpoint"):
        load_value_checkpoint(target, str(tmp_path / "nothing"), where="critic.initial_load_path")
    dcp.save(build(tmp_path / "other")[0].state_dict(), checkpoint_id=str(tmp_path / "step-7"))
    with pytest.raises(ConfigError, match="Size mismatch"):
        load_value_checkpoint(target, str(tmp_path / "step-7"))
    assert HEAD in target.state_dict()
