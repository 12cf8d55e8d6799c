"""Score a run's exported model with transformers alone, on the prompts of its last evaluation.

    python scripts/score_export.py outputs/smollm2_135m_arithmetic_grpo

Nothing of titan_rl takes part: the chat template, the greedy decoding and the reading of the answer (the last
whole number of the completion) are done anew, so that the held-out score of a run can be checked.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import tomli
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 50


def main(folder: Path) -> None:
    """Print the score of the export beside the run's own.

    Args:
        folder: The run's ``dump_folder``.
    """
    config = tomli.loads((folder / "config.toml").read_text(encoding="utf-8"))
    last = max((folder / "rollouts").glob("evaluation-*.rank-0.jsonl"))
    records = [
        json.loads(line)
        for path in sorted(last.parent.glob(last.name.replace("rank-0", "rank-*")))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder / "export", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32).eval()
    system = config["data"].get("system_prompt", "")
    texts = [
        tokenizer.apply_chat_template(
            ([{"role": "system", "content": system}] if system else []) + record["messages"],
            tokenize=False,
            add_generation_prompt=True,
        )
        for record in records
    ]
    num_right = num_same = 0
    for start in range(0, len(texts), BATCH):
        inputs = tokenizer(
            texts[start : start + BATCH], return_tensors="pt", padding=True, add_special_tokens=False
        )
        with torch.no_grad():
            outputs = model.generate(
                **inputs, do_sample=False, max_new_tokens=config["sampling"]["max_tokens"]
            )
        replies = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for record, reply in zip(records[start:], replies, strict=False):
            numbers = re.findall(r"-?\d+", reply)
            num_right += bool(numbers) and int(numbers[-1]) == int(record["answer"])
            num_same += reply == record["completion"]
    own = sum(record["reward"] == 1.0 for record in records)
    print(
        f"{len(records)} prompts: {num_right / len(records):.3f} in transformers, "
        f"{own / len(records):.3f} in the run; {num_same} completions are the same text"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
