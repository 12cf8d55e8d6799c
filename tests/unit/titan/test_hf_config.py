"""From config.json to TorchTitan's model and back: equal logits, and refusals by name.

Logits of small random models are compared within 1e-5 with those of transformers.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torchtitan.models import llama3, qwen3
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.titan.tiny_models import build_titan, load_titan, make_peer, peer_logits, titan_logits, tokens
from titan_rl.errors import ConfigError
from titan_rl.titan.hf_config import hf_from_spec, read_hf_config, spec_from_hf

TOLERANCE = 1e-5
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_without_grouped_queries": ("llama", {"num_key_value_heads": None}),
    "llama_one_key_head": ("llama", {"num_key_value_heads": 1}),
    "llama_wide_heads": ("llama", {"head_dim": 16}),
    "llama_default_head_dim": ("llama", {"head_dim": None}),
    "llama_eps_and_theta": ("llama", {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_theta": 77.0}}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_tied_llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_one_key_head": ("qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_moe_every_second_layer": (
        "qwen3_moe",
        {"mlp_only_layers": None, "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen3_eps_and_theta": ("qwen3", {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_theta": 77.0}}),
}


def write_config(directory: Path, **changed: object) -> Path:
    """A tiny Llama's config.json; a value of None takes the key away."""
    values = json.loads(json.dumps(make_peer("llama").config.to_dict())) | changed
    values |= {"architectures": changed.get("architectures", ["LlamaForCausalLM"])}
    values = {key: value for key, value in values.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(("kind", "changed"), MODELS.values(), ids=MODELS)
def test_logits_equal_those_of_transformers_there_and_back(tmp_path, kind, changed):
    peer = make_peer(kind, **changed)
    peer.save_pretrained(tmp_path)
    expected = peer_logits(peer, tokens())
    assert expected.std() > 0.3
    torch.testing.assert_close(titan_logits(load_titan(tmp_path), tokens()), expected, rtol=0, atol=TOLERANCE)

    written = hf_from_spec(spec_from_hf(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    again.load_state_dict(peer.state_dict())
    torch.testing.assert_close(peer_logits(again, tokens()), expected, rtol=0, atol=0)
    assert hf_from_spec(spec_from_hf(tmp_path)) == written


@pytest.mark.parametrize("key", ["norm_topk_prob", "num_experts_per_tok"])
def test_the_comparison_notices_another_routing(tmp_path, key):
    """Planted fault: a key of the file is read wrongly."""
    peer = make_peer("qwen3_moe")
    peer.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content[key] = {"norm_topk_prob": False, "num_experts_per_tok": 2}[key]
    (tmp_path / "config.json").write_text(json.dumps(content))
    difference = (titan_logits(load_titan(tmp_path), tokens()) - peer_logits(peer, tokens())).abs().max()
    assert difference > 100 * TOLERANCE


@pytest.mark.parametrize("fault", ["rope_theta", "rms_norm_eps", "num_key_value_heads"])
def test_the_comparison_notices_a_wrong_value(tmp_path, fault):
    """Planted fault: a key of the file is read wrongly."""
    peer = make_peer("llama", num_key_value_heads=2)
    peer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"rope_parameters": None, "rope_theta": 20000.0} if fault == "rope_theta" else {}
    config |= {"rms_norm_eps": 1e-5} if fault == "rms_norm_eps" else {}
    config |= {"num_key_value_heads": 1} if fault == "num_key_value_heads" else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if fault == "num_key_value_heads":
        with pytest.raises(ConfigError, match=r"the tensors of layers.0 must have the shapes"):
            load_titan(tmp_path)
        return
    difference = (titan_logits(load_titan(tmp_path), tokens()) - peer_logits(peer, tokens())).abs().max()
    assert difference > TOLERANCE


def test_rope_is_read_from_files_of_older_transformers_too(tmp_path):
    peer = make_peer("llama", rope_parameters=LLAMA3_ROPE)
    peer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(
        titan_logits(load_titan(tmp_path), tokens()), peer_logits(peer, tokens()), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_where_the_file_is_silent_the_model_is_that_of_transformers(tmp_path, kind):
    name = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[kind] + "ForCausalLM"
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "vocab_size": 96,
        "max_position_embeddings": 160,
    }
    described = {"architectures": [name], "model_type": kind} | sizes
    (tmp_path / "config.json").write_text(json.dumps(described))
    torch.manual_seed(0)
    peer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.mul_(3)
    peer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(described))
    expected = peer_logits(peer, tokens())
    torch.testing.assert_close(titan_logits(load_titan(tmp_path), tokens()), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("registry", "flavor"), [(llama3, "debugmodel"), (qwen3, "debugmodel")])
def test_the_file_of_a_flavor_describes_the_flavor(tmp_path, registry, flavor):
    """TorchTitan's own model, scaled RoPE and fused projections included, against transformers."""
    spec = registry.model_registry(flavor, attn_backend="flex")
    config = hf_from_spec(spec)
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = build_titan(spec)
    state = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    peer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).float().eval()
    missing, unexpected = peer.load_state_dict(state, strict=False)
    assert missing == (["lm_head.weight"] if config["tie_word_embeddings"] else [])
    assert unexpected == []
    expected = peer_logits(peer, tokens())
    assert expected.std() > 0.1
    torch.testing.assert_close(titan_logits(model, tokens()), expected, rtol=0, atol=5e-5)
    assert hf_from_spec(spec_from_hf(tmp_path)) == config


