"""Every shipped recipe fits the schema, can be configured, and has a name for TorchTitan's command line."""

import itertools
import json
import re
import tomllib
from pathlib import Path

import pytest
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_rl import config_registry
from titan_rl.config.entry import read_checked
from titan_rl.config.recipes import recipe_names, recipe_path
from titan_rl.errors import ConfigError
from titan_rl.trainers import validation
from titan_rl.trainers.configuration import configure
from titan_rl.trainers.named import NamedRLTrainer, check_values

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "train_configs").glob("*.toml"))
RANKS = {"qwen3_8b_math_grpo": 8}

LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "vocab_size": 151936,
}
# What the models' own config.json say, as far as a model is built from it.
MODELS = {
    "models/smollm2-135m": LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "models/Qwen3-0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "models/Qwen3-8B": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
}


def overrides(path, tmp_path):
    """Put a directory with the model's config.json in place of one that has to be downloaded."""
    name = tomllib.loads(path.read_text(encoding="utf-8")).get("model", {}).get("hf_assets_path")
    if name not in MODELS:
        return []
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    return ["--model.hf_assets_path", str(tmp_path)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_the_schema_and_contradicts_nothing(path, tmp_path, monkeypatch):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    document, trainer = read_checked(str(path), overrides(path, tmp_path))
    config = configure(document, trainer)
    ranks = RANKS.get(path.stem, 1)
    validation.check_run(config, trainer, world_size=ranks, opens_data=False)
    numbers = dict(line.split(":", 1) for line in validation.describe(config, trainer, world_size=ranks))
    assert f"of {config.training.seq_len} tokens per" in numbers["rows"]
    assert Path(config.dump_folder).name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_starts_with_what_it_needs_and_what_was_measured(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    header = [line for line in lines[: lines.index("")] if line.startswith("#")]
    assert len(header) == lines.index(""), "the comment ends with an empty line"
    for word in ("Hardware:", "Command:", "Time:", "Result:", "Measured:"):
        assert any(line.startswith(f"# {word}") for line in header), word
    assert any(f"train_configs/{path.name}" in line for line in header)


LINK = re.compile(r'"outputs/(\w+)/checkpoint/step-(\d+)"')
LINKS = [(path, *link) for path in RECIPES for link in LINK.findall(path.read_text(encoding="utf-8"))]


def test_the_chain_of_recipes_is_whole():
    links = {(path.stem, other) for path, other, _ in LINKS}
    chain = ("tiny_pretrain", "tiny_sft", "tiny_reward_model", "tiny_ppo_reward_model")
    assert set(itertools.pairwise(reversed(chain))) <= links
    assert {("tiny_ppo_reward_model", "tiny_sft"), ("tiny_dpo", "tiny_sft")} <= links
    order = re.search(r"for recipe in (.*);", (ROOT / "Makefile").read_text())[1].split()
    place = {f"tiny_{recipe}": index for index, recipe in enumerate(order)}
    assert place.keys() == {*chain, "tiny_dpo"}
    assert all(place[other] < place[recipe] for recipe, other in links if recipe in place)


@pytest.mark.parametrize(("path", "other", "step"), LINKS, ids=lambda value: getattr(value, "stem", value))
def test_a_recipe_starts_from_the_last_checkpoint_of_one_that_it_names(path, other, step):
    earlier = tomllib.loads((path.parent / f"{other}.toml").read_text(encoding="utf-8"))
    assert earlier["dump_folder"] == f"outputs/{other}"
    assert earlier["training"]["steps"] == int(step)
    (before,) = re.findall(r"^# Before: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert f" {other}.toml" in before


def test_the_rows_of_the_eight_gpu_recipe_are_counted_per_rank(tmp_path):
    path = recipe_path("qwen3_8b_math_grpo")
    config = configure(*read_checked(str(path), overrides(path, tmp_path)))
    numbers = validation.describe(config, "rl", world_size=8)
    # 128 prompts over 8 generators: 16 each, 8 rollouts of at most 1024 + 3072 tokens: two to a row of 8192.
    assert "prompts:               128 per iteration" in numbers
    assert "samples:               1024 per iteration, 8 per prompt" in numbers
    assert "generators:            8 of 1 rank(s), at most 16 prompts each" in numbers
    assert "rows:                  at most 64 of 8192 tokens per data-parallel rank and step" in numbers


def test_every_recipe_is_found_by_name_and_has_a_function_for_torchtitan():
    names = [path.stem for path in RECIPES]
    assert recipe_names() == names
    for name in names:
        assert recipe_path(name).read_bytes() == (ROOT / "train_configs" / f"{name}.toml").read_bytes()
        assert callable(getattr(config_registry, name.replace(".", "_")))


def test_the_recipes_lie_inside_the_package_so_that_a_wheel_holds_them():
    inside = ROOT / "titan_rl" / "train_configs"
    assert inside.resolve() == (ROOT / "train_configs").resolve()
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "train_configs/*.toml" in patterns["titan_rl"]


def test_an_unknown_recipe_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'tiny_grpo'"):
        recipe_path("tiny_gpro")


# ----------------------------------------------------------------- torchtitan.train --module titan_rl


def parse(*arguments):
    """What TorchTitan's train command makes of its arguments."""
    return ConfigManager().parse_args(["--module", "titan_rl", *arguments])


def test_torchtitan_finds_a_configuration_by_name_and_overrides_it():
    config = parse(
        *("--config", "grpo_debugmodel", "--training.steps", "3", "--generator.max-num-seqs", "5"),
        *("--loss.kl.coefficient", "0.25", "--data.source.maximum", "9", "--reward.0.type", "numeric"),
    )
    assert isinstance(config, NamedRLTrainer.Config)
    assert (config.training.steps, config.generator.max_num_seqs) == (3, 5)
    assert (config.loss.kl.coefficient, config.data.source.maximum) == (0.25, 9)
    assert config.reward[0]["type"] == "numeric"
    assert config.model_spec.flavor == "debugmodel"
    check_values(config, "rl")


@pytest.mark.parametrize(
    "name", ["tiny_pretrain", "tiny_grpo", "tiny_dpo", "tiny_reward_model", "tiny_ppo_reward_model"]
)
def test_recipes_for_torchtitan_equal_the_files(name):
    config = parse("--config", name)
    expected = configure(*read_checked(str(ROOT / "train_configs" / f"{name}.toml"), []))
    assert config.to_dict() | {"model_spec": None} == expected.to_dict() | {"model_spec": None}
    assert repr(config.model_spec.model) == repr(expected.model_spec.model)


def test_a_bound_that_tyro_does_not_know_is_checked_when_the_trainer_is_built():
    config = parse("--config", "grpo_debugmodel", "--generator.max-num-seqs", "0")
    with pytest.raises(ConfigError, match=r"generator\.max_num_seqs must be an integer >= 1; got 0"):
        config.build()


def test_validation_is_refused_in_rl_instead_of_being_ignored():
    config = parse("--config", "grpo_debugmodel", "--validator.enable")
    with pytest.raises(ConfigError, match=r"validator\.enable must be false"):
        config.build()


@pytest.mark.parametrize("option", ["--model.flavor", "--model.name", "--algorithm.type", "--hf-assets-path"])
def test_what_is_settled_before_the_command_line_is_no_option_of_it(option, capsys):
    config = config_registry.grpo_debugmodel()
    with pytest.raises(SystemExit):
        tyro.cli(type(config), args=[option, "x"], default=config, registry=custom_registry)
    assert "Unrecognized options" in "".join(capsys.readouterr())
