"""What test_pairs_two_ranks.py computes, on one rank or on two; see launching.py.

The gradient of one step of every loss on preferences, in several layouts and under planted faults.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.distributed import fsdp_worker, launching
from titan_rl.algorithms.preference_losses import Dpo, Ipo, Kto, LengthNormalisedDpo, Orpo, SimPO
from titan_rl.algorithms.reward_model_losses import BradleyTerry
from titan_rl.config.choice import build
from titan_rl.data.preferences import Encoded, Preference
from titan_rl.policy.reward_scorer import RewardScorer
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.models import build_sibling, copy_shards, local
from titan_rl.titan.value_model import build_value_model, copy_backbone, init_head
from titan_rl.titan.weights import load_hf
from titan_rl.trainers.pair_batches import PairBatch, align_ranks, make_batches
from titan_rl.trainers.pair_data import deal, num_sides
from titan_rl.trainers.pair_trainer import PairTrainer
from titan_rl.trainers.preference import PreferenceTrainer
from titan_rl.trainers.reward_model import RewardModelTrainer

LONGEST = 16
LOSSES: dict[str, Any] = {
    "dpo": Dpo.Config(beta=0.3),
    "cdpo": Dpo.Config(beta=0.3, label_smoothing=0.2),
    "length_normalised_dpo": LengthNormalisedDpo.Config(),
    "ipo": Ipo.Config(beta=0.3),
    "simpo": SimPO.Config(),
    "orpo": Orpo.Config(odds_weight=0.5),
    "kto": Kto.Config(beta=0.3, undesirable_weight=1.5),
    "kto_single": Kto.Config(beta=0.3),
    "bradley_terry": BradleyTerry.Config(centring=0.1),
}
# No two documents share a row of LONGEST tokens. A row of 75 holds several, and micro-batches of such rows
# differ in their numbers of pairs and of single completions.
LAYOUTS = {
    "eight_of_one": {"row_tokens": LONGEST, "rows": 2},
    "one_of_eight": {"row_tokens": LONGEST, "rows": 16},
    "packed": {"row_tokens": 75, "rows": 1},
}


def documents(*, single: bool = False) -> list[Encoded]:
    """Eight preferences of uneven length, the completions of 3 to 9 tokens; or each with one side only."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(8):
        prompt = torch.randint(90, (6 + index % 2,), generator=generator).tolist()
        sides = []
        for side in ("chosen", "rejected"):
            length = int(torch.randint(3, 10, (1,), generator=generator))
            ids = torch.randint(90, (length,), generator=generator).tolist()
            sides.append((side, prompt + ids, [False] * len(prompt) + [True] * length))
        if single:
            sides = [sides[index % 3 > 0]]
        texts = {
            name: "text" if any(s[0] == name for s in sides) else None for name in ("chosen", "rejected")
        }
        found.append(Encoded(Preference(str(index), (), **texts, margin=0.25 * index), tuple(sides)))
    return found


class PairRank(fsdp_worker.Rank):
    """The attributes of a trainer that the loop reads, with the trainers' own methods."""

    forward_backward = PairTrainer.forward_backward
    frozen_values = PairTrainer.frozen_values
    kl_baseline = PairTrainer.kl_baseline
    _inputs = PairTrainer._inputs
    _ref_logprobs = PairTrainer._ref_logprobs
    reduce = PairTrainer.reduce

    def make_batches(self, drawn: list[Encoded]) -> list[PairBatch]:
        """This rank's, in the layout that is set; what the test calls preferences is encoded already."""
        mine = deal(drawn, list, attention_cost=0.05, collectives=self.collectives)
        batches = make_batches(mine, pad_to="longest", **LAYOUTS[self.layout])
        if self.layout == "eight_of_one":
            batches = [b for p in mine for b in make_batches([p], pad_to="longest", **LAYOUTS[self.layout])]
        return align_ranks(batches, collectives=self.collectives, device=self.device)


class Policy(PairRank):
    values = PreferenceTrainer.values


class Reward(PairRank):
    values = RewardModelTrainer.values


class Lookup(dict):
    """A reference's log-probabilities by key, as the cache gives them."""

    def lookup(self, keys: list[int]) -> list[float]:
        return [self[key] for key in keys]


class Split:
    """Each preference's completions behind the prompt of the next."""

    def __init__(self, preferences: list[Encoded]) -> None:
        self.preferences = preferences

    def mismatched(self, preference: Encoded) -> Encoded:
        own = preference.documents[0]
        prompt = own[1][: len(own[2]) - sum(own[2])]
        other = self.preferences[(self.preferences.index(preference) + 1) % len(self.preferences)]
        sides = []
        for side, ids, mask in other.documents:
            completion = ids[len(mask) - sum(mask) :]
            flags = [False] * len(prompt) + [True] * len(completion)
            sides.append((side, prompt + completion, flags))
        return Encoded(other.preference, tuple(sides))


