"""``torchrun ... -m titan_rl.evaluate CONFIG.toml [--section.key value ...]``: score held-out prompts.

The configuration is the training run's. Its newest checkpoint is restored (``--checkpoint.load_step 20``:
another one; ``checkpoint.enable = false`` or no checkpoint yet: the initial weights), brought to the
generator, and evaluated under ``[evaluation]``; ``--evaluation.samples_per_prompt 4 --evaluation.temperature
1.0`` gives pass@4. Nothing is trained, and no file of the training run changes: results go to
``<dump_folder>/evaluation/step-NNNNNN.json``, rollouts beside them.

A checkpoint goes with the prompts that it was trained on. To score an exported model on other prompts, name
its directory: ``--model.hf_assets_path outputs/run/export --checkpoint.enable false``.
"""

from __future__ import annotations

import logging
import sys

from titan_rl.trainers.command import start


def main(arguments: list[str] | None = None) -> int:
    """Evaluate, and return the exit code: 0 only when the scores were written.

    Args:
        arguments: Without the program's name; the process's own by default.
    """
    return start(arguments, module="titan_rl.evaluate", evaluate_only=True)


if __name__ == "__main__":
    logging.captureWarnings(True)
    sys.exit(main())
