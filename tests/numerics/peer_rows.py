"""Every row of ``data/fixture_a.json``: what it is compared with, or why it is not.

A row is a number, or a set of numbers, that one released function of a peer gave. Its name is its path in
the file. ``test_peer_rows.py`` runs every comparison and proves that no row is missing; the docs' page on
conformance shows this table.
"""

from dataclasses import dataclass, field

from tests.numerics.composition import Loss, part

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
DUAL = {**CLIP, "clip_dual": 3.0}
TOKEN_MEAN = part("token_mean")
SAMPLE_MEAN = part("sample_mean_of_token_means")
SAMPLE_SUM = part("sample_mean_of_token_sums")
SAMPLE_CONSTANT = part("sample_mean_over_constant", max_tokens=6)
CLIPPED = part("clipped_surrogate", **CLIP)
DUAL_CLIPPED = part("dual_clipped_surrogate", **DUAL)


@dataclass(frozen=True)
class LossRow:
    """Loss and gradient norm of a composition."""

    loss: Loss
    note: str = ""

    def __str__(self):
        return str(self.loss)


@dataclass(frozen=True)
class Function:
    """Values of one function; how its arguments come from the fixture is in the test of its ``kind``."""

    kind: str
    name: str
    arguments: dict = field(default_factory=dict)
    note: str = ""

    def __str__(self):
        return str(part(self.name, **self.arguments))


@dataclass(frozen=True)
class LeftOut:
    """A row without a counterpart."""

    reason: str


def _loss(surrogate, aggregation, note="", **parts):
    return LossRow(Loss(surrogate=surrogate, aggregation=aggregation, **parts), note)


def _under(path, rows):
    return {f"{path}/{name}": row for name, row in rows.items()}


_SEQUENCE = part("sequence_ratio")
_SEQUENCE_TOKEN = part("sequence_token_ratio")
_PROBABILITIES = {"max_decrease": 0.2, "max_increase": 0.28, "max_weight": 3.0}
_VERL_KL = {
    "kl": "k1",
    "k1": "k1",
    "abs": "absolute",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}

