"""A push is confirmed or refused: what was delivered, and what is served. Both sides are fakes."""

import math
from dataclasses import replace

import pytest
import torch

from titan_rl.errors import ConfigError, GeneratorError, HandshakeError
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.types import WeightReceipt
from titan_rl.weight_sync.push import Changes, WeightSync, WeightSyncSection, delivery_fault

PROBE = (5, 6, 7, 8)
OURS = (-1.0, -2.0, -0.5)


def policy() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (6, 4), "layer": (4, 4), "norm": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Receiver:
    """Keeps what arrives. ``on_arrival`` may change a tensor, ``on_receipt`` the receipt."""

    def __init__(self, *, logprobs=OURS, on_arrival=lambda name, t: t, on_receipt=lambda receipt: receipt):
        self.logprobs, self.on_arrival, self.on_receipt = logprobs, on_arrival, on_receipt
        self.held: dict[str, torch.Tensor] = {}
        self.versions: list[int] = []
        self.updates: list[tuple[str, int | None]] = []
        self.asked: list[tuple[int, ...]] = []
        self.altered: list[tuple[str, ...]] = []  # answers, one per question

    def altered_weights(self):
        return self.altered.pop(0) if self.altered else ()

    def load_weights(self, update):
        self.updates.append((update.kind, update.base_version))
        for name, tensor in update.tensors:
            arrived = self.on_arrival(name, tensor.clone())
            if arrived is not None:
                self.held[name] = arrived
        checksums = {name: tensor_checksum(tensor) for name, tensor in self.held.items()}
        self.versions.append(update.version)
        return self.on_receipt(WeightReceipt(update.version, checksums))

    def prompt_logprobs(self, token_ids, temperature=1.0):
        assert temperature == 1.0
        self.asked += token_ids
        return [self.logprobs]


class Ranks:
    """This is rank 1 of 2. Rank 0 may be at fault at the first or the second question."""

    rank = 1

    def __init__(self, *others: str | None) -> None:
        self.others = list(others)
        self.told: list[str | None] = []

    def first(self, text: str | None) -> tuple[int, str] | None:
        self.told.append(text)
        other = self.others.pop(0) if self.others else None
        if other is not None:
            return 0, other
        return None if text is None else (1, text)


def push(receiver, *, version=9, weights=None, ranks=None, bound=5e-4, scored=OURS):
    sync = WeightSync(
        WeightSyncSection(max_probe_difference=bound),
        stream=_Stream(policy() if weights is None else weights),
        generator=receiver,
        policy_logprobs=lambda token_ids: scored,
        probe=PROBE,
        collectives=ranks or Ranks(),
    )
    return sync.push(version)


class _Stream:
    def __init__(self, weights):
        self.weights = weights

    def __iter__(self):
        return iter(self.weights.items())


def test_a_sound_push_is_confirmed_and_measured():
    receiver = Receiver(logprobs=(-1.0, -2.0003, -0.5))
    report = push(receiver)
    assert receiver.versions == [9]
    assert receiver.updates == [("full", None)]
    assert receiver.asked == [PROBE]
    assert all(torch.equal(receiver.held[name], tensor) for name, tensor in policy().items())
    assert (report.version, report.num_tensors) == (9, 3)
    assert report.num_bytes == 4 * (24 + 16 + 4)
    assert report.probe_difference == pytest.approx(3e-4)
    assert report.seconds > 0


def test_the_stream_is_read_anew_at_every_push():
    receiver, weights = Receiver(), policy()
    sync = WeightSync(
        WeightSyncSection(),
        stream=_Stream(weights),
        generator=receiver,
        policy_logprobs=lambda token_ids: OURS,
        probe=PROBE,
        collectives=Ranks(),
    )
    sync.push(1)
    weights["norm"] = torch.full((4,), 3.0)
    sync.push(2)
    assert receiver.versions == [1, 2]
    assert torch.equal(receiver.held["norm"], weights["norm"])


def test_a_version_that_is_served_already_is_confirmed_and_not_sent_again():
    receiver, stream = Receiver(), Counted(policy())
    sync = WeightSync(
        WeightSyncSection(),
        stream=stream,
        generator=receiver,
        policy_logprobs=lambda token_ids: OURS,
        probe=PROBE,
        collectives=Ranks(),
    )
    assert sync.push(4).num_tensors == 3
    again = sync.push(4)
    assert (again.version, again.num_tensors, again.num_bytes) == (4, 0, 0)
    assert (receiver.versions, stream.read) == ([4], 3)
    assert receiver.asked == [PROBE, PROBE]  # it is looked at all the same
    receiver.logprobs = (-1.0, -2.0, -0.4)
    with pytest.raises(HandshakeError, match="does not serve what was delivered"):
        sync.push(4)
    receiver.logprobs = OURS
    sync.push(5)
    assert (receiver.versions, stream.read) == ([4, 5], 6)


