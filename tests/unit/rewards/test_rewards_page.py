"""docs/rewards.md: the example works as printed, and the tables agree with the code."""

import dataclasses
import re
from pathlib import Path

import pytest
import tomli
from reward_cases import make_rollout

from titan_rl.errors import ConfigError
from titan_rl.rewards.pool import RewardPool
from titan_rl.rewards.registry import REWARDS
from titan_rl.rewards.spec import RewardSpec

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL).group(1)


@pytest.fixture
def specs(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(block("python"))
    monkeypatch.chdir(tmp_path)  # a file next to where the run starts, not on any path
    return [RewardSpec.from_table(table) for table in tomli.loads(block("toml"))["reward"]]


def test_the_example_scores_as_the_page_says(specs):
    with RewardPool(RewardPool.Config(num_workers=1, num_spares=0), specs) as pool:
        pool.submit(0, make_rollout("<result>4</result>", answer="4", num_tokens=20))
        pool.submit(1, make_rollout("<result>5</result>", answer="4", num_tokens=0))
        pool.submit(2, make_rollout("<result>4</result>", answer=None, prompt_id="x"))
        results = dict(pool.results(60.0))
    assert results[0].total == pytest.approx(0.998)
    assert results[0].parts == pytest.approx({"answer": 1.0, "brevity": -0.02})
    assert results[1].total == pytest.approx(0.1)
    assert (results[2].reason, "prompt 'x' has no answer" in results[2].message) == ("raised", True)


def test_the_examples_own_check_stops_the_run_before_training(specs):
    specs[0].params["tag"] = "a b"
    with pytest.raises(ConfigError, match=r"reward\.tag must consist of letters; got a b"):
        RewardPool(RewardPool.Config(num_workers=1, num_spares=0), specs)


def test_the_page_lists_every_built_in_and_every_setting():
    listed = re.findall(r"^\| `(\w+)` \| .* \| .* \|$", PAGE, re.MULTILINE)
    assert set(REWARDS) <= set(listed)
    for setting in dataclasses.fields(RewardPool.Config):
        shown = {4 * 1024**3: "4 GiB", 1024**2: "1 MiB"}.get(setting.default, str(setting.default))
        assert f"| `{setting.name}` | {shown} |" in PAGE
