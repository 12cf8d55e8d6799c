"""The model that [model] names, or what is wrong with the name; siblings of the policy."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchtitan.models import qwen3
from torchtitan.models.common.attention import FlexAttention

from tests.unit.titan.tiny_models import build_titan, make_peer, titan_logits, tokens
from titan_rl.errors import ConfigError
from titan_rl.titan import device
from titan_rl.titan.attention import CpuDocumentAttention
from titan_rl.titan.hf_config import spec_from_hf
from titan_rl.titan.models import (
    ModelSection,
    build_adapter,
    build_spec,
    build_unsharded,
    copy_shards,
    local,
)
from titan_rl.titan.weight_sink import WeightSink
from titan_rl.titan.weights import WeightStream, load_hf

device.install()


@pytest.fixture
def user_module(monkeypatch):
    """A module of the user's by the name ``a_users_models``, to be filled."""
    module = types.ModuleType("a_users_models")
    monkeypatch.setitem(sys.modules, "a_users_models", module)
    return module


@pytest.mark.parametrize("backend", ["flex", "flex_flash", "varlen"])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_a_flavor_on_a_cpu_attends_per_document_whatever_its_backend(name, backend):
    spec = build_spec(ModelSection(name=name, flavor="debugmodel", attn_backend=backend))
    found = [config for _, config, _, _ in spec.model.traverse(FlexAttention.Config)]
    assert spec.name == name
    assert len(found) == len(spec.model.layers)
    assert all(isinstance(config, CpuDocumentAttention.Config) and config.per_document for config in found)


def test_under_context_parallelism_masks_stay_dense(tmp_path):
    make_peer("llama").save_pretrained(tmp_path)
    spec = build_spec(ModelSection(hf_assets_path=str(tmp_path)), context_parallel=True)
    assert not any(config.per_document for _, config, _, _ in spec.model.traverse(FlexAttention.Config))


def test_without_a_name_the_directory_is_the_model(tmp_path):
    make_peer("qwen3", num_hidden_layers=3).save_pretrained(tmp_path / "mine")
    spec = build_spec(ModelSection(hf_assets_path=str(tmp_path / "mine")))
    assert (spec.name, spec.flavor, len(spec.model.layers)) == ("qwen3", "mine", 3)


@pytest.mark.parametrize(
    ("section", "shown"),
    [
        (ModelSection(), "model must name a model: name and flavor, or hf_assets_path; got 'neither'"),
        (ModelSection(name="no_such_model"), "or an importable module; got 'no_such_model'"),
        (ModelSection(name="json"), "name a module with a function model_registry(flavor, attn_backend=...)"),
        (ModelSection(name="qwen3", flavor="7T"), "model.flavor must be one of 0.6B, "),
        (ModelSection(name="llama3", flavor=""), "model.flavor must be one of 1B, "),
        (
            ModelSection(name="llama3", flavor="debugmodel", attn_backend="sdpa"),
            "model.attn_backend must be an attention that works on this device; got 'sdpa'. "
            "TorchTitan has flex, flex_flash, varlen.",
        ),
        (ModelSection(hf_assets_path="/no/such/directory"), "be a directory in Hugging Face layout"),
    ],
)
def test_what_is_not_a_model_is_refused_by_the_key_at_fault(section, shown):
    with pytest.raises(ConfigError) as caught:
        build_spec(section)
    assert shown in str(caught.value)


@pytest.mark.parametrize(("coefficient", "expected"), [(None, 0.001), (0.0, None), (0.02, 0.02)])
def test_the_step_of_a_routers_bias_is_the_flavors_or_the_tables(coefficient, expected):
    section = ModelSection(name="qwen3", flavor="debugmodel_moe", load_balance_coeff=coefficient)
    assert {layer.moe.load_balance_coeff for layer in build_spec(section).model.layers} == {expected}


def test_a_directory_gets_a_routers_bias_on_demand_only(tmp_path):
    make_peer("qwen3_moe").save_pretrained(tmp_path)
    for coefficient in (None, 0.02):
        section = ModelSection(hf_assets_path=str(tmp_path), load_balance_coeff=coefficient)
        moes = [layer.moe for layer in build_spec(section).model.layers]
        assert [moe and moe.load_balance_coeff for moe in moes] == [coefficient, None, coefficient]


