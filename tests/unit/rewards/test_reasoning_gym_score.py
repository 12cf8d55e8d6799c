import pytest

from titan_rl.data.reasoning_gym_tasks import ReasoningGym
from titan_rl.errors import ConfigError, RewardError
from titan_rl.rewards.reasoning_gym_score import ReasoningGymScore
from titan_rl.types import Completion, FinishReason, Message, Prompt, Rollout, Turn

pytest.importorskip("reasoning_gym", reason="reasoning-gym needs a C compiler to install")


def rollout_of(prompt: Prompt, text: str) -> Rollout:
    completion = Completion("r", (1,), (-0.5,), FinishReason.STOP, ((0, 0),))
    return Rollout(prompt=prompt, sample_index=0, seed=1, turns=[Turn((1,), completion, text)])


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return ReasoningGym(ReasoningGym.Config(task="chain_sum", size=8, num_held_out=2), "train")[0]


def test_the_reference_answer_scores_one_and_another_one_less(prompt):
    score = ReasoningGymScore(ReasoningGymScore.Config())
    assert score(rollout_of(prompt, f" {prompt.answer} ")) == 1.0
    assert score(rollout_of(prompt, "no number")) < 1.0


def test_the_last_match_of_the_pattern_is_the_answer(prompt):
    score = ReasoningGymScore(ReasoningGymScore.Config(answer_pattern="<answer>(.*?)</answer>"))
    text = f"<answer>0.5</answer> no, <answer>{prompt.answer}</answer>"
    assert score(rollout_of(prompt, text)) == 1.0
    assert score(rollout_of(prompt, str(prompt.answer))) == 0.0


def test_a_prompt_of_another_source_is_an_error_and_so_is_another_question(prompt):
    score = ReasoningGymScore(ReasoningGymScore.Config())
    with pytest.raises(RewardError, match=r"must come from data\.source\.type"):
        score(rollout_of(Prompt("p", (Message("user", "1+1"),), "2"), "2"))
    other = Prompt(prompt.id, (Message("user", "another"),), prompt.answer, prompt.metadata)
    with pytest.raises(RewardError, match="must make the question"):
        score(rollout_of(other, "2"))


def test_a_pattern_needs_a_group():
    with pytest.raises(ConfigError, match="have a group around the answer"):
        ReasoningGymScore(ReasoningGymScore.Config(answer_pattern="<answer>"))
