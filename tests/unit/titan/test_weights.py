"""Weights from a directory, as a stream, and into a directory: bit for bit, or refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchtitan.models import llama3, qwen3
from transformers import AutoModelForCausalLM

from tests.unit.titan.tiny_models import build_titan, load_titan, make_peer
from titan_rl.errors import ConfigError
from titan_rl.titan import weights
from titan_rl.titan.hf_config import hf_from_spec, read_hf_config, spec_from_hf
from titan_rl.titan.state import parts
from titan_rl.titan.weights import (
    WeightStream,
    export_hf,
    has_hf_weights,
    load_hf,
    write_assets,
)

MODELS = [("llama", False), ("llama", True), ("qwen3", False), ("qwen3", True), ("qwen3_moe", False)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Llama whose head is its own."""
    make_peer("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_weights(directory: Path, change) -> None:
    file = directory / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


def stream_of(directory: Path) -> WeightStream:
    spec = spec_from_hf(directory)
    return WeightStream(load_titan(directory), spec.state_dict_adapter(spec.model, None))


# -------------------------------------------------------------------------------------------------- loading


def test_a_missing_tensor_is_named(directory):
    change_weights(directory, lambda state: state.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"no layers.1.feed_forward.w3.weight\. The weights are incomplete"):
        load_titan(directory)


def test_several_missing_tensors_are_counted(directory):
    def change(state):
        for name in [name for name in state if name.startswith("model.layers.0.self_attn")]:
            del state[name]

    change_weights(directory, change)
    with pytest.raises(ConfigError, match=r"no layers.0.attention.qkv_linear.wk.weight and 3 more missing"):
        load_titan(directory)


def test_an_unexpected_tensor_is_named(directory):
    change_weights(
        directory, lambda state: state.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)})
    )
    with pytest.raises(
        ConfigError, match=r"hold only tensors of the model.*model.layers.2.mlp.up_proj.weight"
    ):
        load_titan(directory)


def test_inverse_frequencies_of_old_files_are_passed_over(directory):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(directory, lambda state: state.update({name: torch.ones(4)}))
    load_titan(directory)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(directory):
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(directory, lambda state: state.update({name: state[name][:, :-1].contiguous()}))
    with pytest.raises(ConfigError) as caught:
        load_titan(directory)
    assert "layers.0.feed_forward.w2.weight must have shape [48, 80]; got [48, 79]" in str(caught.value)


@pytest.mark.parametrize("left", [3, 100, -1])
def test_a_truncated_file_is_refused(directory, left):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ConfigError, match=r"model.safetensors must be a readable safetensors file"):
        load_titan(directory)


def test_a_tensor_in_two_files_is_refused(directory):
    shutil.copy(directory / "model.safetensors", directory / "consolidated.safetensors")
    with pytest.raises(ConfigError, match=r"in consolidated.safetensors and in model.safetensors"):
        load_titan(directory)


