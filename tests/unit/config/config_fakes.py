"""Dataclasses that look like TorchTitan's and like ours, for the tests of this directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Interval, Le, MinLen

from titan_rl.config.choice import Choice
from titan_rl.config.rules import As, Hidden, Limits, Rules

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = __name__


class Configurable:
    """As in TorchTitan: wires ``_owner`` onto the nested Config."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            vars(cls)["Config"]._owner = cls


class SelectiveAC(Configurable):
    """Saves some activations."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        preserve_rng_state: bool = True
        """Whether dropout repeats."""
        fqns: list[str] = field(default_factory=lambda: ["moe.router.gate"])


class FullAC(Configurable):
    """Saves no activations."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        debug: bool = False


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    steps: int = 10000
    """How many train steps to run"""

    global_batch_size: int = -1
    max_norm: float | int = 1.0
    """
    Max norm for
    gradient clipping
    """
    dtype: Literal["bfloat16", "float32"] = "float32"
    disable_cuda_graphs: bool = False


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """What is compiled.

    More of it.
    """

    enable: bool = False
    enable_async_tensor_parallel: bool = False
    components: list[str] = field(default_factory=lambda: ["model", "loss"])

    def __post_init__(self) -> None:
        if self.enable_async_tensor_parallel and not self.enable:
            raise ValueError("Async TP requires --compile.enable")


@dataclass(kw_only=True, slots=True)
class ParamGroup:
    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class OptimizersConfig:
    param_groups: list[ParamGroup] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Adam:
    """One group for all parameters."""

    lr: Annotated[float, Gt(0)] = 1e-6
    """Learning rate, per step."""
    betas: tuple[float, float] = (0.9, 0.95)


def to_groups(owned: Adam) -> OptimizersConfig:
    if owned.betas[0] >= owned.betas[1]:
        raise ValueError("betas must rise")
    kwargs = {"lr": owned.lr, "betas": owned.betas}
    return OptimizersConfig(
        param_groups=[ParamGroup(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=kwargs)]
    )


def from_groups(config: OptimizersConfig) -> Adam:
    return Adam(**config.param_groups[0].optimizer_kwargs)


class BaseCheckpoint:
    @dataclass(kw_only=True, slots=True)
    class Config:
        interval: int = 500


class Checkpoint(BaseCheckpoint):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpoint.Config):
        async_mode: Literal["disabled", "async"] = "disabled"
        last: list[list[str]] | None = None


class Mode(StrEnum):
    ASK = "ask"
    GO = "go"


@dataclass(kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    group_size: Annotated[int, Ge(1)] = 8
    """Rollouts of one prompt."""
    temperature: Annotated[float, Interval(gt=0, le=2)] = 1.0
    top_k: Annotated[int, Ge(0)] | None = None
    stop: Annotated[tuple[str, ...], MinLen(1)] = ("</s>",)
    mode: Mode = Mode.GO
    folder: Path = Path("outputs")
    window: tuple[int, float] = (1, 0.5)
    options: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Annotated[float, Le(1)]] = field(default_factory=dict)
    either: int | str | None = "auto"


class Local:
    """The exact generator."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        cache_tokens: Annotated[int, Ge(1)] = 64
        """Length of the cache in tokens."""

    def __init__(self, config: Local.Config, device: str = "cpu") -> None:
        self.config, self.device = config, device


class LocalChild(Local):
    """Inherits its parent's Config."""


class Engine:
    @dataclass(kw_only=True, slots=True)
    class Config:
        memory_fraction: float = 0.5
        sampling: Sampling | None = None

    def __init__(self, config: Engine.Config) -> None:
        self.config = config


class NoConfig:
    pass


class Maths:
    @dataclass(kw_only=True, slots=True)
    class Config:
        weight: float = 1.0


class Length:
    @dataclass(kw_only=True, slots=True)
    class Config:
        max_tokens: int
        """Longest completion in tokens."""
        weight: float = 1.0


GENERATORS = {"local": f"{HERE}:Local", "engine": f"{HERE}:Engine"}
REWARDS = {"math": f"{HERE}:Maths", "length": f"{HERE}:Length"}


@dataclass(kw_only=True, slots=True)
class Dataset:
    path: str
    """Where the prompts are."""
    limit: int | None = None


@dataclass(kw_only=True, slots=True)
class Critic:
    lr: float = 1e-5
    head: Dataset | None = None


@dataclass(kw_only=True, slots=True)
class Root:
    """A whole run."""

    model_spec: Callable[[NotImported], int] | None = None  # noqa: F821
    dump_folder: str = "./outputs"
    name: str | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    optimizer: OptimizersConfig = field(default_factory=lambda: to_groups(Adam()))
    checkpoint: BaseCheckpoint.Config = field(default_factory=Checkpoint.Config)
    activation_checkpoint: SelectiveAC.Config | FullAC.Config | None = field(
        default_factory=SelectiveAC.Config
    )
    sampling: Sampling = field(default_factory=Sampling)
    generator: Annotated[object, Choice(GENERATORS)] = field(default_factory=Local.Config)
    draft: Annotated[object | None, Choice(GENERATORS, default="local")] = None
    reward: Annotated[list[Annotated[object, Choice(REWARDS)]], MinLen(1)] = field(
        default_factory=lambda: [Maths.Config()]
    )
    data: list[Dataset] = field(default_factory=list)
    critic: Critic | None = None
    """The value model."""


RULES: Rules = {
    (Root, "model_spec"): Hidden("Set model.flavor."),
    (TrainingConfig, "global_batch_size"): Hidden("Set data.prompts_per_iteration."),
    (TrainingConfig, "steps"): Limits((Ge(1),)),
    (Root, "activation_checkpoint"): Choice(
        {"none": None, "selective": f"{HERE}:SelectiveAC", "full": f"{HERE}:FullAC"}
    ),
    (Root, "optimizer"): As(Adam, from_owned=to_groups, to_owned=from_groups),
}
