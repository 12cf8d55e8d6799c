"""The reference's log-probabilities on disk: kept exactly, known by tokens and weights, safe when damaged."""

import pytest
import torch
from torch import nn

from tests.unit.titan.trainer_fakes import one_part
from titan_rl.policy.reference_cache import ReferenceCache, completion_key, weights_fingerprint


class Model(nn.Module):
    def __init__(self, value=1.0, *, swap=False):
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(2, 2, bias=False)})
        self.norm, self.lm_head = nn.Linear(2, 1, bias=False), None
        with torch.no_grad():
            self.layers["0"].weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            self.norm.weight.copy_(torch.tensor([[2.0, value] if swap else [value, 2.0]]))


def test_values_come_back_bit_for_bit(tmp_path):
    values = [-0.1, -123.456789, -1e-7]
    cache = ReferenceCache(tmp_path, "a" * 64)
    cache.add([5, 2**62 + 1, 7], values)
    cache.save()
    again = ReferenceCache(tmp_path, "a" * 64)
    assert again.lookup([7, 5, 2**62 + 1]) == [values[2], values[0], values[1]]
    assert list(tmp_path.iterdir()) == [again.path]


def test_only_what_is_missing_is_asked_for_and_each_key_once(tmp_path):
    cache = ReferenceCache(tmp_path, "a" * 64)
    cache.add([1, 2], [0.0, 0.0])
    assert cache.missing([1, 3, 2, 4, 3]) == [1, 3]
    with pytest.raises(KeyError):
        cache.lookup([3])


def test_another_reference_has_another_file(tmp_path):
    cache = ReferenceCache(tmp_path, "a" * 64)
    cache.add([1], [-2.0])
    cache.save()
    assert len(ReferenceCache(tmp_path, "b" * 64)) == 0
    assert len(ReferenceCache(tmp_path, "a" * 64)) == 1


@pytest.mark.parametrize("content", [b"", b"half a file", None])
def test_a_damaged_file_is_as_good_as_none(tmp_path, content):
    cache = ReferenceCache(tmp_path, "a" * 64)
    cache.add([1, 2], [-2.0, -3.0])
    cache.save()
    cache.path.write_bytes(cache.path.read_bytes()[:-4] if content is None else content)
    again = ReferenceCache(tmp_path, "a" * 64)
    assert len(again) == 0
    again.add([1], [-2.5])
    again.save()
    assert ReferenceCache(tmp_path, "a" * 64).lookup([1]) == [-2.5]


def test_a_key_depends_on_every_token_and_on_where_the_completion_starts():
    keys = {completion_key(ids, n) for ids in ([1, 2, 3], [1, 23], [12, 3], [1, 2, 4]) for n in (1, 2)}
    assert len(keys) == 8
    assert all(0 <= key < 2**63 for key in keys)
    assert completion_key([1, 2, 3], 1) == completion_key((1, 2, 3), 1)


def test_a_fingerprint_is_of_every_weight_its_place_and_the_settings():
    prints = [
        weights_fingerprint(one_part(model), dtype)
        for model, dtype in (
            (Model(), "float32"),
            (Model(), "bfloat16"),
            (Model(1.0000001), "float32"),
            (Model(swap=True), "float32"),
        )
    ]
    assert len(set(prints)) == 4
    assert prints[0] == weights_fingerprint(one_part(Model()), "float32")
