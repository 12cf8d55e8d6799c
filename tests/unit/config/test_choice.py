import config_fakes as fakes
import pytest

from titan_rl.config.choice import Choice, build, owner_of
from titan_rl.config.overlay import overlay
from titan_rl.errors import ConfigError


def choose(table: dict[str, object], default: object = None) -> object:
    root = fakes.Root() if default is None else fakes.Root(generator=default)
    return overlay(root, {"generator": table}, rules=fakes.RULES).generator


def message(table: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        choose(table)
    return str(caught.value)


def test_a_registered_name_picks_the_class_and_build_makes_it():
    config = choose({"type": "engine", "memory_fraction": 0.25})
    assert config == fakes.Engine.Config(memory_fraction=0.25)
    component = build(config)
    assert type(component) is fakes.Engine
    assert component.config is config
    assert build(fakes.Local.Config(), device="cuda").device == "cuda"


def test_a_users_class_is_picked_by_its_path():
    config = choose({"type": "config_fakes:Engine"})
    assert type(build(config)) is fakes.Engine


def test_without_a_type_the_class_and_the_values_of_the_default_stay():
    default = fakes.Engine.Config(memory_fraction=0.1)
    assert choose({}, default) == default
    assert choose({"memory_fraction": 0.2}, default) == fakes.Engine.Config(memory_fraction=0.2)


def test_naming_the_type_of_the_default_keeps_its_values_and_another_type_does_not():
    default = fakes.Engine.Config(memory_fraction=0.1)
    assert choose({"type": "engine"}, default) == default
    assert choose({"type": "local"}, default) == fakes.Local.Config()


def test_a_class_that_inherits_its_config_builds_itself_and_not_its_parent():
    config = choose({"type": "config_fakes:LocalChild", "cache_tokens": 5})
    assert type(build(config)) is fakes.LocalChild
    assert build(config).config.cache_tokens == 5
    assert isinstance(config, fakes.Local.Config)
    assert config == choose({"type": "config_fakes:LocalChild", "cache_tokens": 5})
    assert config != fakes.Local.Config(cache_tokens=5)
    assert owner_of(type(fakes.Local.Config())) is fakes.Local


def test_the_owner_that_torchtitan_wires_is_used():
    assert owner_of(fakes.SelectiveAC.Config) is fakes.SelectiveAC
    assert type(build(fakes.FullAC.Config())) is fakes.FullAC


def test_a_dataclass_without_an_owner_cannot_be_built():
    with pytest.raises(
        TypeError, match=r"config_fakes\.Dataset is not nested in the class that it configures"
    ):
        build(fakes.Dataset(path="a"))


def test_an_optional_choice_is_off_until_its_section_is_there():
    assert fakes.Root().draft is None
    root = overlay(fakes.Root(), {"draft": {}}, rules=fakes.RULES)
    assert root.draft == fakes.Local.Config()
    assert overlay(root, {"draft": "none"}, rules=fakes.RULES).draft is None


def test_a_name_that_means_none_switches_off():
    def policy(table: dict[str, object]) -> object:
        return overlay(
            fakes.Root(), {"activation_checkpoint": table}, rules=fakes.RULES
        ).activation_checkpoint

    assert policy({"type": "none"}) is None
    assert policy({"type": "full", "debug": True}) == fakes.FullAC.Config(debug=True)
    assert policy({"preserve_rng_state": False}) == fakes.SelectiveAC.Config(preserve_rng_state=False)
    with pytest.raises(ConfigError) as caught:
        policy({"type": "none", "debug": True})
    assert str(caught.value) == (
        'activation_checkpoint.debug must be a key of [activation_checkpoint] of type "none"; got True. '
        "The keys are type."
    )


def test_unknown_names_and_classes_without_config_are_refused():
    assert message({"type": "locl"}) == (
        "generator.type must be one of 'local', 'engine' or \"package.module:Class\"; got 'locl'. "
        "Did you mean 'local'?"
    )
    assert message({"type": "config_fakes:NoConfig"}) == (
        "generator.type must name a class with a nested dataclass Config; got 'config_fakes:NoConfig'. "
        "Nest @dataclass(kw_only=True, slots=True) class Config in it, even without fields."
    )
    assert message({"type": "config_fakes:to_groups"}).startswith("generator.type must name a class with")
    assert message({"type": "local", "memory_fraction": 1}) == (
        'generator.memory_fraction must be a key of [generator] of type "local"; got 1. '
        "The keys are type, cache_tokens."
    )


def test_a_config_is_written_with_its_registered_name_or_else_with_its_path():
    choice = Choice({"none": None, "local": "config_fakes:Local"})
    assert choice.name_of(fakes.Local.Config()) == "local"
    assert choice.name_of(fakes.Engine.Config()) == "config_fakes:Engine"
    assert choice.name_of(None) == "none"
    # A registry may name a class by a module that only re-exports it.
    alias = Choice({"local": "test_alias:Local"})
    assert alias.name_of(fakes.Local.Config()) == "config_fakes:Local"
