"""A sharded model on one rank: losses and scores of its hidden states, its parts, what stays gathered."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torchtitan.distributed import fsdp
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import FlexAttention

from tests.unit.titan.tiny_models import load_titan, make_peer, titan_logits, tokens
from tests.unit.titan.trainer_fakes import no_parallelism, one_part, one_rank
from titan_rl.titan import sharded_model
from titan_rl.titan.models import build_sharded, build_sibling
from titan_rl.titan.sharded_model import Hidden, ShardedModel, TensorParallelVocabulary, fsdp_modules


class Model(nn.Module):
    """Hidden states are embeddings plus a multiple of the position."""

    def __init__(self, *, head=True):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.lm_head = nn.Linear(3, 7, bias=False) if head else None

    def forward(self, tokens, *, positions, **other):
        self.other = other
        return self.embedding(tokens) + 0.5 * positions[..., None]


def rows(*ids):
    ids = torch.tensor(ids)
    return SimpleNamespace(input_ids=ids, positions=torch.arange(ids.shape[1]).repeat(ids.shape[0], 1))


BATCHES = [rows([1, 2, 3], [4, 5, 6]), rows([6, 6]), rows([0, 1, 2, 3])]


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Model()


# ------------------------------------------------------------------------------------------- one plain part


def test_the_gradient_is_that_of_the_sum_of_the_losses_and_metrics_come_by_micro_batch(module):
    called = []

    def loss(number, hidden):
        called.append((number, hidden.index.tolist()))
        value = (number + 1) * hidden.states.square().sum()
        return value, {"loss": value.detach(), "number": torch.tensor(float(number))}

    metrics = one_part(module).forward_backward(BATCHES, loss)
    got = module.embedding.weight.grad.clone()
    assert called == [(0, [[0, 1, 2]] * 2), (1, [[0, 1]]), (2, [[0, 1, 2, 3]])]
    module.zero_grad()
    total = torch.zeros(())
    for number, batch in enumerate(BATCHES):
        value = (number + 1) * module(batch.input_ids, positions=batch.positions).square().sum()
        assert metrics[number] == {"loss": value, "number": number}
        total = total + value
    total.backward()
    torch.testing.assert_close(got, module.embedding.weight.grad, rtol=1e-6, atol=0)
    assert got.abs().min() > 0.1


def test_forward_and_backward_run_inside_the_context(module):
    happened = []

    @contextmanager
    def context():
        happened.append("enter")
        yield
        happened.append("leave")

    def score(number, hidden):
        happened.append(f"score {number}")
        return hidden.states.sum(-1)

    module.embedding.weight.register_hook(lambda grad: happened.append("backward"))
    model = one_part(module, context=context)
    model.forward_backward(BATCHES[:2], lambda number, hidden: (hidden.states.sum(), {}))
    assert happened == ["enter", "backward", "leave"] * 2
    happened.clear()
    model.scores(BATCHES[:2], score)
    assert happened == ["enter", "score 0", "leave", "enter", "score 1", "leave"]


def test_scores_have_no_graph_and_come_in_the_order_of_the_micro_batches(module):
    found = one_part(module).scores(BATCHES, lambda number, hidden: (number + 1) * hidden.states.sum(-1))
    assert len(found) == 3
    for number, (batch, score) in enumerate(zip(BATCHES, found, strict=True)):
        expected = (number + 1) * module(batch.input_ids, positions=batch.positions).sum(-1)
        assert torch.equal(score, expected)
        assert not score.requires_grad
    assert one_part(module).scores([], lambda number, hidden: hidden.states) == []


def test_values_of_this_ranks_tokens_are_taken_by_their_places():
    hidden = Hidden(torch.zeros(2, 2, 1), torch.tensor([[0, 3], [1, 2]]))
    values = torch.arange(8).view(2, 4)
    assert hidden.local(values).tolist() == [[0, 3], [5, 6]]
    assert hidden.local(values > 4).tolist() == [[False, False], [True, True]]


def test_on_one_rank_values_are_whole_rows_already(module):
    values = torch.ones(2, 3)
    assert one_part(module).whole_rows(values, Hidden(values, values.long())) is values


def test_masks_are_asked_for_where_the_attention_takes_them(module):
    module.get_attention_masks = lambda positions: ("masks of", positions)
    batch = BATCHES[0]
    one_part(module).forward(batch)
    assert module.other == {}
    module.config = SimpleNamespace(first_attention=SimpleNamespace(inner_attention=FlexAttention.Config()))
    one_part(module).forward(batch)
    assert module.other == {"attention_masks": ("masks of", batch.positions)}


def test_a_norm_above_the_bound_is_scaled_down_to_it(module):
    model = one_part(module)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    module.embedding.weight.grad[0, 0], module.lm_head.weight.grad[0, 0] = 3.0, 4.0
    assert model.clip_grad_norm(10.0) == 5.0
    assert model.clip_grad_norm(1.0) == 5.0
    assert module.embedding.weight.grad[0, 0].item() == pytest.approx(0.6, abs=1e-5)
    assert module.lm_head.weight.grad[0, 0].item() == pytest.approx(0.8, abs=1e-5)


# ------------------------------------------------------------------------------------------- several parts


class Parts(nn.Module):
    """One stage, with names that no other stage has."""

    def __init__(self, number, *, head):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(2, 2, bias=False)})
        self.lm_head = nn.Linear(2, 4, bias=False) if head else None


def two_parts():
    """This rank's two stages of a model."""
    return ShardedModel(no_parallelism(), [Parts(0, head=False), Parts(3, head=True)], None)


