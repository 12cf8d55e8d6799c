import copy
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import annotated_types
import config_fakes as fakes
import pytest

from titan_rl.config.locations import ManyConfigError
from titan_rl.config.overlay import overlay
from titan_rl.config.rules import Hidden
from titan_rl.config.schema import check, make_schema
from titan_rl.config.toml import Document, load_document
from titan_rl.errors import ConfigError

SCHEMA = make_schema(fakes.Root(), fakes.RULES)


def load(table: dict[str, Any], default: fakes.Root | None = None) -> fakes.Root:
    return overlay(default or fakes.Root(), table, rules=fakes.RULES)


def message(table: dict[str, Any], *, by_schema: bool = True) -> str:
    """The error of the overlay; the schema must give the very same one, before anything is imported."""
    with pytest.raises(ConfigError) as caught:
        load(table)
    if by_schema:
        with pytest.raises(ConfigError) as checked:
            check(table, SCHEMA, Document(table, "run.toml"))
        assert str(checked.value).replace("run.toml: ", "") == str(caught.value)
    return str(caught.value)


def test_an_empty_table_gives_the_defaults():
    assert load({}) == fakes.Root()


def test_values_of_every_kind_are_taken_over():
    table = {
        "dump_folder": "there",
        "name": "none",
        "training": {"steps": 5, "dtype": "bfloat16", "disable_cuda_graphs": True, "max_norm": 2},
        "checkpoint": {"async_mode": "async", "last": [["a"], []]},
        "sampling": {
            "temperature": 2,
            "top_k": 3,
            "stop": ["a", "b"],
            "mode": "ask",
            "folder": "elsewhere",
            "window": [3, 1],
            "options": {"x": [1, {"y": True}]},
            "weights": {"a": 1},
            "either": 5,
        },
        "reward": [{"type": "length", "max_tokens": 9}, {"type": "math"}],
        "data": [{"path": "p", "limit": 4}],
        "critic": {"head": {"path": "q"}},
    }
    made = load(table)
    assert made.checkpoint == fakes.Checkpoint.Config(async_mode="async", last=[["a"], []])
    assert made.sampling == fakes.Sampling(
        temperature=2.0,
        top_k=3,
        stop=("a", "b"),
        mode=fakes.Mode.ASK,
        folder=Path("elsewhere"),
        window=(3, 1.0),
        options={"x": [1, {"y": True}]},
        weights={"a": 1.0},
        either=5,
    )
    assert type(made.sampling.temperature) is float
    assert made.reward == [fakes.Length.Config(max_tokens=9), fakes.Maths.Config()]
    assert made.data == [fakes.Dataset(path="p", limit=4)]
    assert made.critic == fakes.Critic(head=fakes.Dataset(path="q"))
    check(table, SCHEMA, Document(table, "run.toml"))


def test_an_integer_stays_one_where_both_kinds_are_allowed():
    assert type(load({"training": {"max_norm": 2}}).training.max_norm) is int
    assert type(load({"training": {"max_norm": 2.0}}).training.max_norm) is float


def test_the_string_none_stands_for_none():
    default = fakes.Root(name="a", critic=fakes.Critic(), sampling=fakes.Sampling(top_k=4, either="a"))
    made = load({"name": "none", "critic": "none", "sampling": {"top_k": "none", "either": "none"}}, default)
    assert made.name is None
    assert made.critic is None
    assert made.sampling.top_k is None
    assert made.sampling.either is None


def test_the_defaults_are_not_changed_and_untouched_sections_are_shared():
    default = fakes.Root()
    before = copy.deepcopy(default)
    made = load({"training": {"steps": 5}, "sampling": {"options": {"a": 1}}}, default)
    assert default == before
    assert made.compile is default.compile
    assert made.training is not default.training


def test_a_section_that_is_present_is_on_and_keeps_the_values_of_a_default():
    assert load({"critic": {}}).critic == fakes.Critic()
    default = fakes.Root(critic=fakes.Critic(lr=5.0))
    assert load({"critic": {"head": {"path": "a"}}}, default).critic.lr == 5.0


def test_the_runtime_class_of_a_section_counts_and_not_the_declared_one():
    assert load({"checkpoint": {"async_mode": "async"}}).checkpoint == fakes.Checkpoint.Config(
        async_mode="async"
    )
    plain = fakes.Root(checkpoint=fakes.BaseCheckpoint.Config())
    with pytest.raises(ConfigError, match=r"checkpoint\.async_mode must be a key of"):
        load({"checkpoint": {"async_mode": "async"}}, plain)