@pytest.mark.parametrize(
    ("section", "shown"),
    [
        (
            ModelSection(name="llama3", flavor="debugmodel", load_balance_coeff=0.1),
            "model.load_balance_coeff must be left out for a model without experts; got 0.1",
        ),
        (
            ModelSection(name="gpt_oss", flavor="debugmodel"),
            "model.name must be qwen3 or deepseek_v3 for a mixture of experts of TorchTitan; got 'gpt_oss'",
        ),
    ],
)
def test_experts_that_are_not_supported_are_refused(section, shown):
    with pytest.raises(ConfigError) as caught:
        build_spec(section)
    assert shown in str(caught.value)


def test_a_module_of_the_users_is_asked_for_its_flavor(user_module):
    asked = []

    def model_registry(flavor, attn_backend):
        asked.append((flavor, attn_backend))
        return qwen3.model_registry("debugmodel", attn_backend=attn_backend)

    user_module.model_registry = model_registry
    spec = build_spec(ModelSection(name="a_users_models", flavor="large", attn_backend="varlen"))
    assert asked == [("large", "flex")]
    assert isinstance(spec.model.layers[0].attention.inner_attention, CpuDocumentAttention.Config)


def test_what_a_registry_of_the_users_says_of_a_flavor_is_passed_on(user_module):
    def model_registry(flavor, attn_backend):
        raise ValueError("only small and large")

    user_module.model_registry = model_registry
    with pytest.raises(
        ConfigError, match=r"model.flavor must be known to a_users_models.*only small and large"
    ):
        build_spec(ModelSection(name="a_users_models", flavor="medium"))


def test_a_whole_model_gets_rope_for_as_many_tokens_as_it_shall_hold(tmp_path):
    make_peer("llama", max_position_embeddings=32).save_pretrained(tmp_path)
    config = build_spec(ModelSection(hf_assets_path=str(tmp_path))).model
    model = build_unsharded(config, max_seq_len=150)
    assert config.max_seq_len == 32  # the policy's own configuration stays
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    logits = titan_logits(model, tokens(150))
    assert logits.shape == (2, 150, 96)
    assert logits.isfinite().all()


def test_copied_shards_make_equal_models(tmp_path):
    make_peer("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    torch.manual_seed(0)
    source, target = (build_titan(spec_from_hf(tmp_path)) for _ in range(2))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter))
    copy_shards(source, target)
    assert torch.equal(titan_logits(source, tokens()), titan_logits(target, tokens()))
    with torch.no_grad():
        source.norm.weight.add_(1)
    assert not torch.equal(titan_logits(source, tokens()), titan_logits(target, tokens()))


def test_shards_of_models_that_do_not_match_are_not_copied():
    one = SimpleNamespace(parameters=lambda: [torch.zeros(2)])
    two = SimpleNamespace(parameters=lambda: [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ValueError, match="zip"):
        copy_shards(one, two)


def test_the_local_part_of_a_whole_tensor_is_itself():
    parameter = nn.Parameter(torch.ones(3))
    assert local(parameter) is parameter


def test_buffers_are_copied_too_a_routers_bias_among_them():
    model = build_spec(ModelSection(name="deepseek_v3", flavor="debugmodel")).model
    model.layers = model.layers[:2]
    source, target = (build_titan(SimpleNamespace(model=model)) for _ in range(2))
    source.layers["1"].moe.expert_bias_E.copy_(torch.arange(8.0))
    copy_shards(source, target)
    assert torch.equal(target.layers["1"].moe.expert_bias_E, torch.arange(8.0))


def test_weights_without_a_routers_bias_leave_it_at_zero_and_the_local_generator_gets_it(tmp_path):
    make_peer("qwen3_moe").save_pretrained(tmp_path)
    spec = build_spec(ModelSection(hf_assets_path=str(tmp_path), load_balance_coeff=0.02))
    adapter, (source, target) = build_adapter(spec, spec.model), (build_titan(spec) for _ in range(2))
    source.layers["0"].moe.expert_bias_E.fill_(7.0)
    load_hf(source, adapter, str(tmp_path))
    assert not source.layers["0"].moe.expert_bias_E.any()
    source.layers["0"].moe.expert_bias_E.copy_(torch.arange(8.0))
    sink = WeightSink(target, adapter)
    for name, tensor in WeightStream(source, adapter):
        sink.write(name, tensor)
    assert sink.finish() == ()
    assert torch.equal(target.layers["0"].moe.expert_bias_E, torch.arange(8.0))
