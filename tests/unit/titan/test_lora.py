"""Low-rank adapters of TorchTitan's converter: what is trained, switched off, merged, and handed to PEFT.

Logits of small random models in fp32 are compared within 1e-5, as those of transformers are.
"""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.unit.titan.tiny_models import make_peer, peer_logits, titan_logits, tokens
from titan_rl.errors import ConfigError
from titan_rl.titan import device
from titan_rl.titan.hf_config import read_hf_config
from titan_rl.titan.lora import (
    LoraSection,
    adapted_layers,
    adapted_spec,
    adapters_off,
    changing_names,
    is_adapter,
    merged,
    with_adapters,
    without_adapters,
)
from titan_rl.titan.models import ModelSection, build_adapter, build_spec
from titan_rl.titan.peft import AdapterStream, export_peft
from titan_rl.titan.weights import WeightStream, export_hf, load_hf

TOLERANCE = 1e-5
KINDS = [("llama", False), ("llama", True), ("qwen3", False)]

device.install()


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")


def directory_of(tmp_path, kind="llama", *, is_tied=False):
    directory = tmp_path / "model"
    make_peer(kind, tie_word_embeddings=is_tied).save_pretrained(directory)
    return directory


def spec_of(directory, section=None):
    return build_spec(ModelSection(hf_assets_path=str(directory)), lora=section)


def load(directory, section=None, *, seed=None):
    """TorchTitan's model of a directory; with a seed its adapters do something."""
    spec = spec_of(directory, section)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = spec.model.build()
        with torch.no_grad():
            model.init_weights(buffer_device=None)
    adapter = build_adapter(spec, spec.model)
    load_hf(model, adapter, str(directory))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for layer in adapted_layers(model).values():
            layer.lora_b.weight.data.normal_(0, 0.1, generator=generator)
    return model.eval(), adapter


# ------------------------------------------------------------------------------------------ what is trained


def test_only_adapters_are_trained_and_of_every_linear_layer_but_the_head(tmp_path):
    model, _ = load(directory_of(tmp_path), LoraSection(rank=4))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert len(trained) == 2 * 7 * 2
    assert not any("lm_head" in name for name in trained)
    shapes = {layer.lora_a.weight.shape[0] for layer in adapted_layers(model).values()}
    assert shapes == {4}


def test_named_layers_alone_get_adapters(tmp_path):
    model, _ = load(directory_of(tmp_path), LoraSection(target_modules=["wq", "w2"]))
    kinds = {name.rsplit(".", 1)[-1] for name in adapted_layers(model)}
    assert kinds == {"wq", "w2"}


@pytest.mark.parametrize(("kind", "is_tied"), KINDS)
def test_a_model_starts_as_the_model_without_adapters_bit_for_bit(tmp_path, kind, is_tied):
    directory = directory_of(tmp_path, kind, is_tied=is_tied)
    plain, _ = load(directory)
    adapted, _ = load(directory, LoraSection(rank=4))
    assert torch.equal(titan_logits(adapted, tokens()), titan_logits(plain, tokens()))


@pytest.mark.parametrize(("kind", "is_tied"), KINDS)
def test_with_its_adapters_off_a_trained_model_is_its_base_bit_for_bit(tmp_path, kind, is_tied):
    directory = directory_of(tmp_path, kind, is_tied=is_tied)
    plain, _ = load(directory)
    adapted, _ = load(directory, LoraSection(rank=4), seed=1)
    before = titan_logits(adapted, tokens())
    with adapters_off([adapted]):
        assert torch.equal(titan_logits(adapted, tokens()), titan_logits(plain, tokens()))
    assert torch.equal(titan_logits(adapted, tokens()), before)
    assert (before - titan_logits(plain, tokens())).abs().max() > 0.1


def test_adapters_are_on_again_after_an_error(tmp_path):
    model, _ = load(directory_of(tmp_path), LoraSection(rank=4, alpha=2.0))
    with pytest.raises(KeyError), adapters_off([model]):
        raise KeyError
    assert {layer._lora_scaling for layer in adapted_layers(model).values()} == {0.5}