def test_a_field_is_shown_as_another_dataclass():
    made = load({"optimizer": {"lr": 1.0}})
    assert made.optimizer.param_groups[0].optimizer_kwargs == {"lr": 1.0, "betas": (0.9, 0.95)}
    assert message({"optimizer": {"param_groups": []}}) == (
        "optimizer.param_groups must be a key of [optimizer]; got []. The keys are lr, betas."
    )
    assert message({"optimizer": {"betas": [0.9, 0.5]}}, by_schema=False) == (
        "optimizer.betas must be accepted by Adam; got betas = [0.9, 0.5]. betas must rise."
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            {"training": {"stps": 5}},
            "training.stps must be a key of [training]; got 5. Did you mean 'steps'?",
        ),
        (
            {"critic": {"x": 5}},
            "critic.x must be a key of [critic]; got 5. The keys are lr, head.",
        ),
        (
            {"trainin": {}},
            "trainin must be a known section or key; got {}. Did you mean 'training'?",
        ),
        (
            {"training": {"steps": "5"}},
            "training.steps must be an integer >= 1; got '5'. Remove the quotes.",
        ),
        (
            {"training": {"steps": "many"}},
            "training.steps must be an integer >= 1; got 'many'. The default is 10000.",
        ),
        (
            {"training": {"steps": True}},
            "training.steps must be an integer >= 1; got True. The default is 10000.",
        ),
        (
            {"training": {"steps": 5.0}},
            "training.steps must be an integer >= 1; got 5.0. The default is 10000.",
        ),
        (
            {"training": {"steps": 0}},
            "training.steps must be an integer >= 1; got 0. The default is 10000.",
        ),
        (
            {"training": {"max_norm": False}},
            "training.max_norm must be a number; got False. The default is 1.0.",
        ),
        (
            {"training": {"max_norm": float("nan")}},
            "training.max_norm must be a number; got nan. The default is 1.0.",
        ),
        (
            {"training": {"disable_cuda_graphs": "True"}},
            "training.disable_cuda_graphs must be true or false; got 'True'. Write true without quotes.",
        ),
        (
            {"training": {"disable_cuda_graphs": 1}},
            "training.disable_cuda_graphs must be true or false; got 1. The default is false.",
        ),
        (
            {"training": {"dtype": "bfloat"}},
            "training.dtype must be one of 'bfloat16', 'float32'; got 'bfloat'. Did you mean 'bfloat16'?",
        ),
        (
            {"training": {"dtype": 16}},
            "training.dtype must be one of 'bfloat16', 'float32'; got 16. The default is \"float32\".",
        ),
        (
            {"training": {"global_batch_size": 8}},
            "training.global_batch_size must be left out; got 8. Set data.prompts_per_iteration.",
        ),
        (
            {"training": 5},
            "training must be a table; got 5. Write a section with its keys.",
        ),
        (
            {"training": False},
            "training must be a table; got False. Only an inherited section can be removed with false: "
            "leave this out.",
        ),
        (
            {"critic": "non"},
            "critic must be a table or \"none\"; got 'non'. Write a section with its keys.",
        ),
        (
            {"draft": True},
            'draft must be a table or "none"; got True. Write a section with its keys.',
        ),
        (
            {"generator": "local"},
            "generator must be a table; got 'local'. Write a section with its keys.",
        ),
        (
            {"dump_folder": 3},
            'dump_folder must be a string; got 3. Put it into quotes: "3".',
        ),
        (
            {"sampling": {"temperature": 0}},
            "sampling.temperature must be a number > 0 and <= 2; got 0. The default is 1.0.",
        ),
        (
            {"sampling": {"top_k": -1}},
            'sampling.top_k must be an integer >= 0; got -1. The default is "none".',
        ),
        (
            {"sampling": {"top_k": 1.5}},
            'sampling.top_k must be an integer >= 0 or "none"; got 1.5. The default is "none".',
        ),
        (
            {"sampling": {"stop": "</s>"}},
            "sampling.stop must be an array of strings with at least 1 element(s); got '</s>'. "
            'Put it into brackets: ["</s>"].',
        ),
        (
            {"sampling": {"stop": []}},
            "sampling.stop must be an array of strings with at least 1 element(s); got []. "
            'The default is ["</s>"].',
        ),
        (
            {"sampling": {"stop": ["a", 3]}},
            'sampling.stop.1 must be a string; got 3. Put it into quotes: "3".',
        ),
        (
            {"sampling": {"window": [1, "a"]}},
            "sampling.window.1 must be a number; got 'a'. Change it.",
        ),
        (
            {"sampling": {"window": [1]}},
            "sampling.window must be an array of 2 (an integer, a number); got [1]. The default is [1, 0.5].",
        ),
        (
            {"sampling": {"weights": {"a": 3}}},
            "sampling.weights.a must be a number <= 1; got 3. Change it.",
        ),
        (
            {"sampling": {"mode": "asc"}},
            "sampling.mode must be one of 'ask', 'go'; got 'asc'. Did you mean 'ask'?",
        ),
        (
            {"checkpoint": {"last": [["a"], "b"]}},
            "checkpoint.last.1 must be an array of strings; got 'b'. Put it into brackets: [\"b\"].",
        ),
        (
            {"data": [{"limit": 3}]},
            "data.0.path must be given; got no value. Add path = ... to [data.0].",
        ),
        (
            {"data": {"path": "a"}},
            "data must be an array of tables; got {'path': 'a'}. Write it as [[data]].",
        ),
        (
            {"critic": {"head": {}}},
            "critic.head.path must be given; got no value. Add path = ... to [critic.head].",
        ),
        (
            {"reward": []},
            "reward must be an array of tables with at least 1 element(s); got []. Write it as [[reward]].",
        ),
        (
            {"reward": [{"weight": 1.0}]},
            "reward.0.type must be given; got no value. Add type = ... to [reward.0].",
        ),
        (
            {"reward": [{"type": "math", "wight": 1.0}]},
            "reward.0.wight must be a key of [reward.0] of type \"math\"; got 1.0. Did you mean 'weight'?",
        ),
        (
            {"generator": {"type": 3}},
            "generator.type must be one of 'local', 'engine' or \"package.module:Class\"; got 3. "
            "Use one of these names, or name your own class.",
        ),
        (
            {"generator": {"cache_token": 3}},
            'generator.cache_token must be a key of [generator] of type "local"; got 3. '
            "Did you mean 'cache_tokens'?",
        ),
    ],
)
def test_a_mistake_gets_the_same_message_from_the_overlay_and_from_the_schema(
    table: dict[str, Any], expected: str
):
    assert message(table) == expected