VERL = {
    **_under(
        "verl_0.9.1/advantages",
        {
            "gae(g=0.99,l=0.95)": Function(
                "whitened gae",
                "gae",
                {"gamma": 0.99, "lambda_policy": 0.95},
                "then whiten, which verl does inside; its values at masked tokens are not compared",
            ),
            "grpo": Function("group", "group_normalized", {"normalise_std": True}),
            "grpo_no_std(dr_grpo)": Function("group", "group_normalized", {"normalise_std": False}),
            "rloo": Function("group", "leave_one_out"),
            "opo": Function("group", "length_weighted"),
            "rpp(g=1)": Function("whitened returns", "discounted_returns", {"gamma": 1.0}, "then whiten"),
            "rpp_baseline": Function(
                "whitened group", "group_normalized", {"normalise_std": False}, "on every token, then whiten"
            ),
            "remax": Function("group", "against_baseline", {"baseline": 0.5}),
            "grpo_passk": Function("group", "best_of_group"),
        },
    ),
    **_under(
        "verl_0.9.1/policy_loss(clip .2/.28,c=3)",
        {
            "vanilla|token-mean": _loss(DUAL_CLIPPED, TOKEN_MEAN),
            "vanilla|seq-mean-token-mean": _loss(DUAL_CLIPPED, SAMPLE_MEAN),
            "vanilla|seq-mean-token-sum": _loss(DUAL_CLIPPED, SAMPLE_SUM),
            "vanilla|seq-mean-token-sum-norm": _loss(DUAL_CLIPPED, SAMPLE_CONSTANT),
            "dppo_tv|token-mean": _loss(part("total_variation_masked", **_PROBABILITIES), TOKEN_MEAN),
            "dppo_kl|token-mean": _loss(
                part("binary_kl_masked", max_kl_decrease=0.2, max_kl_increase=0.28, max_weight=3.0),
                TOKEN_MEAN,
            ),
            "gspo|seq-mean-token-mean": _loss(
                CLIPPED, SAMPLE_MEAN, "verl bounds the log-ratio above by 10, here ±20", ratio=_SEQUENCE_TOKEN
            ),
            "sapo|seq-mean-token-mean": _loss(
                part("soft_gated_surrogate", tau_positive=1.0, tau_negative=1.05), SAMPLE_MEAN
            ),
            "gpg|token-mean": _loss(part("reinforce_surrogate"), TOKEN_MEAN),
            "geo_mean|token-mean": _loss(
                part("geometric_mean_surrogate", **CLIP),
                SAMPLE_MEAN,
                "verl means over samples whatever the aggregation is called; bounds are in log space",
            ),
            "dro|token-mean": _loss(part("quadratic_surrogate", beta=0.5), TOKEN_MEAN),
            "cispo|token-mean": _loss(part("clipped_weight_surrogate", **CLIP), TOKEN_MEAN),
        },
    ),
    "verl_0.9.1/value_loss(clip=.2)": Function("value loss", "clipped_value_loss", {"clip": 0.2}),
    **_under("verl_0.9.1/kl", {name: Function("kl", ours) for name, ours in _VERL_KL.items()}),
    **_under(
        "verl_0.9.1/rollout_correction",
        {
            "token_tis_c2": Function("correction", "truncated_token_weights", {"cap": 2.0}),
            "seq_tis_c2": Function("correction", "truncated_sample_weights", {"cap": 2.0}),
            "icepop_.5_5": Function("correction", "masked_token_weights", {"low": 0.5, "high": 5.0}),
            "geo_rs_k1_.99_1.01": Function(
                "correction", "reject_samples_by_geometric_mean", {"low": 0.99, "high": 1.01}
            ),
            "token_rs_k1_.5_2": Function("correction", "reject_tokens", {"low": 0.5, "high": 2.0}),
            "seq_mean_k3_.01": Function("correction", "reject_samples_by_mean_k3", {"max_kl": 0.01}),
        },
    ),
}

TRL = _under(
    "trl_1.16.0",
    {
        "grpo|token": _loss(CLIPPED, SAMPLE_MEAN),
        "bnpo|token": _loss(CLIPPED, TOKEN_MEAN),
        "dr_grpo|token": _loss(CLIPPED, SAMPLE_CONSTANT),
        "dapo|token": _loss(CLIPPED, TOKEN_MEAN),
        "cispo|token": _loss(
            part("clipped_weight_surrogate", clip_low=1.0, clip_high=0.28),
            TOKEN_MEAN,
            "TRL's bound is absolute and has no lower side: epsilon_high = 1.28 is our clip_high = 0.28",
        ),
        "sapo|token": _loss(part("soft_gated_surrogate", tau_positive=1.0, tau_negative=1.05), SAMPLE_MEAN),
        "luspo|sequence": _loss(CLIPPED, SAMPLE_SUM, ratio=_SEQUENCE),
        "vespo|token": _loss(
            part(
                "gamma_weighted_surrogate",
                k_positive=2.0,
                lambda_positive=3.0,
                k_negative=3.0,
                lambda_negative=2.0,
            ),
            TOKEN_MEAN,
        ),
        "gspo=grpo|sequence": _loss(CLIPPED, SAMPLE_MEAN, ratio=_SEQUENCE),
        "dapo+beta.05_k3": _loss(CLIPPED, TOKEN_MEAN, kl=part("k3"), coefficient=0.05),
        "dapo+token_truncate_c2": _loss(
            CLIPPED, TOKEN_MEAN, corrections=(part("truncated_token_weights", cap=2.0),)
        ),
        "dapo+opsm.05": _loss(
            CLIPPED, TOKEN_MEAN, corrections=(part("reject_negative_samples_by_mean_k1", max_kl=0.05),)
        ),
        "dapo+top_entropy_.5": LeftOut("the peer's function failed outside its trainer: the row is an error"),
    },
)

