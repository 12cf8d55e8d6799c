"""The committed tiny tokenizer is what its script makes, and TorchTitan reads it as transformers does."""

import subprocess
import sys
from pathlib import Path

import titan_rl
from titan_rl.data.chat import PromptEncoder
from titan_rl.types import Message

TINY = Path(titan_rl.__file__).parent / "assets" / "tiny_llama"
SCRIPT = Path(__file__).parents[3] / "scripts" / "make_tiny_tokenizer.py"


def test_the_committed_files_are_what_the_script_makes(tmp_path):
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], check=True)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in TINY.iterdir()}
    assert made == {name: content for name, content in committed.items() if name != "config.json"}
    assert set(made) == {"tokenizer.json", "tokenizer_config.json"}


def test_torchtitan_encodes_text_and_chats_as_we_do():
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    theirs = HuggingFaceTokenizer(tokenizer_path=str(TINY))
    assert (theirs.bos_id, theirs.eos_id, theirs.get_vocab_size()) == (1, 2, 104)
    plain = PromptEncoder(TINY, system_prompt=None, max_prompt_tokens=64, use_chat_template=False)
    assert theirs.encode("12 + 30 =") == plain.encode([Message("user", "12 + 30 =")])
    chat = PromptEncoder(TINY, system_prompt=None, max_prompt_tokens=64)
    text = theirs.apply_chat_template([{"role": "user", "content": "Hi\n"}], add_generation_prompt=True)
    assert theirs.encode(text) == chat.encode([Message("user", "Hi\n")])


def test_every_digit_is_one_token_and_all_of_ascii_survives_a_round_trip():
    encoder = PromptEncoder(TINY, system_prompt=None, max_prompt_tokens=200, use_chat_template=False)
    ascii_text = "\n\t" + "".join(chr(code) for code in range(32, 127))
    ids = encoder.encode([Message("user", ascii_text)])
    assert len(ids) == 97
    assert sorted(ids) == list(range(7, 104))
    assert encoder.decode(ids) == ascii_text
