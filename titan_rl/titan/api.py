"""TorchTitan's names that the layers above use, in one place; :mod:`titan_rl.titan.symbols` says what for."""

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.validate import Validator
from torchtitan.config.configs import CommConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC, SelectiveAC
from torchtitan.distributed.utils import dist_sum, set_pg_timeouts
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

__all__ = [
    "IGNORE_INDEX",
    "BaseDataLoader",
    "CheckpointManager",
    "CommConfig",
    "CrossEntropyLoss",
    "LRSchedulersContainer",
    "MemoryBudgetAC",
    "MetricsProcessor",
    "ModelSpec",
    "Profiler",
    "SelectiveAC",
    "Trainer",
    "TrainingConfig",
    "Validator",
    "dist_sum",
    "init_logger",
    "logger",
    "set_pg_timeouts",
]
