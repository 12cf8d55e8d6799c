"""Validation of supervised runs: loss and accuracy on held-out documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import nn
from torch.distributed.tensor import DTensor

from titan_rl import heartbeat
from titan_rl.config.choice import build
from titan_rl.errors import StopRequestedError
from titan_rl.observability.summary import read_json, steps_in, write_json
from titan_rl.titan.api import IGNORE_INDEX, Validator, dist_sum, logger
from titan_rl.titan.device import choose_device
from titan_rl.titan.sharded_model import fsdp_modules
from titan_rl.trainers.supervised_data import Encoder, Row, SupervisedDataSection, to_batch

_Batch = tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]
_SUMS = ("loss", "tokens", "right_tokens", "documents", "wrong_documents")


@dataclass(kw_only=True, slots=True)
class ValidationSection:
    """Table ``[validation]`` of a supervised run."""

    interval_steps: Annotated[int, Ge(0)] = 0
    """Optimiser steps from one validation to the next. There is always one before the first step of the run
    and one after the last; 0: only these."""

    num_documents: Annotated[int, Ge(0)] = 1000
    """Most held-out prompts of each source; 0: no validation."""


class LeftOver:
    """Whether the validation of the last step is still to be done, in the run's checkpoint.

    Attributes:
        is_validation_left: It was given up, because the run was asked to stop.
    """

    def __init__(self) -> None:
        self.is_validation_left = False

    def state_dict(self) -> dict[str, Any]:
        """The attribute as a tensor."""
        return {"is_validation_left": torch.tensor(self.is_validation_left, dtype=torch.int64)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self.is_validation_left = bool(state_dict["is_validation_left"])


class HeldOutValidator(Validator):
    """TorchTitan's place for a validation, filled with the documents that the sources hold out.

    Attributes:
        measured: The loss of the last validation, by its step.
        left_over: Whether the last validation was given up.
        unless_stopping: Goes through the batches, and gives up when the run is asked to stop.
    """

    unless_stopping: Callable[[Iterable[_Batch]], Iterable[_Batch]]

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """Set by the trainer from ``[validation]`` and ``[data]``."""

        section: ValidationSection = field(default_factory=ValidationSection)
        """The table."""

        data: SupervisedDataSection = field(default_factory=SupervisedDataSection)
        """Which sources."""

        last_step: int = 0
        """``training.steps``."""

        folder: str = ""
        """``dump_folder``."""

    def __init__(self, config: Config, **given: Any) -> None:
        """Encode and pack the held-out documents.

        Args:
            config: What to score, and when.
            given: What TorchTitan gives to every validator.
        """
        self.config: Any = config
        self.measured: dict[int, float] = {}
        self.left_over, self.unless_stopping = LeftOver(), iter
        self.parallelism, self.parallel_dims = given["parallelism"], given["parallel_dims"]
        self.loss_fn, self.validation_context = given["loss_fn"], given["validation_context"]
        self.metrics_processor = given["metrics_processor"]
        self._device = torch.device(choose_device())
        self._ranks, self._rank = given["dp_world_size"], given["dp_rank"]
        self._row_tokens, self._rows_per_batch = given["seq_len"], given["local_batch_size"]
        encoder = Encoder(
            config.data, tokenizer_dir=Path(given["tokenizer"].tokenizer_path), row_tokens=self._row_tokens
        )
        self._rows, self.num_documents = self._pack(encoder)
        if self._rows and self.parallel_dims.pp_enabled:
            logger.warning("Held-out documents are not scored under pipeline parallelism.")
            self._rows = []

    def should_validate(self, step: int) -> bool:
        """Whether held-out documents are scored after this step."""
        interval = self.config.section.interval_steps
        is_due = step in (0, self.config.last_step) or bool(interval and step % interval == 0)
        return bool(self._rows) and is_due

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Score all held-out documents and report loss and accuracy. Collective.

        When the run is asked to stop, this is left to the start that continues it.
        """
        for model in model_parts:
            model.eval()
        sums, self.left_over.is_validation_left = torch.zeros(len(_SUMS), dtype=torch.float64), True
        try:
            with heartbeat.phase("evaluate"):
                for inputs, labels, documents in self.unless_stopping(self._batches()):
                    heartbeat.beat()
                    sums += self._score(model_parts, inputs, labels, documents)
            self.left_over.is_validation_left = False
        except StopRequestedError:
            return
        finally:
            for model in model_parts:
                model.train()
                for module in fsdp_modules(model):  # nothing gathered outlives this
                    module.reshard()
        self._report(step, sums)

    def _pack(self, encoder: Encoder) -> tuple[list[Row], int]:
        """All held-out documents in rows, first come first served; the same on all ranks."""
        rows: list[Row] = []
        count = 0
        for entry in self.config.data.mixture:
            prompts = build(entry.source, split="held_out")
            for index in range(min(self.config.section.num_documents, len(prompts))):
                for ids, trained in encoder.documents(prompts[index]):
                    if not rows or len(rows[-1].tokens) + len(ids) > self._row_tokens:
                        rows.append(Row())
                    rows[-1].add(ids, trained, number=count)
                    count += 1
        for row in rows:
            row.pad(self._row_tokens)
        return rows, count

    def _batches(self) -> Iterator[_Batch]:
        """This rank's batches, as many as every other rank has."""
        together = self._ranks * self._rows_per_batch
        empty = Row()
        empty.pad(self._row_tokens)
        for start in range(0, len(self._rows), together):
            rows = self._rows[start : start + together]
            rows = rows + [empty] * (together - len(rows))
            yield to_batch(rows[self._rank * self._rows_per_batch : (self._rank + 1) * self._rows_per_batch])

    def _score(
        self,
        model_parts: list[nn.Module],
        inputs: dict[str, torch.Tensor],
        labels: torch.Tensor,
        documents: torch.Tensor,
    ) -> torch.Tensor:
        """The sums of one batch, in the order of ``_SUMS``."""
        inputs = {name: value.to(self._device) for name, value in inputs.items()}
        tokens, mine, kwargs = self.post_dataloading_process(inputs, labels.to(self._device), model_parts)
        with self.validation_context():
            logits = model_parts[0](tokens, **kwargs)
            loss, _ = self.loss_fn(logits, mine)
        is_label = mine != IGNORE_INDEX
        sums = [loss.full_tensor() if isinstance(loss, DTensor) else loss, is_label.sum()]
        # Under tensor or context parallelism a rank sees parts of vocabulary or row: the loss alone is known.
        if not (self.parallel_dims.tp_enabled or self.parallel_dims.cp_enabled):
            is_wrong = is_label & (logits.argmax(-1) != mine)
            documents = documents.to(self._device)
            wrong = documents[is_wrong].unique()
            sums += [(is_label & ~is_wrong).sum(), documents[is_label].unique().numel(), wrong.numel()]
        padded = [float(value) for value in sums] + [0.0] * (len(_SUMS) - len(sums))
        return torch.tensor(padded, dtype=torch.float64)

    def _report(self, step: int, local: torch.Tensor) -> None:
        mesh = self.parallel_dims.get_optional_mesh("loss") if self.parallel_dims.dp_cp_enabled else None
        reduced = [
            float(value) if mesh is None else dist_sum(value.to(self._device), mesh) for value in local
        ]
        sums = dict(zip(_SUMS, reduced, strict=True))
        metrics = {"loss": sums["loss"] / max(sums["tokens"], 1)}
        if sums["documents"]:
            metrics["token_accuracy"] = sums["right_tokens"] / max(sums["tokens"], 1)
            metrics["document_accuracy"] = 1 - sums["wrong_documents"] / sums["documents"]
        self.metrics_processor.logger.log({f"validation/{k}": v for k, v in metrics.items()}, step)
        self.measured = {step: metrics["loss"]}
        shown = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
        logger.info("step %d  held out, %d documents: %s", step, self.num_documents, shown)
        if dist.get_rank() == 0:
            self._write(step, metrics)

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        """Add to ``validation.json``: metrics by step; a resumed run writes later steps anew."""
        path = Path(self.config.folder) / "validation.json"
        known = {
            number: value for number, value in steps_in(read_json(path), "steps").items() if number < step
        }
        known[step] = metrics
        write_json(path, {"num_documents": self.num_documents, "steps": known})
