"""The mixtures of experts of Hugging Face's Qwen3-MoE, both ways between ``config.json`` and TorchTitan."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torchtitan.models.common.config_utils import (
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import MoE

from titan_rl.errors import ConfigError

MOE_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
"""What transformers takes where a Qwen3-MoE's ``config.json`` is silent, if it is not derived."""


def with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """A Qwen3-MoE's ``config.json`` with every key that is needed here.

    Args:
        hf: Its contents.
    """
    # transformers 5 calls the number of experts by another name, which it also reads.
    renamed = {"num_experts": hf["num_local_experts"]} if "num_local_experts" in hf else {}
    return MOE_DEFAULTS | renamed | hf


def has_experts(hf: dict[str, Any], layer: int) -> bool:
    """Whether a layer of a Qwen3-MoE has experts rather than one feed-forward.

    Args:
        hf: From :func:`with_defaults`.
        layer: Number of the layer, from 0.
    """
    return layer not in (hf.get("mlp_only_layers") or ()) and (layer + 1) % hf["decoder_sparse_step"] == 0


def check_experts(hf: dict[str, Any], where: str) -> None:
    """Refuse sizes of experts that make no model.

    Args:
        hf: As for :func:`has_experts`.
        where: The file, for errors.

    Raises:
        ConfigError: a size is no positive integer, more experts are chosen than there are, or none is left.
    """
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"):
        if not isinstance(hf.get(key), int) or hf[key] < 1:
            raise ConfigError(
                f"{where}: {key}", "be a positive integer", hf.get(key), "Download or write the file again."
            )
    if hf["num_experts_per_tok"] > hf["num_experts"]:
        raise ConfigError(
            f"{where}: num_experts_per_tok",
            f"be at most num_experts = {hf['num_experts']}",
            hf["num_experts_per_tok"],
            "Check the file.",
        )
    if not any(has_experts(hf, layer) for layer in range(int(hf.get("num_hidden_layers") or 0))):
        raise ConfigError(
            f"{where}: mlp_only_layers",
            "leave experts in at least one layer",
            hf.get("mlp_only_layers"),
            "A model without experts is a Qwen3ForCausalLM.",
        )


def moe_from_hf(hf: dict[str, Any]) -> MoE.Config:
    """TorchTitan's mixture of experts for a layer. Without a load-balancing bias, which Qwen3-MoE has not.

    Args:
        hf: As for :func:`has_experts`, checked.
    """
    normal = partial(nn.init.normal_, std=float(hf.get("initializer_range", 0.02)))
    sizes: dict[str, Any] = {
        "dim": hf["hidden_size"],
        "num_experts": hf["num_experts"],
        "top_k": hf["num_experts_per_tok"],
    }
    return make_moe_config(
        num_experts=hf["num_experts"],
        router=make_router_config(
            **sizes,
            gate_param_init={"weight": normal},
            score_func="softmax",
            route_norm=bool(hf["norm_topk_prob"]),
        ),
        routed_experts=make_routed_experts_config(
            **sizes,
            hidden_dim=hf["moe_intermediate_size"],
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal),
            comm_backend="standard",
        ),
        load_balance_coeff=None,
    )


def moe_to_hf(layers: list[Any]) -> dict[str, Any]:
    """The keys of ``config.json`` that tell a Qwen3-MoE from a Qwen3.

    Args:
        layers: TorchTitan's configurations of all layers; at least one has experts.

    Raises:
        ConfigError: transformers' model would compute something else.
    """
    moes = [layer.moe for layer in layers if layer.moe is not None]
    first: Any = moes[0]
    router, experts = first.router, first.routed_experts.inner_experts
    refuse_router_bias(moes)
    is_plain = all(
        moe.shared_experts is None
        and moe.router.score_func == "softmax"
        and moe.router.num_expert_groups is None
        and moe.router.route_scale == 1.0
        and not moe.router.gate.bias
        and _sizes(moe) == _sizes(first)
        for moe in moes
    )
    if not is_plain:
        raise ConfigError(
            "model",
            "route as Qwen3-MoE does (softmax, no groups, no scale, no shared experts, all layers alike) to "
            "be written in Hugging Face layout",
            "another mixture of experts",
            'Set generator.type = "local" and model.export = false.',
        )
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, layer in enumerate(layers) if layer.moe is None],
        "moe_intermediate_size": experts.hidden_dim,
        "norm_topk_prob": router.route_norm,
        "num_experts": first.num_experts,
        "num_experts_per_tok": router.top_k,
    }


def refuse_router_bias(moes: list[Any]) -> None:
    """Refuse a load-balancing bias in what Hugging Face's Qwen3-MoE is to compute: it has no place for one.

    Args:
        moes: TorchTitan's configurations of the mixtures of experts.

    Raises:
        ConfigError: a router has a bias.
    """
    coefficient = next((m.load_balance_coeff for m in moes if m.load_balance_coeff is not None), None)
    if coefficient is not None:
        raise ConfigError(
            "model.load_balance_coeff",
            "be 0 for vLLM and for exports: a Qwen3-MoE in Hugging Face layout has no place for the routers' "
            "load-balancing bias, and would route otherwise than the policy",
            coefficient,
            "Set model.load_balance_coeff = 0, which builds the model without it; or keep it with "
            'generator.type = "local" and model.export = false.',
        )


def _sizes(moe: Any) -> tuple[Any, ...]:
    inner = moe.routed_experts.inner_experts
    return moe.num_experts, moe.router.top_k, moe.router.route_norm, inner.hidden_dim