def test_only_the_files_of_the_index_are_read(directory):
    expected = dict(stream_of(directory))
    peer = AutoModelForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    peer.save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    (directory / "consolidated.safetensors").write_bytes(b"of another layout")
    got = dict(stream_of(directory))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_file_of_the_index_that_is_missing_is_named(directory):
    peer = AutoModelForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    peer.save_pretrained(directory, max_shard_size="20KB")
    last = sorted(directory.glob("model-*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(ConfigError, match=rf"{last.name} must be a readable safetensors file"):
        load_titan(directory)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": []}'])
def test_a_damaged_index_is_refused(directory, content):
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match="weight_map"):
        load_titan(directory)


def test_low_precision_is_widened_exactly(directory):
    def change(state):
        state.update({name: tensor.bfloat16() for name, tensor in state.items()})

    change_weights(directory, change)
    stored, stream = load_file(directory / "model.safetensors"), dict(stream_of(directory))
    assert all(stream[name].dtype == torch.float32 for name in stored)
    assert all(torch.equal(stream[name].bfloat16(), stored[name]) for name in stored)


def test_a_head_of_its_own_beside_a_tied_embedding_is_refused(tmp_path):
    make_peer("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(tmp_path, lambda state: state.update({"lm_head.weight": embedding.clone()}))
    load_titan(tmp_path)
    change_weights(tmp_path, lambda state: state.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ConfigError, match=r"lm_head.weight must equal model.embed_tokens.weight"):
        load_titan(tmp_path)


def test_weights_without_an_adapter_are_refused(directory):
    model = build_titan(spec_from_hf(directory))
    with pytest.raises(ConfigError, match=r"checkpoint.initial_load_path"):
        load_hf(model, None, str(directory))


def test_a_directory_has_weights_when_it_holds_safetensors(directory, tmp_path):
    assert has_hf_weights(str(directory))
    assert not has_hf_weights(str(tmp_path))
    assert not has_hf_weights("")
    assert not has_hf_weights(str(tmp_path / "absent"))


# ------------------------------------------------------------------------------------------------ the stream


@pytest.mark.parametrize(("kind", "is_tied"), MODELS)
def test_the_stream_is_the_file_bit_for_bit(tmp_path, kind, is_tied):
    make_peer(kind, tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    items = list(stream_of(tmp_path))
    stream = dict(items)
    assert len(stream) == len(items)
    if is_tied:
        assert "lm_head.weight" not in stored
        assert torch.equal(stream.pop("lm_head.weight"), stored["model.embed_tokens.weight"])
    assert stream.keys() == stored.keys()
    assert all(torch.equal(stream[name], stored[name]) for name in stored)


def test_the_stream_gives_the_weights_as_they_are_when_it_is_read(directory):
    stream = stream_of(directory)
    before = {name: tensor.clone() for name, tensor in stream}
    with torch.no_grad():
        stream._model.layers["1"].feed_forward.w1.weight.add_(1)
    changed = [name for name, tensor in stream if not torch.equal(tensor, before[name])]
    assert changed == ["model.layers.1.mlp.gate_proj.weight"]


def test_tensors_of_the_stream_are_on_no_graph(directory):
    assert not any(tensor.requires_grad for _, tensor in stream_of(directory))


def test_without_an_adapter_names_are_torchtitans(directory):
    model = load_titan(directory)
    stream = dict(WeightStream(model, None))
    assert stream.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(stream[name], parameter) for name, parameter in model.named_parameters())


def test_a_trained_parameter_that_the_adapter_does_not_know_is_refused(directory):
    spec = spec_from_hf(directory)
    model = load_titan(directory)
    model.layers["0"].feed_forward.lora = nn.Linear(2, 2, bias=False)
    with pytest.raises(ConfigError, match=r"layers.0.feed_forward.lora.weight must be known to the model's"):
        list(WeightStream(model, spec.state_dict_adapter(spec.model, None)))


@pytest.mark.parametrize(
    ("registry", "flavor"), [(llama3, "debugmodel"), (qwen3, "debugmodel"), (qwen3, "debugmodel_moe")]
)
def test_fused_and_stacked_weights_of_flavors_arrive_once_and_whole(registry, flavor):
    spec = registry.model_registry(flavor, attn_backend="flex")
    for layer in spec.model.layers:
        if layer.moe is not None:
            layer.moe.load_balance_coeff = None
    torch.manual_seed(0)
    model = build_titan(spec)
    adapter = spec.state_dict_adapter(spec.model, None)
    items = list(WeightStream(model, adapter))
    names = [name for name, _ in items]
    assert len(names) == len(set(names))
    expected = adapter.to_hf(model.state_dict())
    assert {name for name in names if name != "lm_head.weight"} == set(expected) - {"lm_head.weight"}
    assert all(torch.equal(dict(items)[name], tensor) for name, tensor in expected.items())
    tied = [t.numel() for n, t in items if n == "lm_head.weight"] if model.enable_weight_tying else [0]
    assert sum(tensor.numel() for _, tensor in items) - tied[0] == sum(p.numel() for p in model.parameters())


def test_a_bias_of_the_router_that_no_generator_knows_is_refused():
    spec = qwen3.model_registry("debugmodel_moe", attn_backend="flex")
    stream = WeightStream(build_titan(spec), spec.state_dict_adapter(spec.model, None))
    with pytest.raises(ConfigError, match=r"expert_bias_E must be known .* model.load_balance_coeff = 0"):
        list(stream)


def test_a_part_at_a_time_is_the_whole_state(directory):
    model = load_titan(directory)
    state = model.state_dict()
    found = {n: t for prefix, part in parts(model) for n, t in part.state_dict(prefix=prefix).items()}
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)


# ---------------------------------------------------------------------------------------------------- export


def export(directory: Path, target: Path, *, is_tied: bool, **config) -> None:
    export_hf(
        stream_of(directory),
        directory=target,
        hf_config=hf_from_spec(spec_from_hf(directory)) | config,
        assets=str(directory),
        is_tied=is_tied,
    )


@pytest.mark.parametrize("shard_bytes", [4 * 2**30, 20_000], ids=["one_file", "sharded"])
@pytest.mark.parametrize(("kind", "is_tied"), MODELS)
def test_an_export_loads_in_transformers_bit_for_bit(tmp_path, monkeypatch, kind, is_tied, shard_bytes):
    monkeypatch.setattr(weights, "_SHARD_BYTES", shard_bytes)
    peer = make_peer(kind, tie_word_embeddings=is_tied)
    peer.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", is_tied=is_tied)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.state_dict().keys() == peer.state_dict().keys()
    for name, tensor in peer.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    if shard_bytes > 2**30:
        assert files == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    stored = {name: file for file in files for name in load_file(tmp_path / "out" / file)}
    assert stored == index["weight_map"]
    assert ("lm_head.weight" in stored) == (not is_tied)
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in peer.parameters())
    assert all((tmp_path / "out" / file).stat().st_size < 2 * shard_bytes for file in files)


def test_an_export_can_be_trained_from_again(tmp_path):
    make_peer("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", is_tied=True)
    expected, got = dict(stream_of(tmp_path / "model")), dict(stream_of(tmp_path / "out"))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_exported_dtype_is_that_of_the_file_whatever_the_model_came_with(directory, tmp_path, key):
    """Otherwise transformers would round fp32 weights to what config.json says."""
    export(directory, tmp_path / "out", is_tied=False, **{key: "bfloat16"})
    assert read_hf_config(tmp_path / "out")["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    stored = load_file(directory / "model.safetensors")
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def test_an_export_replaces_an_older_one_and_leaves_nothing_beside_it(directory, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "stale.safetensors").write_bytes(b"old")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "stale").write_text("from a run that was killed")
    export(directory, target, is_tied=False)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert not (tmp_path / "out.partial").exists()


def test_an_export_that_fails_leaves_the_older_one(directory, tmp_path):
    target = tmp_path / "out"
    export(directory, target, is_tied=False)

    def breaks():
        yield "a", torch.ones(2)
        raise ArithmeticError("lost a rank")

    with pytest.raises(ArithmeticError, match="lost a rank"):
        export_hf(breaks(), directory=target, hf_config={}, assets="", is_tied=False)
    assert len(load_file(target / "model.safetensors")) > 10


def test_tokenizer_files_are_copied_and_nothing_else(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "model.safetensors"):
        (source / name).write_text(name)
    write_assets(target, hf_config={"model_type": "llama"}, assets=str(source))
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
    ]
    assert read_hf_config(target) == {"model_type": "llama"}
