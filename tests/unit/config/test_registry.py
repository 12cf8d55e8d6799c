import json
import subprocess
import sys
from pathlib import Path

import pytest

from titan_rl.config.registry import nearest, resolve
from titan_rl.errors import ConfigError

REGISTRY = {"decoder": "json:JSONDecoder", "encoder": "json:JSONEncoder"}


def message(name: object, registry: dict[str, str] = REGISTRY) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(name, registry, "reader.type")  # pyrefly: ignore[bad-argument-type]
    return str(caught.value)


def test_a_registered_name_and_its_target_give_the_same_class():
    assert resolve("decoder", REGISTRY, "reader.type") is json.JSONDecoder
    assert resolve("json:JSONDecoder", REGISTRY, "reader.type") is json.JSONDecoder
    assert resolve("json:JSONDecoder.decode", {}, "reader.type") is json.JSONDecoder.decode


def test_an_unknown_name_is_refused_with_the_nearest_one():
    assert message("decodr") == (
        "reader.type must be one of 'decoder', 'encoder' or \"package.module:Class\"; got 'decodr'. "
        "Did you mean 'decoder'?"
    )
    assert message("zzz").endswith("got 'zzz'. Use one of these names, or name your own class.")
    assert message(3).endswith("got 3. Use one of these names, or name your own class.")


def test_a_module_that_does_not_exist_is_refused_with_its_own_message():
    assert message("no_such_module:Thing") == (
        "reader.type must name something that can be imported; got 'no_such_module:Thing'. "
        "Importing no_such_module raised ModuleNotFoundError: No module named 'no_such_module'."
    )


def test_a_missing_class_is_refused_with_the_nearest_one():
    assert message("json:JSONDecodr") == (
        "reader.type must name something that json defines; got 'json:JSONDecodr'. "
        "Did you mean 'JSONDecoder'?"
    )


def test_a_users_module_in_the_working_directory_resolves_and_its_error_is_shown(tmp_path: Path):
    (tmp_path / "my_reward.py").write_text("class Mine: ...\n")
    (tmp_path / "my_broken.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')\n")
    # -P: no working directory on sys.path, as in a console script.
    code = (
        "from titan_rl.config.registry import resolve\n"
        "print(resolve('my_reward:Mine', {}, 'reward.type').__name__)\n"
        "print(resolve('json:JSONDecoder', {}, 'reward.type').__name__)\n"
        "try: resolve('my_broken:Mine', {}, 'reward.type')\n"
        "except ValueError: pass\n"
        "except Exception as error: print(error)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "Mine",
        "JSONDecoder",
        "reward.type must name something that can be imported; got 'my_broken:Mine'. "
        "Importing my_broken raised RuntimeError: no licence.",
    ]


def test_the_nearest_name_is_found_whatever_the_order():
    assert (
        nearest("grop", ["drgrpo", "grpo", "rloo"]) == nearest("grop", ["rloo", "grpo", "drgrpo"]) == "grpo"
    )
    assert nearest("zzzzzz", ["grpo"]) is None
