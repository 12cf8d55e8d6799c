"""Experts on a CPU: each token through its own expert, in the precision of the model."""

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models import deepseek_v3, llama3, qwen3

from titan_rl.titan.architecture import architecture_of
from titan_rl.titan.experts import CpuExperts, use_cpu_experts

D, F_DIM, COUNTS = 6, 5, [3, 0, 4, 1]


def experts() -> CpuExperts:
    torch.manual_seed(0)
    module = CpuExperts.Config(dim=D, hidden_dim=F_DIM, num_experts=len(COUNTS)).build()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def by_hand(module: CpuExperts, x: torch.Tensor) -> torch.Tensor:
    """Token by token."""
    owner = [e for e, count in enumerate(COUNTS) for _ in range(count)]
    w1, w2, w3 = module.w1_EFD, module.w2_EDF, module.w3_EFD
    pairs = zip(owner, x, strict=True)
    return torch.stack([w2[e] @ (F.silu(w1[e] @ row) * (w3[e] @ row)) for e, row in pairs])


def test_each_token_goes_through_its_own_expert_in_full_precision():
    module, x = experts().double(), torch.randn(sum(COUNTS), D, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(module(x, torch.tensor(COUNTS)), by_hand(module, x), rtol=1e-12, atol=1e-12)
    torch.autograd.gradcheck(lambda x: module(x, torch.tensor(COUNTS)), x)


def test_an_expert_without_a_token_has_a_gradient_of_zero():
    module, x = experts(), torch.randn(sum(COUNTS), D)
    module(x, torch.tensor(COUNTS)).square().sum().backward()
    for parameter in module.parameters():
        largest = parameter.grad.abs().amax((1, 2))
        assert largest[1] == 0
        assert (largest[[0, 2, 3]] > 0).all()


def test_a_rank_without_any_token_still_takes_part_in_the_backward_pass():
    module, x = experts(), torch.randn(0, D, requires_grad=True)
    out = module(x, torch.zeros(len(COUNTS), dtype=torch.int64))
    assert out.shape == (0, D)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


@pytest.mark.parametrize(
    ("registry", "flavor", "num_experts"),
    [(qwen3, "debugmodel_moe", 64), (deepseek_v3, "debugmodel", 8), (llama3, "debugmodel", 0)],
)
def test_the_experts_of_every_layer_of_a_flavor_are_swapped(registry, flavor, num_experts):
    model = registry.model_registry(flavor, attn_backend="flex").model
    use_cpu_experts(model)
    moes = [layer.moe for layer in model.layers if layer.moe is not None]
    assert bool(moes) == bool(num_experts)
    assert all(type(moe.routed_experts.inner_experts) is CpuExperts.Config for moe in moes)
    sizes = architecture_of(model)
    assert sizes.num_experts == num_experts