def test_after_the_first_push_only_what_can_have_changed_is_sent():
    receiver, weights = Receiver(), policy()
    changing = {"layer": weights["layer"]}
    everything, changes = Counted(weights), Counted(changing)
    sync = WeightSync(
        WeightSyncSection(),
        stream=everything,
        generator=receiver,
        policy_logprobs=lambda token_ids: OURS,
        probe=PROBE,
        collectives=Ranks(),
        changes=Changes("delta", changes),
    )
    assert sync.push(1).num_tensors == 3
    changing["layer"] = torch.full((4, 4), 2.0)
    report = sync.push(2)
    assert (report.num_tensors, report.num_bytes) == (1, 64)
    assert receiver.updates == [("full", None), ("delta", 1)]
    assert torch.equal(receiver.held["layer"], changing["layer"])
    receiver.logprobs = (-1.0, -2.0, -0.4)
    with pytest.raises(HandshakeError):
        sync.push(3)
    receiver.logprobs = OURS
    sync.push(4)  # nothing is served that a delta could apply to
    assert receiver.updates[2:] == [("delta", 2), ("full", None)]
    assert (everything.read, changes.read) == (6, 2)


def test_a_version_that_was_not_confirmed_is_sent_again():
    receiver = Receiver(logprobs=(-1.0, -2.0, -0.4))
    sync = WeightSync(
        WeightSyncSection(),
        stream=_Stream(policy()),
        generator=receiver,
        policy_logprobs=lambda token_ids: OURS,
        probe=PROBE,
        collectives=Ranks(),
    )
    for _ in range(2):
        with pytest.raises(HandshakeError):
            sync.push(4)
    assert receiver.versions == [4, 4]


def _flip_a_bit(name, tensor):
    if name == "layer":
        tensor.view(torch.int32)[2, 1] ^= 1
    return tensor


def _swap_rows(name, tensor):
    return tensor[[1, 0, *range(2, len(tensor))]] if name == "embed" else tensor


DELIVERED = {
    "a name is missing": (
        {"on_arrival": lambda name, t: None if name == "layer" else t},
        "1 tensors did not arrive, layer among them",
    ),
    "one bit differs": (
        {"on_arrival": _flip_a_bit},
        "1 tensors arrived with other contents, layer among them",
    ),
    "rows are swapped": (
        {"on_arrival": _swap_rows},
        "1 tensors arrived with other contents, embed among them",
    ),
    "it was rounded": (
        {"on_arrival": lambda name, t: t.bfloat16().float()},
        "3 tensors arrived with other contents, embed among them",
    ),
    "a parameter is unwritten": (
        {"on_receipt": lambda receipt: replace(receipt, unwritten=("lm_head.weight", "x"))},
        "2 parameters of the generator were not written, lm_head.weight among them: they keep older values",
    ),
    "the version is another": (
        {"on_receipt": lambda receipt: replace(receipt, version=8)},
        "the generator acknowledged version 8 instead of 9",
    ),
}


@pytest.mark.parametrize(("fault", "shown"), DELIVERED.values(), ids=DELIVERED)
def test_what_was_not_delivered_is_refused_before_it_is_probed(fault, shown):
    receiver = Receiver(**fault)
    with pytest.raises(HandshakeError) as caught:
        push(receiver)
    assert str(caught.value) == f"Weight push refused: {shown}."
    assert receiver.asked == []


@pytest.mark.parametrize(
    ("logprobs", "shown"),
    [
        ((-1.0, -2.001, -0.5), "1.00e-03, more than weight_sync.max_probe_difference = 5e-04"),
        ((-1.0, -2.0, -0.4), "1.00e-01"),
        ((math.nan, -2.0, -0.5), "inf"),
        ((-1.0, -2.0, math.nan), "inf"),
        ((-1.0, -math.inf, -0.5), "inf"),
        ((-1.0, -2.0), "inf"),
        ((-1.0, -2.0, -0.5, -0.1), "inf"),
        ((), "inf"),
    ],
)
def test_what_is_delivered_but_not_served_is_refused(logprobs, shown):
    with pytest.raises(HandshakeError, match="does not serve what was delivered") as caught:
        push(Receiver(logprobs=logprobs))
    assert shown in str(caught.value)


@pytest.mark.parametrize("scored", [(math.nan, -2.0, -0.5), (-1.0, math.nan, -0.5), (-1.0, -2.0, math.nan)])
def test_a_policy_that_computes_nan_is_refused_wherever_the_nan_is(scored):
    with pytest.raises(HandshakeError, match="differ from the policy's by inf"):
        push(Receiver(), scored=scored)
    with pytest.raises(HandshakeError, match="differ from the policy's by inf"):
        push(Receiver(logprobs=scored), scored=scored)  # both sides: no number, no agreement


def test_the_bound_is_the_sections():
    receiver = Receiver(logprobs=(-1.0, -2.05, -0.5))
    assert push(receiver, bound=0.1).probe_difference == pytest.approx(0.05)
    with pytest.raises(HandshakeError):
        push(receiver, bound=0.04)