@pytest.mark.parametrize(("kind", "is_tied"), KINDS)
def test_a_configuration_without_adapters_is_the_one_that_was_given(tmp_path, kind, is_tied):
    directory = directory_of(tmp_path, kind, is_tied=is_tied)
    plain = spec_of(directory).model
    adapted = with_adapters(plain, LoraSection(rank=2))
    assert repr(without_adapters(adapted)) == repr(plain) != repr(adapted)
    assert repr(without_adapters(plain)) == repr(plain)
    assert type(without_adapters(adapted)) is type(plain)
    model = without_adapters(adapted).build()
    assert not adapted_layers(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


# ------------------------------------------------------------------------------------- merging, and PEFT


@pytest.mark.parametrize(("kind", "is_tied"), KINDS)
def test_the_stream_holds_merged_weights_under_the_names_of_a_model_without_adapters(tmp_path, kind, is_tied):
    directory = directory_of(tmp_path, kind, is_tied=is_tied)
    model, adapter = load(directory, LoraSection(rank=4), seed=1)
    plain, plain_adapter = load(directory)
    stream, base = dict(WeightStream(model, adapter)), dict(WeightStream(plain, plain_adapter))
    assert list(stream) == list(base)
    changed = {name.split(".")[-2] for name in base if not torch.equal(stream[name], base[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    spec = spec_of(directory, LoraSection(rank=4))
    out = tmp_path / "merged"
    export_hf(
        WeightStream(model, adapter),
        directory=out,
        hf_config=read_hf_config(directory),
        assets="",
        is_tied=is_tied,
    )
    logits = peer_logits(AutoModelForCausalLM.from_pretrained(out), tokens())
    torch.testing.assert_close(logits, titan_logits(model, tokens()), rtol=0, atol=TOLERANCE)
    assert spec.state_dict_adapter is not None


@pytest.mark.parametrize(("kind", "is_tied"), KINDS)
def test_what_peft_adds_to_the_base_makes_the_merged_weights(tmp_path, kind, is_tied):
    directory = directory_of(tmp_path, kind, is_tied=is_tied)
    section = LoraSection(rank=4, alpha=6.0)
    model, adapter = load(directory, section, seed=1)
    out = tmp_path / "adapter"
    export_peft(AdapterStream(model, adapter), directory=out, section=section, base_model=str(directory))
    written, config = (
        load_file(out / "adapter_model.safetensors"),
        json.loads((out / "adapter_config.json").read_text()),
    )
    assert config["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    base = dict(WeightStream(*load(directory)))
    expected = dict(WeightStream(model, adapter))
    assert len(written) == 2 * 7 * 2
    for name, low in written.items():
        module, half, _ = name.rsplit(".", 2)
        if half != "lora_A":
            continue
        weight = module.removeprefix("base_model.model.") + ".weight"
        high = written[f"{module}.lora_B.weight"]
        value = base[weight] + config["lora_alpha"] / config["r"] * high @ low
        torch.testing.assert_close(value, expected[weight], rtol=0, atol=TOLERANCE)
        assert (expected[weight] - base[weight]).abs().max() > 100 * TOLERANCE


def test_the_changing_weights_of_a_step_are_those_of_adapted_layers(tmp_path):
    model, adapter = load(directory_of(tmp_path), LoraSection(target_modules=["wq", "w1", "wo"]), seed=1)
    layers = adapted_layers(model)
    few = dict(WeightStream(model, adapter, names=changing_names(layers, with_siblings=False)))
    more = dict(WeightStream(model, adapter, names=changing_names(layers, with_siblings=True)))
    everything = dict(WeightStream(model, adapter))
    assert {name.split(".")[-2] for name in few} == {"q_proj", "gate_proj", "o_proj"}
    assert {name.split(".")[-2] for name in set(more) - set(few)} == {"k_proj", "v_proj", "up_proj"}
    assert all(torch.equal(more[name], everything[name]) for name in more)


def test_merging_refuses_an_adapter_without_its_weight():
    tensors = [("a.lora_a.weight", torch.ones(1, 2)), ("a.lora_b.weight", torch.ones(2, 1))]
    with pytest.raises(ValueError, match="a part of a only"):
        list(merged(tensors, {"a": 1.0}))


def test_merging_adds_up_in_fp32_and_gives_the_dtype_of_the_weight():
    weight, low, high = torch.ones(1, 1), torch.full((1, 1), 2.0), torch.full((1, 1), 3.0)
    tensors = {"a.weight": weight, "a.lora_a.weight": low, "a.lora_b.weight": high, "b.weight": weight}
    got = dict(merged(((n, t.bfloat16()) for n, t in tensors.items()), {"a": 0.5}))
    assert {name: (value.item(), value.dtype) for name, value in got.items()} == {
        "a.weight": (4.0, torch.bfloat16),
        "b.weight": (1.0, torch.bfloat16),
    }


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_modules": ["wq", "q_proj"]}, r"TorchTitan's names of these are wq"),
        ({"target_modules": ["lm_head"]}, r"name layers of the model, each once: wq, wkv, wo, w1"),
        ({"target_modules": []}, r"got \[\]"),
        ({"target_modules": ["wq", "wq"]}, r"each once"),
        ({"rank": 16}, r"lora.rank must be below 16, the smaller side of wkv"),
    ],
)
def test_nonsense_is_refused(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(directory_of(tmp_path), LoraSection(**values))


def test_a_mixture_of_experts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\[lora\] must be left out for a mixture of experts"):
        spec_of(directory_of(tmp_path, "qwen3_moe"), LoraSection())


def test_a_flavor_that_fuses_queries_keys_and_values_is_refused_unless_they_are_left_alone():
    section = ModelSection(name="qwen3", flavor="debugmodel")
    with pytest.raises(ConfigError, match=r"lora.target_modules must leave out queries, keys and values"):
        build_spec(section, lora=LoraSection())
    model = build_spec(section, lora=LoraSection(rank=2, target_modules=["wo"])).model
    with torch.device("meta"):
        layers = adapted_layers(model.build())
    assert {name.rsplit(".", 1)[-1] for name in layers} == {"wo"}


def test_parallelising_leaves_frozen_weights_frozen_though_torchtitan_does_not(tmp_path):
    spec = adapted_spec(spec_of(directory_of(tmp_path)), LoraSection(rank=4))

    def thaw(model, **options):
        assert options == {"ac_config": None}
        return model.requires_grad_(True)

    thawing = adapted_spec(
        dataclasses.replace(spec_of(tmp_path / "model"), parallelize_fn=thaw), LoraSection(rank=4)
    )
    with torch.device("meta"):
        model = thawing.parallelize_fn(spec.model.build(), ac_config=None)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