def test_random_weights_have_the_spread_that_the_file_asks_for(tmp_path):
    make_peer("qwen3", tie_word_embeddings=True, initializer_range=0.07).save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = build_titan(spec_from_hf(tmp_path))
    assert model.tok_embeddings.weight is model.lm_head.weight
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1.0).all()
        else:
            assert parameter.std().item() == pytest.approx(0.07, rel=0.1)
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].std() > 0.1


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("attention_bias", True, "attention_bias must be False"),
        ("mlp_bias", True, "mlp_bias must be False"),
        ("hidden_act", "gelu", "hidden_act must be 'silu'"),
        ("use_sliding_window", True, "use_sliding_window must be False"),
        ("quantization_config", {"bits": 4}, "quantization_config must be None"),
        ("layer_types", ["full_attention", "sliding_attention"], "layer_types must be"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor must be 1.0"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0}, "rope_scaling must be absent"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling must be absent"),
        (
            "rope_parameters",
            {"rope_type": "llama3", "factor": 2.0},
            "rope_scaling must hold 'low_freq_factor'",
        ),
        ("architectures", ["MixtralForCausalLM"], "Qwen3ForCausalLM, Qwen3MoeForCausalLM; got"),
        ("architectures", ["GPT2LMHeadModel"], "architectures must name one of LlamaForCausalLM"),
        ("architectures", [], "architectures must name one of"),
        ("num_key_value_heads", 4, "num_key_value_heads must divide num_attention_heads = 6; got 4"),
        ("vocab_size", "96", "vocab_size must be a positive integer; got '96'"),
        ("hidden_size", None, "hidden_size must be a positive integer; got None"),
        ("num_hidden_layers", 0, "num_hidden_layers must be a positive integer; got 0"),
    ],
)
def test_what_the_model_would_compute_differently_is_refused_by_name(tmp_path, key, value, shown):
    if key == "rope_scaling":
        write_config(tmp_path, rope_scaling=value, rope_parameters=None)
    else:
        write_config(tmp_path, **{key: value})
    with pytest.raises(ConfigError) as caught:
        spec_from_hf(tmp_path)
    assert shown in str(caught.value)
    assert "config.json" in caught.value.where
    spec_from_hf(write_config(tmp_path))  # nothing else was wrong


def test_scaled_rope_is_refused_for_qwen3(tmp_path):
    make_peer("qwen3", rope_parameters=LLAMA3_ROPE).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="rope_scaling must be absent, or of type llama3 for a Llama model"):
        spec_from_hf(tmp_path)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (None, "config.json"),
        ("{", "be valid JSON"),
        ("\xff\xfe", "be valid JSON"),
        ("[1]", "be a JSON object"),
    ],
)
def test_a_directory_without_a_readable_file_is_refused(tmp_path, content, shown):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=shown):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"num_experts": 0}, "num_experts must be a positive integer; got 0"),
        ({"moe_intermediate_size": "24"}, "moe_intermediate_size must be a positive integer; got '24'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts = 8; got 9"),
        ({"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers must leave experts in at least one layer"),
    ],
)
def test_sizes_of_experts_that_make_no_model_are_refused(tmp_path, change, shown):
    make_peer("qwen3_moe").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    if "num_experts" in change:
        content.pop("num_local_experts", None)
    path.write_text(json.dumps(content | change))
    with pytest.raises(ConfigError) as caught:
        spec_from_hf(tmp_path)
    assert shown in str(caught.value)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_is_read_under_both_of_its_names(tmp_path, key):
    make_peer("qwen3_moe").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for name in ("num_experts", "num_local_experts"):
        content.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(content | {key: 8}))
    moe = spec_from_hf(tmp_path).model.layers[0].moe
    assert (moe.num_experts, moe.router.top_k, moe.load_balance_coeff) == (8, 3, None)


def test_a_flavor_with_experts_is_written_once_it_has_no_router_bias():
    spec = qwen3.model_registry("debugmodel_moe", attn_backend="flex")
    with pytest.raises(ConfigError, match=r"load_balance_coeff must be 0 for vLLM and .* got 0.001"):
        hf_from_spec(spec)
    for layer in spec.model.layers:
        layer.moe.load_balance_coeff = None
    written = hf_from_spec(spec)
    expected = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert written | expected | {"mlp_only_layers": []} == written
    spec.model.layers[3].moe.router.score_func = "sigmoid"
    with pytest.raises(ConfigError, match="route as Qwen3-MoE does"):
        hf_from_spec(spec)


@pytest.mark.parametrize("change", ["yarn", "other"])
def test_a_model_without_a_counterpart_is_not_written(change):
    spec = qwen3.model_registry("debugmodel", attn_backend="flex")
    if change == "yarn":
        spec.model.layers[0].attention.rope.scaling = "yarn"
    if change == "other":
        spec.name = "deepseek_v3"
    with pytest.raises(ConfigError, match="to be written in Hugging Face layout"):
        hf_from_spec(spec)
