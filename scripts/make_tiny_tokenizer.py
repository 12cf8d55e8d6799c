"""Make the character tokenizer of the tests and the quickstart: titan_rl/assets/tiny_llama.

    python scripts/make_tiny_tokenizer.py [directory]

104 tokens: 7 special ones, line feed, tab, and the 95 printable characters of ASCII, one token each, so that
every digit is a token. Any other character becomes <unk>. It is an ordinary fast tokenizer with a chat
template. Only the template writes <bos>.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>"]
CHARACTERS = ["\n", "\t", *(chr(code) for code in range(32, 127))]

# <bos> and <eos> are spelled out, because TorchTitan's renderer knows no bos_token.
CHAT_TEMPLATE = (
    "{{ '<bos>' }}"
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """A BPE model without merges, which is one token per character."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def main(directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer.json").write_text(build_tokenizer().to_str(pretty=True) + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    default = Path(__file__).resolve().parents[1] / "titan_rl" / "assets" / "tiny_llama"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
