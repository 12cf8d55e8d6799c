"""Where ``titan-rl conformance`` shows what a row of the peers' fixture is compared with.

The comparisons of :mod:`tests.numerics.peer_rows` are of pure functions. Here each gets the name of the
command's row, the hyperparameters that a fixture must state for it, and what must stand in other fields.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.numerics.peer_rows import ROWS, LeftOut, LossRow

SURROGATES = {
    "clipped_surrogate": "clipped",
    "dual_clipped_surrogate": "dual_clipped",
    "clipped_weight_surrogate": "clipped_weight",
    "soft_gated_surrogate": "soft_gated",
    "reinforce_surrogate": "reinforce",
    "geometric_mean_surrogate": "geometric_mean",
    "gamma_weighted_surrogate": "gamma_weighted",
    "total_variation_masked": "total_variation",
    "binary_kl_masked": "binary_kl_masked",
    "quadratic_surrogate": "quadratic",
}
RATIOS = {
    "sequence_ratio": "sequence_whole_gradient",
    "sequence_token_ratio": "sequence",
}
CORRECTIONS = {
    "truncated_token_weights": "truncated_tokens",
    "truncated_sample_weights": "truncated_samples",
    "masked_token_weights": "masked_tokens",
    "reject_tokens": "reject_tokens",
    "reject_samples_by_geometric_mean": "reject_samples_by_geometric_mean",
    "reject_samples_by_mean_k3": "reject_samples_by_mean_k3",
    "reject_negative_samples_by_mean_k1": "reject_negative_samples",
}
ADVANTAGES = {
    "group_normalized": "group_normalized",
    "leave_one_out": "leave_one_out",
    "length_weighted": "length_weighted",
    "against_baseline": "greedy_baseline",
    "best_of_group": "best_of_group",
}
PREFERENCES = {
    "dpo b.1": ("preference/dpo", {"beta": 0.1}),
    "dpo b.1 ls.1 (cDPO)": ("preference/cdpo", {"beta": 0.1, "label_smoothing": 0.1}),
    "ipo b.1": ("preference/ipo", {"beta": 0.1}),
}
OF_ONE_TOKEN = "in rollouts of one token, of groups of two, with `ref` = 0"
_PARTS = "titan_rl.tools.conformance.parts"


@dataclass(frozen=True)
class Place:
    """A row of the command.

    Attributes:
        row: Its name.
        hyperparameters: Tables that the fixture must have.
        fields: What other fields of the fixture must be: a list, or the name of the field that holds it.
        note: What differs from the function that the peer's row is compared with.
    """

    row: str
    hyperparameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def place(name):
    """Where the counterpart of a peer's row stands; None for a row that is left out."""
    row = ROWS[name]
    if isinstance(row, LossRow):
        return _of_loss(row.loss)
    return None if isinstance(row, LeftOut) else _of_function(name, row)


def _of_loss(loss):
    if loss.old == "generator":  # no row of a part has a surrogate and a penalty that are both not default
        surrogate = {"type": f"{_PARTS}:TotalVariationMasked", **loss.surrogate.arguments}
        kl = {"estimator": loss.kl.name, "coefficient": loss.coefficient}
        table = {"surrogate": surrogate, "kl": kl}
        fields = {"old": "roll", "ref": loss_field(loss)}
        return Place("composition/peer", {"composition/peer": table}, fields, "a table of the fixture")
    parts = [loss.surrogate, loss.aggregation, *loss.corrections]
    tables = {part.name: dict(part.arguments) for part in parts if part.arguments}
    if loss.kl is not None:
        return Place(f"kl/reference|{loss.kl.name}", {**tables, "kl": {"coefficient": loss.coefficient}})
    if loss.corrections:
        (correction,) = loss.corrections
        fields, note = {}, ""
        if correction.name.startswith("reject_negative"):
            fields = {"roll": "old"}
            note = "the peer compares the policy with the old policy, our part with the generator"
        return Place(f"correction/{CORRECTIONS[correction.name]}", tables, fields, note)
    kind = f"surrogate/{SURROGATES[loss.surrogate.name]}"
    if loss.ratio.name in RATIOS:
        kind = f"ratio/{RATIOS[loss.ratio.name]}"
    suffix = "" if loss.aggregation.name == "token_mean" else f"|{loss.aggregation.name}"
    return Place(kind + suffix, tables)


def loss_field(loss):
    """The fixture's name of whom the penalty keeps the policy to."""
    return {"ref": "ref", "generator": "roll"}[loss.kl_to]


def _of_function(name, row):
    arguments = dict(row.arguments)
    if row.kind in ("whitened gae", "gae row 0"):
        tables = {"gae": {**arguments, "lambda_critic": arguments["lambda_policy"]}}
        note = "`lambda_critic` is that of the policy; our part's default is 1"
        suffix = "|whitened" if row.kind == "whitened gae" else ""
        return Place(f"advantage/gae{suffix}", tables, note=note)
    if row.kind == "whitened returns":
        return Place("advantage/returns|whitened", {"discounted_returns": arguments})
    if row.kind == "whitened group":
        return Place("advantage/group_normalized|centred|whitened")
    if row.kind == "group":
        fields = {"greedy": [arguments.pop("baseline")] * 4} if "baseline" in arguments else {}
        return Place(f"advantage/{ADVANTAGES[row.name]}", {row.name: arguments} if arguments else {}, fields)
    if row.kind == "value loss":
        return Place("value_loss/clipped", {row.name: arguments}, {"vpreds": "vpreds", "returns": "returns"})
    if row.kind in ("kl", "kl sum"):
        return Place(f"kl/{row.name}")
    if row.kind == "correction":
        return Place(f"correction/{CORRECTIONS[row.name]}", {row.name: arguments})
    if row.name == "bradley_terry_loss":
        margins = arguments.get("margins", 0.0)
        fields = {"rm_scores": [-0.4, 0.0, 0.8, 0.0, 1.3, 0.0], "margins": [margins] * 6}
        return Place("reward_model/bradley_terry", {}, fields, OF_ONE_TOKEN)
    found, table = PREFERENCES[name.rpartition("/")[2]]
    return Place(found, {found: table}, {"logp": [0.5, -0.2, -0.5, 0.4]}, OF_ONE_TOKEN)