def trainer(directory: Path, kind: type[PairRank], **parallel: Any) -> PairRank:
    """A policy or a reward model, and the log-probabilities of a reference of other weights."""
    base = fsdp_worker.build(directory / "llama", **parallel)
    load_hf(base.policy, base.adapter, str(directory / "llama"))
    rank = kind(**vars(base))
    rank.collectives = Collectives(rank.parallel_dims, torch.device("cpu"))
    rank.layout = "one_of_eight"
    if kind is Reward:
        model = build_value_model(rank, rank.config.model_spec, rank.model_config)
        copy_backbone(rank.policy, model)
        init_head(model, std=0.3, seed=11)
        rank.policy = model
        return rank
    rank.policy.skip_head()
    policy = rank.policy
    sibling = build_sibling(rank)
    copy_shards(policy, sibling)
    for index, parameter in enumerate(sibling.parameters()):
        with torch.no_grad():
            local(parameter).mul_(1.0 + 0.02 * (index % 5))
    rank.policy, rank.reference = sibling, Lookup()
    for single in (False, True):
        preferences = documents(single=single)
        split = Split(preferences)
        batches = [*_all(rank, preferences), *_all(rank, [split.mismatched(p) for p in preferences])]
        for batch, values in zip(batches, rank.frozen_values(batches), strict=True):
            rank.reference |= zip(batch.keys, values.tolist(), strict=True)
    rank.policy = policy
    return rank


def _all(rank: PairRank, preferences: list[Encoded]) -> list[PairBatch]:
    """All preferences on every rank: each rank knows every key."""
    return [
        b.to(rank.device) for b in make_batches(preferences, row_tokens=LONGEST, rows=16, pad_to="longest")
    ]


def step(
    rank: PairRank, name: str, layout: str, *, fault: str = ""
) -> tuple[dict[str, Any], dict[str, float]]:
    """Whole gradients and metrics of one step."""
    rank.loss_fn, rank.layout = build(LOSSES[name]), layout
    preferences = documents(single=name == "kto_single")
    split, counts = Split(preferences), num_sides([p.preference for p in preferences])
    batches = rank.make_batches(preferences)
    baseline = rank.kl_baseline(split, preferences)
    rank.policy.parts[0].zero_grad()
    parts = []
    if fault == "mean_per_micro_batch":
        for batch in batches:
            some = len(batch.chosen) * len(batches), len(batch.rejected) * len(batches)
            parts += rank.forward_backward([batch], counts=some, baseline=baseline)
    elif fault == "baseline_per_micro_batch":
        for batch in batches:
            (values,) = rank.frozen_values([batch])
            mine = (values - rank._ref_logprobs(batch)).mean().clamp(min=0).nan_to_num()
            parts += rank.forward_backward([batch], counts=counts, baseline=mine)
    else:
        parts = rank.forward_backward(batches, counts=counts, baseline=baseline)
    return fsdp_worker.whole_gradients(rank.policy), rank.reduce(parts)


def run(directory: Path) -> None:
    ranks = {Policy: trainer(directory, Policy), Reward: trainer(directory, Reward)}
    tensors: dict[str, torch.Tensor] = {}
    report: dict[str, Any] = {"metrics": {}, "micro_batches": {}}

    def keep(case: str, result: tuple[dict[str, Any], dict[str, float]]) -> None:
        tensors.update({f"{case}/{name}": gradient for name, gradient in result[0].items()})
        report["metrics"][case] = result[1]

    for name in LOSSES:
        rank = ranks[Reward if name == "bradley_terry" else Policy]
        for layout in LAYOUTS:
            keep(f"{name}/{layout}", step(rank, name, layout))
        keep(f"{name}/fault/mean", step(rank, name, "packed", fault="mean_per_micro_batch"))
        with fsdp_worker.leaking(rank.policy):
            keep(f"{name}/fault/leaking", step(rank, name, "packed"))
    keep("kto/fault/baseline", step(ranks[Policy], "kto", "packed", fault="baseline_per_micro_batch"))
    for layout in LAYOUTS:
        ranks[Policy].layout = layout
        report["micro_batches"][layout] = len(ranks[Policy].make_batches(documents()))
    report["scores"] = scores(ranks[Reward])
    launching.write(directory, report, tensors)


def scores(rank: Reward) -> dict[str, list[float]]:
    """All documents' rewards by the scorer, in two layouts; every rank scores them all."""
    scorer = RewardScorer(rank.policy)
    found = {}
    for layout in ("one_of_eight", "packed"):
        packed = make_batches(documents(), pad_to="longest", **LAYOUTS[layout])
        renumbered, start = [], 0
        order = []
        for batch in packed:
            index = batch.micro_batch.sample_index
            moved = torch.where(index >= 0, index + start, -1)
            renumbered.append(SimpleNamespace(**_fields(batch.micro_batch) | {"sample_index": moved}))
            start += len(batch.keys)
            order += batch.keys
        rewards = scorer(renumbered, start).tolist()
        found[layout] = [reward for _, reward in sorted(zip(order, rewards, strict=True))]
    return found


def _fields(micro_batch: Any) -> dict[str, Any]:
    return {name: getattr(micro_batch, name) for name in type(micro_batch).__slots__}
