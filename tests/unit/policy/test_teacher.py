"""Which teachers are refused, and that a micro-batch is compared with the right rows of the right model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torchtitan.config import ParallelismConfig

from tests.unit.titan.trainer_fakes import one_part
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.config.entry import read_checked
from titan_rl.errors import ConfigError
from titan_rl.policy.teacher import Teacher, check_teacher, teacher_spec
from titan_rl.policy.token_scores import token_scores
from titan_rl.titan import device
from titan_rl.titan.models import ModelSection
from titan_rl.trainers.checks import check_config
from titan_rl.trainers.configuration import configure

device.install()
ROOT = Path(__file__).parents[3]
TINY = ROOT / "titan_rl" / "assets" / "tiny_llama"
VOCAB = 104


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A teacher's directory with the policy's tokenizer."""
    shutil.copytree(TINY, tmp_path / "teacher")
    (tmp_path / "teacher" / "model.safetensors").write_bytes(b"")  # only its name is looked at
    return tmp_path / "teacher"


def change(directory: Path, **values: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def check(config: Teacher.Config | None, coefficient: float = 1.0, **degrees: int) -> None:
    check_teacher(
        config,
        coefficient=coefficient,
        model=ModelSection(hf_assets_path=str(TINY)),
        vocab_size=VOCAB,
        parallelism=ParallelismConfig(**degrees),
    )


def test_a_loss_that_distils_needs_a_teacher_and_a_teacher_such_a_loss(directory):
    check(None, 0.0)
    check(Teacher.Config(hf_assets_path=str(directory)))
    with pytest.raises(ConfigError, match=r"\[teacher\] must be a table with loss.distillation.coefficient"):
        check(None, 0.5)
    with pytest.raises(ConfigError, match=r"\[teacher\] must be left out with loss.distillation"):
        check(Teacher.Config(hf_assets_path=str(directory)), 0.0)


def test_a_teacher_without_weights_is_refused(directory):
    check(Teacher.Config(initial_load_path="somewhere"))
    (directory / "model.safetensors").unlink()
    for config in (Teacher.Config(), Teacher.Config(hf_assets_path=str(directory))):
        with pytest.raises(ConfigError, match=r"teacher\.initial_load_path must name a checkpoint"):
            check(config)


def test_tensor_parallel_ranks_must_hold_the_rows_of_the_same_tokens(directory):
    config = Teacher.Config(hf_assets_path=str(directory))
    check(config, tensor_parallel_degree=2, pipeline_parallel_degree=2, context_parallel_degree=2)
    change(directory, vocab_size=VOCAB + 24)
    check(config, pipeline_parallel_degree=2)
    with pytest.raises(ConfigError) as caught:
        check(config, tensor_parallel_degree=2)
    assert str(caught.value) == (
        "parallelism.tensor_parallel_degree must cut the 104 output rows of [model] and the 128 of [teacher] "
        "at the same tokens: a rank would hold 52 of the one and 64 of the other; got 2. Set 1, or choose a "
        "teacher with as many output rows."
    )
    change(directory, vocab_size=VOCAB + 1)  # 35 of 104 and of 105 rows: the last rank's further row is cut
    check(config, tensor_parallel_degree=3)


def test_more_rows_are_allowed_with_the_same_tokenizer_and_fewer_never(directory):
    change(directory, vocab_size=VOCAB + 24)
    check(Teacher.Config(hf_assets_path=str(directory)))
    change(directory, vocab_size=VOCAB - 1)
    with pytest.raises(ConfigError, match=r"the vocabulary must have the 104 output rows.*got 103"):
        check(Teacher.Config(hf_assets_path=str(directory)))
    change(directory, vocab_size=VOCAB + 24)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"got 128\. Put the teacher's tokenizer\.json"):
        check(Teacher.Config(hf_assets_path=str(directory)))


def test_another_tokenizer_of_the_same_size_is_refused(directory):
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"2 tokens that differ, such as '7'"):
        check(Teacher.Config(hf_assets_path=str(directory)))


def test_the_architecture_is_the_policys_unless_another_is_named(directory):
    policy = ModelSection(hf_assets_path=str(TINY))
    assert teacher_spec(Teacher.Config(initial_load_path="x"), policy).model.dim == 128
    change(directory, hidden_size=64)
    assert teacher_spec(Teacher.Config(hf_assets_path=str(directory)), policy).model.dim == 64
    assert teacher_spec(Teacher.Config(name="qwen3", flavor="debugmodel"), policy).name == "qwen3"
    with pytest.raises(ConfigError, match=r"teacher\.flavor must be one of"):
        teacher_spec(Teacher.Config(name="qwen3", flavor="none"), policy)
    with pytest.raises(ConfigError, match=r"teacher\.hf_assets_path must be a directory"):
        teacher_spec(Teacher.Config(hf_assets_path="nowhere"), policy)


def test_the_recipe_without_its_teacher_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    text = (ROOT / "train_configs" / "tiny_distillation.toml").read_text()
    start = text.index("[teacher]")
    path = tmp_path / "run.toml"
    path.write_text(text[:start] + text[text.index("[data]") :])
    config = configure(*read_checked(str(path), []))
    with pytest.raises(ConfigError, match=r"\[teacher\] must be a table with loss.distillation"):
        check_config(config, world_size=1, device_type="cpu")
    path.write_text(text)
    config = configure(*read_checked(str(path), ["--teacher.offload_to_cpu", "true"]))
    with pytest.raises(ConfigError, match=r"teacher\.offload_to_cpu must be false on a CPU"):
        check_config(config, world_size=1, device_type="cpu")


class Model(nn.Module):
    """Hidden states are an embedding; ``lm_head`` is not applied."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(11, width), nn.Linear(width, rows, bias=False)
        self.double()

    def forward(self, tokens, *, positions):
        return self.embedding(tokens)


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_the_divergence_stands_at_trained_tokens_and_ignores_rows_that_the_policy_lacks(divergence):
    torch.manual_seed(0)
    policy, model = Model(4, 7), Model(5, 9)
    teacher = Teacher(Teacher.Config(divergence=divergence), model=one_part(model), temperature=0.5)
    batch = MicroBatch.empty(2, 6)
    batch.input_ids.copy_(torch.randint(11, (2, 6)))
    batch.loss_mask[0, 2:4] = batch.loss_mask[1, 5] = True
    ours = one_part(policy)
    with teacher.comparing([batch]) as compare:
        scores = token_scores(ours, ours.forward(batch), batch, temperature=0.5, divergence=compare(0))
    p = torch.softmax(policy.lm_head(policy.embedding(batch.input_ids)) / 0.5, -1)
    q = torch.softmax(model.lm_head(model.embedding(batch.input_ids))[..., :7] / 0.5, -1)
    over, under = (p, q) if divergence == "reverse" else (q, p)
    expected = torch.where(batch.loss_mask, (over * (over / under).log()).sum(-1), 0.0)
    torch.testing.assert_close(scores.teacher_kl, expected, rtol=0, atol=1e-12)
    assert (scores.teacher_kl[batch.loss_mask] > 1e-3).all()
    scores.teacher_kl.sum().backward()
    assert policy.lm_head.weight.grad.norm() > 1e-3
    assert all(p.grad is None for p in model.parameters())