OPENRLHF = _under(
    "others/openrlhf",
    {
        "ppo token_level": _loss(CLIPPED, TOKEN_MEAN),
        "ppo seq_level": _loss(CLIPPED, SAMPLE_MEAN),
        "ppo dual_clip3": _loss(DUAL_CLIPPED, TOKEN_MEAN),
        "gspo": _loss(CLIPPED, SAMPLE_MEAN, ratio=_SEQUENCE),
        "tis token clip [0,2]": _loss(
            CLIPPED, TOKEN_MEAN, corrections=(part("truncated_token_weights", cap=2.0),)
        ),
        "icepop token mask [.5,5]": _loss(
            CLIPPED, TOKEN_MEAN, corrections=(part("masked_token_weights", low=0.5, high=5.0),)
        ),
        "seq mask geo [.99,1.01]": _loss(
            CLIPPED,
            TOKEN_MEAN,
            "every sample is rejected",
            corrections=(part("reject_samples_by_geometric_mean", low=0.99, high=1.01),),
        ),
        **_under("kl", {name: Function("kl", name) for name in ("k1", "k2", "k3")}),
        "bradley_terry": Function(
            "preference", "bradley_terry_loss", {}, "rewards inferred: differences -0.4, 0.8, 1.3"
        ),
        "bt_margin.5": Function("preference", "bradley_terry_loss", {"margins": 0.5}, "as above"),
        "dpo b.1": Function("preference", "dpo_loss", {"beta": 0.1}, "log-ratios from the row's rewards"),
        "dpo b.1 ls.1 (cDPO)": Function("preference", "dpo_loss", {"beta": 0.1, "label_smoothing": 0.1}),
        "ipo b.1": Function("preference", "ipo_loss", {"beta": 0.1}, "on sums of log-probabilities"),
    },
)

OTHERS = {
    "others/slime/ppo token-mean c3": _loss(DUAL_CLIPPED, TOKEN_MEAN),
    "others/slime/cispo[.8,1.28] token-mean": _loss(part("clipped_weight_surrogate", **CLIP), TOKEN_MEAN),
    "others/slime/kl_k3_sum": Function("kl sum", "k3"),
    "others/slime/gae row0": Function("gae row 0", "gae", {"gamma": 0.99, "lambda_policy": 0.95}),
    "others/slime/chunked_gae==vanilla": LeftOut("the peer's check of its own two implementations"),
    "others/titanrl/dapo .2/.28": _loss(
        CLIPPED,
        TOKEN_MEAN,
        "the peer starts from the logits, the fixture's log-probabilities have 4 decimals",
    ),
    "others/forge_sig": LeftOut("a function's signature, no value: torchforge has no released loss to call"),
    "prime_rl/prime_rl default DPPO .2/.2 kl_tau1e-3 (pi/mu=roll), sum/ntok": _loss(
        part(
            "total_variation_masked",
            max_decrease=0.2,
            max_increase=0.2,
            max_weight=float("inf"),
            objective="ratio",
        ),
        TOKEN_MEAN,
        "kl_tau (log p - log p_generator)^2 is 2 kl_tau k2; the ratio is against the generator",
        old="generator",
        kl=part("k2"),
        coefficient=2e-3,
        kl_to="generator",
    ),
}

ROWS = {**VERL, **TRL, **OPENRLHF, **OTHERS}


def names(data):
    """The path of every row of a fixture file."""
    found = []

    def walk(node, path):
        if path and (not isinstance(node, dict) or {"loss", "adv", "weights", "mask"} & node.keys()):
            found.append("/".join(path))
            return
        for key, child in node.items():
            if path or key not in ("about", "fixture"):
                walk(child, [*path, key])

    walk(data, [])
    return found


def find(data, name):
    """The values of a row; names of rows contain slashes of their own."""
    node, rest = data, name
    while rest:
        key = max((key for key in node if rest == key or rest.startswith(f"{key}/")), key=len)
        node, rest = node[key], rest[len(key) + 1 :]
    return node