def test_what_a_dataclass_refuses_itself_is_reported_with_file_line_and_values(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("dump_folder = 'a'\n\n[compile]\nenable_async_tensor_parallel = true\n")
    document = load_document(path)
    check(document.table, SCHEMA, document)
    with pytest.raises(ConfigError) as caught:
        overlay(fakes.Root(), document.table, rules=fakes.RULES, locate=document.locate)
    assert str(caught.value) == (
        f"{path}:3: compile must be accepted by CompileConfig; got enable_async_tensor_parallel = true. "
        "Async TP requires --compile.enable."
    )


def test_a_refusal_that_names_a_key_is_located_at_that_key(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 3\n[compile]\nenable = true\n[checkpoint]\ninterval = 0\n")
    document = load_document(path)
    with pytest.raises(ConfigError) as caught:
        overlay(Strict(), document.table, rules=fakes.RULES, locate=document.locate)
    assert str(caught.value) == (
        f"{path}:6: checkpoint.interval must be accepted by Strict; got checkpoint.interval = 0. "
        "checkpoint.interval must be greater than 0."
    )


def test_all_errors_are_reported_together_in_the_order_of_the_lines(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nstps = 1\ndtype = 3\n[compile]\nenable = 0\n")
    document = load_document(path)
    with pytest.raises(ManyConfigError) as caught:
        overlay(fakes.Root(), document.table, rules=fakes.RULES, locate=document.locate)
    expected = [
        f"{path}:2: training.stps must be a key of [training]; got 1. Did you mean 'steps'?",
        f"{path}:3: training.dtype must be one of 'bfloat16', 'float32'; got 3. The default is \"float32\".",
        f"{path}:5: compile.enable must be true or false; got 0. The default is false.",
    ]
    assert str(caught.value).splitlines() == expected
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(ManyConfigError) as checked:
        check(document.table, SCHEMA, document)
    assert str(checked.value).splitlines() == expected


def test_the_eleventh_error_is_counted_and_not_shown():
    with pytest.raises(ManyConfigError) as caught:
        load({"training": {f"wrong_{index}": 1 for index in range(12)}})
    assert len(str(caught.value).splitlines()) == 11
    assert str(caught.value).endswith("(2 more errors)")


@dataclass(kw_only=True, slots=True)
class Strict(fakes.Root):
    """As TorchTitan's Trainer.Config: refuses values of its sections."""

    def __post_init__(self) -> None:
        if self.checkpoint.interval <= 0:
            raise ValueError("checkpoint.interval must be greater than 0.")


@dataclass(kw_only=True, slots=True)
class Never:
    options: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raise ValueError("NO")


@dataclass(kw_only=True, slots=True)
class HoldsNever:
    never: Never | None = None


@dataclass(kw_only=True, slots=True)
class Refusing:
    low: int = 0
    high: int = 1
    inner: fakes.Dataset | None = None

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError("low", "be at most high", self.low, "Lower it.")
        if self.low == -1:
            raise ConfigError("sampling.top_p", "be 1", 0.5, "Remove it.")
        if self.low == -2:
            raise AssertionError
        if self.low == -3:
            raise ConfigError("inner.path", "exist", "x", "Make it.")


@pytest.mark.parametrize(
    ("low", "expected"),
    [
        (5, "a.low must be at most high; got 5. Lower it."),
        (-1, "sampling.top_p must be 1; got 0.5. Remove it."),
        (-2, "a must be accepted by Refusing; got low = -2. AssertionError."),
        (-3, "a.inner.path must exist; got 'x'. Make it."),
    ],
)
def test_a_config_error_of_a_dataclass_gets_its_place(low: int, expected: str):
    with pytest.raises(ConfigError) as caught:
        overlay(Refusing(), {"low": low}, where="a", locate=lambda path: ("run.toml", 7))
    assert str(caught.value) == f"run.toml:7: {expected}"


def test_a_refusal_without_a_named_key_shows_at_most_six_values():
    with pytest.raises(ConfigError) as caught:
        overlay(HoldsNever(), {"never": {"options": dict.fromkeys("bcdefgh", 1)}})
    assert str(caught.value) == (
        "never must be accepted by Never; got options.b = 1, options.c = 1, options.d = 1, options.e = 1, "
        "options.f = 1, options.g = 1. NO."
    )
    with pytest.raises(ConfigError) as caught:
        overlay(HoldsNever(), {"never": {}})
    assert str(caught.value) == "never must be accepted by Never; got its defaults. NO."


def test_a_rule_of_a_base_holds_for_its_subclass():
    rules = {(fakes.BaseCheckpoint.Config, "interval"): Hidden()}
    with pytest.raises(ConfigError) as caught:
        overlay(fakes.Checkpoint.Config(), {"interval": 3}, rules=rules)
    assert str(caught.value) == "interval must be left out; got 3. It is set by titan_rl."


@dataclass
class NotToml:
    value: complex = 0j


@dataclass
class Positive:
    value: Annotated[int, annotated_types.Predicate(lambda value: value > 0)] = 1


@dataclass
class Ambiguous:
    value: fakes.Dataset | fakes.Critic | None = None


@dataclass
class Computed:
    given: int = 1
    computed: int = field(init=False, default=2)
    _private: int = 3


def test_what_toml_cannot_express_is_a_mistake_of_the_programmer():
    with pytest.raises(TypeError, match=r"NotToml.value: <class 'complex'> cannot be written in TOML"):
        overlay(NotToml(), {})
    with pytest.raises(TypeError, match="cannot be expressed in the schema: check it in __post_init__"):
        overlay(Positive(), {})
    with pytest.raises(TypeError, match="mixes several sections: give the field a Choice"):
        overlay(Ambiguous(), {})


def test_private_and_computed_fields_are_no_keys():
    with pytest.raises(ManyConfigError, match="computed must be a known section or key"):
        overlay(Computed(), {"computed": 3, "_private": 4})
    assert overlay(Computed(), {"given": 3}) == Computed(given=3)
