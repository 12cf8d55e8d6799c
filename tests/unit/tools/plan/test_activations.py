"""The model of activations against what autograd keeps in TorchTitan's own layers, on a CPU."""

from types import SimpleNamespace

import pytest
import torch
from torchtitan.distributed import activation_checkpoint

from tests.distributed.plan_worker import Saved
from titan_rl.titan import device
from titan_rl.titan.architecture import architecture_of
from titan_rl.titan.models import ModelSection, build_spec
from titan_rl.tools.plan.activations import layer_bytes, outside_layers
from titan_rl.tools.plan.run_facts import GeneratorFacts, RunFacts
from titan_rl.trainers.layout import Degrees

ROWS, TOKENS, LAYERS = 2, 256, 2
CLOSE = 0.01  # relative
POLICIES = {"selective": "SelectiveAC", "full": "FullAC"}


def facts(architecture, *, recomputation, device_type="cpu", compute_bytes=4, sequence=True, **degrees):
    return RunFacts(
        world_size=1,
        degrees=Degrees(**degrees),
        architecture=architecture,
        parallelism=SimpleNamespace(enable_sequence_parallel=sequence),
        device_type=device_type,
        storage_bytes=4,
        compute_bytes=compute_bytes,
        moment_bytes=4,
        seq_len=TOKENS,
        rows=ROWS,
        recomputation=recomputation,
        prompts=1,
        group_size=1,
        prompt_tokens=1,
        completion_tokens=1,
        steps=1,
        steps_per_iteration=1,
        generator=GeneratorFacts(),
    )


def measured(monkeypatch, spec, recomputation):
    """Bytes that the layers of a model keep for the backward pass, and what stands beside them."""
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model._skip_lm_head = True
    saved = Saved(model)
    if recomputation in POLICIES:
        policy = getattr(activation_checkpoint, POLICIES[recomputation])
        policy.Config().build(dump_folder="").apply(model)
        monkeypatch.setattr(activation_checkpoint, "create_selective_checkpoint_contexts", saved.contexts)
    positions = torch.arange(TOKENS).repeat(ROWS, 1)
    tokens = torch.randint(0, spec.model.vocab_size, (ROWS, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
    return saved.num_bytes()


@pytest.mark.parametrize("recomputation", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        ("llama3", "debugmodel"),
        ("qwen3", "debugmodel"),
        ("qwen3", "debugmodel_non_fused_qkv"),
        # Not with experts: a CPU computes them one by one (titan/experts.py), a GPU in one grouped product.
    ],
)
def test_what_layers_keep_is_what_autograd_keeps(monkeypatch, name, flavor, recomputation):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    device.install()
    spec = build_spec(ModelSection(name=name, flavor=flavor))
    spec.model.layers = spec.model.layers[:LAYERS]
    run = facts(architecture_of(spec.model), recomputation=recomputation)
    layers = [layer_bytes(run, index) for index in range(LAYERS)]
    # The hidden states of trained tokens are selected outside of the model.
    beside = outside_layers(run, is_first=True, is_last=True) - 4 * run.architecture.dim
    planned = ROWS * TOKENS * (sum(layer.kept for layer in layers) + beside)
    planned += sum(layer.per_layer for layer in layers) if recomputation == "none" else 0
    assert planned == pytest.approx(measured(monkeypatch, spec, recomputation), rel=CLOSE)