def test_a_rank_without_the_last_stage_has_no_head():
    assert one_part(Parts(0, head=False)).head is None
    model = two_parts()
    assert model.head is not None
    assert model.unsharded_head() is model.head is model.parts[1].lm_head
    model.skip_head()
    assert [part._skip_lm_head for part in model.parts] == [True, True]


def test_the_state_is_that_of_all_parts_and_comes_back():
    source, target = two_parts(), two_parts()
    state = source.state_dict()
    assert list(state) == ["layers.0.weight", "layers.3.weight", "lm_head.weight"]
    assert len(list(source.parameters())) == 3
    assert source.union({"a"}) == {"a"}
    target.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in target.state_dict().items())


def test_a_state_that_is_not_complete_is_loaded_only_when_asked_to():
    source, target = two_parts(), two_parts()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    part = {name: value for name, value in source.state_dict().items() if name != "layers.3.weight"}
    with pytest.raises(KeyError, match=r"layers\.3\.weight"):
        target.load_state_dict(part)
    target.load_state_dict(part, strict=False)
    for name, value in target.state_dict().items():
        assert torch.equal(value, part.get(name, before[name]))
    assert not torch.equal(before["lm_head.weight"], part["lm_head.weight"])


# ------------------------------------------------------------------------- a decoder on one rank of FSDP


@pytest.fixture
def process_group(tmp_path):
    backend = dist_utils.get_spmd_backend()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    dist_utils.set_spmd_backend(backend)


def is_gathered(model):
    return any(not isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_decoder_is_built_under_fsdp_and_scoring_leaves_nothing_gathered(tmp_path, process_group):
    make_peer("llama").save_pretrained(tmp_path)
    trainer = one_rank(tmp_path)
    model = build_sharded(trainer, trainer.config.model_spec, trainer.model_config)
    whole = load_titan(tmp_path)
    state = dict(model.full_state())
    whole.load_state_dict(state)
    assert list(state) == list(model.state_dict())
    assert len(list(fsdp_modules(model.parts[0]))) >= 3
    assert not is_gathered(model)
    ids = tokens(20)
    batches = [rows(*ids.tolist())]
    with torch.no_grad(), trainer.train_context():
        model.forward(batches[0])
    assert is_gathered(model)  # without a backward pass FSDP would keep them
    (score,) = model.scores(batches, lambda number, hidden: hidden.states.logsumexp(-1))
    assert not is_gathered(model)
    torch.testing.assert_close(score, titan_logits(whole, ids).logsumexp(-1), rtol=0, atol=1e-5)
    assert all(torch.equal(value, state[name]) for name, value in model.full_state())


def test_a_head_that_was_unsharded_is_whole_until_everything_is_resharded(tmp_path, process_group):
    make_peer("llama").save_pretrained(tmp_path)
    trainer = one_rank(tmp_path)
    model = build_sharded(trainer, trainer.config.model_spec, trainer.model_config)
    expected = model.head.weight.full_tensor()
    weight = model.unsharded_head().weight
    assert not isinstance(weight, DTensor)
    assert torch.equal(weight, expected)
    model.reshard()
    assert isinstance(model.head.weight, DTensor)


@pytest.mark.parametrize("of_policy", [False, True])
@pytest.mark.parametrize("of_reference", [False, True])
def test_offload_reaches_every_fsdp_unit_of_the_model_that_asks_for_it(
    tmp_path, process_group, monkeypatch, of_policy, of_reference
):
    """Dispatch only: on a CPU there is nowhere to offload to, so that torch is not handed the policy."""
    make_peer("llama").save_pretrained(tmp_path)
    trainer = one_rank(tmp_path, enable_cpu_offload=of_policy)
    real, offloaded = fsdp.fully_shard, []

    def fully_shard(module, *, offload_policy=None, **options):
        count = len(module) if isinstance(module, list) else 1  # norm and head are one group of parameters
        offloaded.extend([isinstance(offload_policy, CPUOffloadPolicy)] * count)
        return real(module, **options)

    monkeypatch.setattr(fsdp, "fully_shard", fully_shard)
    reference = build_sibling(trainer, offload_to_cpu=of_reference)
    assert set(offloaded) == {of_reference}  # whatever the policy does
    assert len(offloaded) == len(list(fsdp_modules(reference.parts[0]))) >= 3
    offloaded.clear()
    trainer.config.model_spec.parallelize_fn(  # as TorchTitan's trainer builds the policy
        trainer.model_config.build(),
        parallel_dims=trainer.parallel_dims,
        training=trainer.config.training,
        parallelism=trainer.config.parallelism,
        compile_config=trainer.config.compile,
        ac_config=None,
        dump_folder="",
    )
    assert set(offloaded) == {of_policy}


def test_a_plain_model_has_no_fsdp_units(module):
    assert list(fsdp_modules(module)) == []


# ----------------------------------------------------------------------------------- a vocabulary cut up


@pytest.mark.parametrize(
    ("vocab_size", "starts"),
    [(12, [0, 4, 8]), (11, [0, 4, 8]), (10, [0, 4, 8]), (4, [0, 2, 4]), (3, [0, 1, 2])],
)
def test_rows_of_a_head_are_cut_as_a_dtensor_cuts_them(monkeypatch, vocab_size, starts):
    pieces = torch.arange(vocab_size).chunk(3)
    assert [len(torch.cat(pieces[:rank])) if rank else 0 for rank in range(3)] == starts  # as DTensor does it
    for rank, start in enumerate(starts):
        fake = SimpleNamespace(get_world_size=lambda group: 3, get_rank=lambda group, rank=rank: rank)
        monkeypatch.setattr(sharded_model, "dist", fake)
        assert TensorParallelVocabulary("tp", vocab_size).start == start
