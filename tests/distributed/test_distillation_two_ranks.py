"""The gradient of on-policy distillation: one rank, two gloo ranks of FSDP, and transformers written out.

The computation is in distillation_worker.py: once on two forked ranks, once in this process with
one. "Equal" for gradients: per tensor ``||a - b|| <= 1e-5 ||b|| + 1e-8``, in fp32.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.distributed import comparing, distillation_worker, fsdp_worker, launching
from tests.distributed.comparing import random_peer, unequal

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5


def _models() -> dict[str, LlamaForCausalLM | Qwen3ForCausalLM]:
    """The policy: a Llama whose heads do not divide. The teacher: a tied Qwen3 with more output rows."""
    policy = random_peer("llama")
    teacher = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=fsdp_worker.VOCAB + 8,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            num_hidden_layers=2,
            head_dim=8,
            max_position_embeddings=128,
            initializer_range=0.15,
        )
    )
    return {"policy": policy.eval(), "teacher": teacher.eval()}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    directory = tmp_path_factory.mktemp("distillation")
    models = _models()
    for name, model in models.items():
        model.save_pretrained(directory / name)
    launching.compute(distillation_worker, directory)
    found = launching.results(directory)
    found.models = models
    return found


def gradients(tensors: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    return comparing.gradients(tensors, case, at_least=20)


def written_out(models, *, divergence="reverse", top_k=0):
    """Mean divergence over all trained tokens, sample by sample with the whole softmax, by transformers."""
    total, count = 0.0, 0
    for sample in fsdp_worker.make_samples()[0]:
        ids, mask = torch.tensor([sample.token_ids]), torch.tensor(sample.loss_mask)[1:]
        logits = [models[name](ids).logits[0, :-1, : fsdp_worker.VOCAB] for name in ("policy", "teacher")]
        p, q = (torch.softmax(z.double() / fsdp_worker.TEMPERATURE, -1) for z in logits)
        q = q.detach()
        over, under = (p, q) if divergence == "reverse" else (q, p)
        if top_k:
            own = over.topk(top_k).indices
            over, under = (
                torch.cat([x.gather(-1, own), 1 - x.gather(-1, own).sum(-1, keepdim=True)], -1)
                for x in (over, under)
            )
        total = total + (over * (over.log() - under.log())).sum(-1)[mask].sum()
        count += int(mask.sum())
    return total / count


@pytest.mark.parametrize("case", distillation_worker.CASES)
def test_value_and_gradient_equal_those_of_transformers_written_out(launch, case):
    policy = launch.models["policy"]
    policy.zero_grad()
    expected = written_out(launch.models, **distillation_worker.CASES[case])
    (0.7 * expected).backward()
    assert expected.item() > 0.1
    names = {
        "lm_head.weight": policy.lm_head.weight,
        "tok_embeddings.weight": policy.model.embed_tokens.weight,
        "norm.weight": policy.model.norm.weight,
        "layers.0.feed_forward.w2.weight": policy.model.layers[0].mlp.down_proj.weight,
    }
    for world, tensors in ((launch.one, launch.alone), (launch.two[0], launch.sharded)):
        metrics = world["metrics"][f"{case}/packed"]
        assert metrics["loss/teacher_kl"] == pytest.approx(expected.item(), rel=TOLERANCE)
        assert metrics["loss/loss"] == pytest.approx(0.7 * expected.item(), rel=TOLERANCE)
        got = gradients(tensors, f"{case}/packed")
        ours = {name: got[name] for name in names}
        assert unequal(ours, {name: parameter.grad for name, parameter in names.items()}) == []


def test_the_three_divergences_differ(launch):
    values = {
        case: launch.one["metrics"][f"{case}/packed"]["loss/teacher_kl"] for case in distillation_worker.CASES
    }
    assert values["top_k"] < values["reverse"]
    assert abs(values["forward"] - values["reverse"]) > 1e-3


@pytest.mark.parametrize("layout", distillation_worker.LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradient_depends_on_neither_layout_nor_ranks(launch, layout, world_size):
    expected = gradients(launch.alone, "reverse/one_of_eight")
    got = gradients(launch.alone if world_size == 1 else launch.sharded, f"reverse/{layout}")
    assert unequal(got, expected) == []


@pytest.mark.parametrize("case", ["one_rank_empty", "resharded", "never_resharded", "replicated"])
def test_gradients_are_equal_however_the_models_are_spread(launch, case):
    assert unequal(gradients(launch.sharded, case), gradients(launch.alone, "reverse/one_of_eight")) == []


def test_no_gradient_is_left_over_from_the_planted_faults_and_none_reaches_the_teacher(launch):
    for world, tensors in ((launch.one, launch.alone), (launch.two[0], launch.sharded)):
        assert unequal(gradients(tensors, "again"), gradients(tensors, "reverse/packed")) == []
        assert world["teacher_touched"] is False


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("fault", ["mean_per_micro_batch", "leaking", "teacher_leaking"])
def test_planted_faults_are_noticed(launch, fault, world_size):
    tensors = launch.alone if world_size == 1 else launch.sharded
    expected = gradients(launch.alone, "reverse/one_of_eight")
    assert len(unequal(gradients(tensors, f"fault/{fault}"), expected)) == len(expected)


def test_planted_fault_a_mean_over_ranks_is_noticed(launch):
    expected = gradients(launch.alone, "reverse/one_of_eight")
    assert len(unequal(gradients(launch.sharded, "fault/averaged_over_ranks"), expected)) == len(expected)