def test_a_sound_rank_refuses_with_the_cause_of_the_rank_at_fault():
    receiver, ranks = Receiver(), Ranks(None, "it did not arrive")
    with pytest.raises(HandshakeError) as caught:
        push(receiver, ranks=ranks)
    assert str(caught.value) == "Weight push refused by the generator of rank 0: it did not arrive."
    assert ranks.told == [None, None]
    assert receiver.asked == []

    ranks = Ranks(None, None, "it is not served")
    with pytest.raises(HandshakeError, match="by the generator of rank 0: it is not served"):
        push(Receiver(), ranks=ranks)
    assert ranks.told == [None, None, None]


@pytest.mark.parametrize("fault", [{"on_receipt": lambda r: replace(r, version=1)}, {"logprobs": ()}])
def test_a_rank_at_fault_tells_the_others_before_it_raises(fault):
    ranks = Ranks()
    with pytest.raises(HandshakeError) as caught:
        push(Receiver(**fault), ranks=ranks)
    assert str(caught.value) == f"Weight push refused: {ranks.told[-1]}."


@pytest.mark.parametrize(
    ("answers", "versions"), [([(), ("embed",)], [9]), ([("embed",)], [])], ids=["this push", "the last one"]
)
def test_weights_that_were_changed_after_loading_are_refused(answers, versions):
    receiver = Receiver()
    receiver.altered = list(answers)
    with pytest.raises(HandshakeError) as caught:
        push(receiver)
    assert str(caught.value) == (
        "Weight push refused: 1 parameters of the generator were changed after loading, embed among them."
    )
    assert receiver.versions == versions  # what was served until now is looked at before anything is loaded


# --------------------------------------------------------------- exceptions in the middle of a collective


class Counted(_Stream):
    """A stream that says how far it was read; each tensor stands for a collective."""

    read = 0

    def __iter__(self):
        for item in self.weights.items():
            self.read += 1
            yield item


def _break_at(name):
    def on_arrival(arrived, tensor):
        if arrived == name:
            raise RuntimeError(f"no room for {name}.")
        return tensor

    return on_arrival


@pytest.mark.parametrize("name", ["embed", "layer", "norm"])
def test_a_generator_that_fails_in_the_middle_leaves_no_rank_waiting(name, capsys):
    stream, ranks = Counted(policy()), Ranks()
    sync = WeightSync(
        WeightSyncSection(),
        stream=stream,
        generator=Receiver(on_arrival=_break_at(name)),
        policy_logprobs=lambda token_ids: OURS,
        probe=PROBE,
        collectives=ranks,
    )
    with pytest.raises(HandshakeError) as caught:
        sync.push(1)
    assert str(caught.value) == f"Weight push refused: loading them raised RuntimeError: no room for {name}."
    assert stream.read == 3
    assert len(ranks.told) == 2
    assert "on_arrival" in capsys.readouterr().err  # where it came from


def test_a_generator_that_stops_reading_leaves_no_rank_waiting():
    class Lazy(Receiver):
        def load_weights(self, update):
            name, tensor = next(iter(update.tensors))
            return WeightReceipt(update.version, {name: tensor_checksum(tensor)})

    stream = Counted(policy())
    sync = WeightSync(
        WeightSyncSection(),
        stream=stream,
        generator=Lazy(),
        policy_logprobs=lambda token_ids: OURS,
        probe=PROBE,
        collectives=Ranks(),
    )
    with pytest.raises(HandshakeError, match="2 tensors did not arrive, layer among them"):
        sync.push(1)
    assert stream.read == 3


def test_a_generator_that_cannot_score_tells_the_others():
    class Mute(Receiver):
        def prompt_logprobs(self, token_ids, temperature=1.0):
            raise GeneratorError("The engine is dead.")

    ranks = Ranks()
    with pytest.raises(HandshakeError, match="scoring the probe raised GeneratorError: The engine is dead"):
        push(Mute(), ranks=ranks)
    assert len(ranks.told) == 3


def test_what_the_stream_raises_is_raised_as_it_is():
    class Broken(_Stream):
        def __iter__(self):
            yield from [*self.weights.items()][:1]
            raise ConfigError("model tensor x", "be known to the adapter", "no name", "Extend it.")

    ranks = Ranks()
    sync = WeightSync(
        WeightSyncSection(),
        stream=Broken(policy()),
        generator=Receiver(),
        policy_logprobs=lambda token_ids: OURS,
        probe=PROBE,
        collectives=ranks,
    )
    with pytest.raises(ConfigError, match="model tensor x"):
        sync.push(1)
    assert ranks.told == [None]  # the stream is the same on all ranks: all of them raise


def test_a_version_that_does_not_fit_is_named_before_anything_else():
    receipt = WeightReceipt(4, {"a": 2}, unwritten=("b",))
    assert delivery_fault({"a": 1, "c": 3}, receipt, 5) == (
        "the generator acknowledged version 4 instead of 5"
    )
    receipt = replace(receipt, version=5)
    assert delivery_fault({"a": 1, "c": 3}, receipt, 5) == "1 tensors did not arrive, c among them"
    assert "not written" in delivery_fault({"a": 1}, receipt, 5)
    receipt = replace(receipt, unwritten=())
    assert delivery_fault({"a": 1}, receipt, 5) == "1 tensors arrived with other contents, a among them"
    assert delivery_fault({"a": 2}, receipt, 5) is None
