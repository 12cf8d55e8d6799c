"""From messages to tokens and back: a model's tokenizer, its chat template and its stop tokens.

The only module of this package that imports transformers (and, through it, torch). What is drawn and in which
order is not decided here, except that prompts which are too long are found before the first draw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from titan_rl.data.datasets import FilteredDataset, PromptDataset
from titan_rl.errors import ConfigError
from titan_rl.types import Json, Message, Prompt

_BATCH = 512
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


class PromptEncoder:
    """Encodes the messages of a prompt exactly as they are given to the policy.

    With a chat template: the template renders the messages and the start of the reply, and the text is
    encoded without adding further special tokens. Without: the contents, separated by an empty line, are
    encoded with the tokens that the tokenizer itself puts in front (usually a beginning-of-sequence token or
    nothing).
    """

    def __init__(
        self,
        tokenizer_dir: str | Path,
        *,
        system_prompt: str | None,
        max_prompt_tokens: int,
        use_chat_template: bool | None = None,
        template_kwargs: Mapping[str, Json] | None = None,
    ) -> None:
        """Load a tokenizer. Nothing is downloaded and no code of the directory is run.

        Args:
            tokenizer_dir: Directory with the tokenizer's files and, if there are, ``generation_config.json``
                and ``config.json``, which can name further stop tokens.
            system_prompt: Text of a system message in front of prompts that do not bring their own.
            max_prompt_tokens: Longest prompt that :meth:`fits`, in tokens, at least 1.
            use_chat_template: True or False, or None: use it if the tokenizer has one.
            template_kwargs: Further variables of the template, such as ``enable_thinking``.

        Raises:
            ConfigError: The directory holds no tokenizer that can be loaded, or no chat template although one
                was asked for.
        """
        if max_prompt_tokens < 1:
            raise ConfigError(
                "max_prompt_tokens", "be at least 1", max_prompt_tokens, "Set it to the longest prompt."
            )
        self._directory = Path(tokenizer_dir)
        self._tokenizer = _load(self._directory)
        self._system_prompt = system_prompt
        self._template_kwargs = dict(template_kwargs or {})
        self.max_prompt_tokens = max_prompt_tokens
        has_template = bool(self._tokenizer.chat_template)
        if use_chat_template and not has_template:
            raise ConfigError(
                "use_chat_template",
                "be false for a tokenizer without a chat template",
                str(self._directory),
                "Delete the key, or use an instruction-tuned model's tokenizer.",
            )
        self.uses_chat_template = has_template if use_chat_template is None else use_chat_template
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.stop_token_ids = _stop_token_ids(self._directory, self.eos_token_id)
        self.vocab_size = len(self._tokenizer)
        self.fingerprint = self._fingerprint()

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text that :meth:`encode` encodes.

        Raises:
            ConfigError: The chat template refuses the messages (some know no system role).
        """
        if self._system_prompt is not None and not any(message.role == "system" for message in messages):
            messages = [Message("system", self._system_prompt), *messages]
        if not self.uses_chat_template:
            return "\n\n".join(message.content for message in messages)
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False, **self._template_kwargs
            )
        except TemplateError as error:
            raise ConfigError(
                f"The chat template of {self._directory}",
                "accept the messages of every prompt",
                f"{', '.join(message.role for message in messages)} ({error})",
                "Change the roles, delete the system prompt, or set use_chat_template = false.",
            ) from error

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a prompt, at least one. Its length is not limited here; see :meth:`fits`.

        Raises:
            ConfigError: The template refuses the messages, or nothing is left to encode.
        """
        return self._encode_texts([self.render(messages)])[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens and without any clean-up of spaces."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def num_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the length of each prompt, in tokens."""
        return [len(ids) for ids in self._encode_texts([self.render(prompt.messages) for prompt in prompts])]

    def encode_with_answer(self, prompt: Prompt) -> tuple[list[int], list[bool]]:
        """Return a supervised sequence: prompt, reference answer, end of sequence.

        The answer is encoded by itself, so that the tokens of the prompt are those of :meth:`encode`.

        Returns:
            N token ids, and N booleans: True for the answer's tokens and the end of sequence.

        Raises:
            ConfigError: The prompt has no answer, or the tokenizer no token for the end of sequence.
        """
        if prompt.answer is None:
            raise ConfigError(
                f"Prompt {prompt.id}",
                "have a reference answer",
                None,
                "Set answer_column in [data.source].",
            )
        prompt_ids = self.encode(prompt.messages)
        trained = [*self._encode_alone(prompt.answer), self._end()]
        return prompt_ids + trained, [False] * len(prompt_ids) + [True] * len(trained)

    def encode_conversation(self, prompt: Prompt) -> list[tuple[list[int], list[bool]]]:
        """Return the supervised sequences in which every assistant message, and the answer, is trained once.

        Usually one: the template renders what was said so far unchanged when the conversation goes on, with
        an end of sequence behind each reply. Where it does not (some templates drop earlier reasoning), the
        next reply starts another sequence, so that each is trained behind exactly the tokens that
        :meth:`encode` gives for the messages before it. Without a chat template nothing marks earlier
        replies: they are prompt, as in :meth:`encode_with_answer`.

        Returns:
            Pairs as from :meth:`encode_with_answer`.

        Raises:
            ConfigError: As :meth:`encode_with_answer`, or the template refuses the messages.
        """
        replies = [i for i, message in enumerate(prompt.messages) if message.role == "assistant"]
        if not (replies and self.uses_chat_template) or prompt.answer is None:
            return [self.encode_with_answer(prompt)]
        messages = [*prompt.messages, Message("assistant", prompt.answer)]
        documents: list[tuple[list[int], list[bool]]] = []
        said = None  # the text of the last sequence
        for index in [*replies, len(prompt.messages)]:
            before, content = self.render(messages[:index]), messages[index].content
            between: list[int] = []
            if said is not None and before.startswith(said):
                between = self._encode_alone(before[len(said) :])
            if between and between[0] in self.stop_token_ids:
                ids, trained = documents[-1]
                ids += between
                trained += [True] + [False] * (len(between) - 1)
            else:
                ids = self._encode_texts([before])[0]
                trained = [False] * len(ids)
                documents.append((ids, trained))
            reply = self._encode_alone(content)
            ids += reply
            trained += [True] * len(reply)
            said = before + content
        for ids, trained in documents:
            ids.append(self._end())
            trained.append(True)
        return documents

    def _encode_alone(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _end(self) -> int:
        """The token that ends a reply."""
        if self.eos_token_id is not None:
            return self.eos_token_id
        if not self.stop_token_ids:
            raise ConfigError(
                str(self._directory),
                "define an end-of-sequence token",
                None,
                "Set eos_token in its config.",
            )
        return self.stop_token_ids[0]

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        rows = self._tokenizer(texts, add_special_tokens=not self.uses_chat_template)["input_ids"]
        if not self.uses_chat_template and self.eos_token_id is not None:
            # Some tokenizers close every text; a prompt that is closed cannot be continued.
            rows = [row[:-1] if row and row[-1] == self.eos_token_id else row for row in rows]
        for text, row in zip(texts, rows, strict=True):
            if not row:
                raise ConfigError(
                    "A prompt",
                    "have at least one token",
                    f"the text {text!r}",
                    "Remove prompts without text.",
                )
        return rows

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in _TOKENIZER_FILES:
            path = self._directory / name
            content = path.read_bytes() if path.exists() else b""
            digest.update(f"{name}:{len(content)}:".encode() + content)
        settings = [self._system_prompt, self.uses_chat_template, self._template_kwargs, self.stop_token_ids]
        digest.update(json.dumps(settings, sort_keys=True).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class LengthReport:
    """What :func:`check_prompts` found.

    Attributes:
        num_prompts: Prompts of the dataset.
        num_too_long: Those with more than ``max_prompt_tokens`` tokens.
    """

    num_prompts: int
    num_too_long: int


def check_prompts(
    dataset: PromptDataset, encoder: PromptEncoder, *, too_long: Literal["error", "skip"]
) -> tuple[PromptDataset, LengthReport]:
    """Encode every prompt once, before the first draw.

    All prompts are encoded, whatever the size of the dataset: a sample would let a run stop in the middle,
    and the number of characters bounds the number of tokens for some tokenizers only. Which prompts are kept
    is thus known before the first draw, depends on dataset and encoder alone, and the cursor rule holds over
    what is kept.

    Args:
        dataset: The prompts.
        encoder: How long they are and may be.
        too_long: What a prompt that is too long does: ``"error"`` raises, ``"skip"`` leaves it out.

    Returns:
        The dataset itself when every prompt fits, else a :class:`FilteredDataset`; and what was found.

    Raises:
        ConfigError: A prompt is too long and ``too_long`` is ``"error"``, or every prompt is.
    """
    kept: list[int] = []
    longest, first = 0, None
    for start in range(0, len(dataset), _BATCH):
        prompts = [dataset[index] for index in range(start, min(start + _BATCH, len(dataset)))]
        for index, length in enumerate(encoder.num_tokens(prompts), start):
            longest = max(longest, length)
            if length <= encoder.max_prompt_tokens:
                kept.append(index)
            elif first is None:
                first = prompts[index - start].id
    report = LengthReport(len(dataset), len(dataset) - len(kept))
    if not report.num_too_long:
        return dataset, report
    if too_long == "error" or not kept:
        which = "Every" if too_long == "error" else "Some"
        raise ConfigError(
            f"{which} prompt of {dataset.name}",
            f"have at most max_prompt_tokens = {encoder.max_prompt_tokens} tokens",
            f"{report.num_too_long} of {report.num_prompts} longer (first: {first}), up to {longest} tokens",
            "Raise max_prompt_tokens, or skip prompts that are too long.",
        )
    return FilteredDataset(dataset, kept), report


def read_vocabulary(tokenizer_dir: str | Path) -> dict[str, int]:
    """Every token of a tokenizer with its number.

    Raises:
        ConfigError: The directory holds no tokenizer that can be loaded.
    """
    return _load(Path(tokenizer_dir)).get_vocab()


def has_same_vocabulary(theirs: str | Path, ours: str | Path, *, where: str, why: str) -> bool:
    """Compare the tokenizer of another model with the policy's, token by token.

    Args:
        theirs: Directory of the other model.
        ours: Directory of the policy.
        where: The key that names the other model, for errors.
        why: Why they have to agree, for errors.

    Returns:
        False when one of the directories holds no ``tokenizer.json``, so that nothing was compared.

    Raises:
        ConfigError: A token has different numbers, or one of them lacks it.
    """
    if not all(path and (Path(path) / "tokenizer.json").is_file() for path in (theirs, ours)):
        return False
    policy, other = read_vocabulary(ours), read_vocabulary(theirs)
    differing = {token for token, _ in policy.items() ^ other.items()}
    if differing:
        example = min(differing)
        raise ConfigError(
            where,
            f"hold the tokenizer of model.hf_assets_path: {why}",
            f"{len(differing)} tokens that differ, such as {example!r}: {other.get(example)} for "
            f"{policy.get(example)}",
            "Take a model of the policy's family.",
        )
    return True


def _load(directory: Path) -> Any:
    if not directory.is_dir():
        raise ConfigError(
            "The tokenizer directory",
            "exist",
            str(directory),
            "Correct the path, or download the model first.",
        )
    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the Rust parser raises bare Exception; its own message is what helps
        problem = (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        )
        raise ConfigError(
            str(directory),
            "hold a tokenizer that transformers can load",
            problem,
            "Copy the model's files again.",
        ) from error


def _stop_token_ids(directory: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """Ids from the tokenizer, ``generation_config.json`` and ``config.json``, sorted."""
    found = set() if eos_token_id is None else {eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.exists():
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(str(path), "be JSON", str(error), "Copy the model's files again.") from error
        found.update(_eos_ids(values, path))
        if name == "config.json" and isinstance(values.get("text_config"), dict):
            found.update(_eos_ids(values["text_config"], path))
    return tuple(sorted(found))


def _eos_ids(values: Any, path: Path) -> Iterable[int]:
    value = values.get("eos_token_id") if isinstance(values, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(
                f"{path}: eos_token_id",
                "be a token id or a list of them",
                value,
                "Copy the model's files again.",
            )
    return ids
