"""Which tensors are gathered together, and how much of them is held."""

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.titan.buckets import full_buckets, in_buckets, one_by_one, peak_bytes

UNITS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), max_size=12)


def cut(units: list[list[int]], bucket_bytes: int) -> list[list[int]]:
    return list(in_buckets(units, size_of=int, bucket_bytes=bucket_bytes))


@given(UNITS, st.integers(1, 120))
def test_every_item_is_in_one_bucket_in_its_order_and_no_bucket_is_too_large(units, bucket_bytes):
    buckets = cut(units, bucket_bytes)
    assert [item for bucket in buckets for item in bucket] == [item for unit in units for item in unit]
    for bucket in buckets:
        assert sum(bucket) <= bucket_bytes // 2 or len(bucket) == 1


@given(UNITS, st.integers(1, 120))
def test_a_unit_that_fits_is_in_one_bucket(units, bucket_bytes):
    items = [[(number, size) for size in unit] for number, unit in enumerate(units)]
    buckets = list(in_buckets(items, size_of=lambda item: item[1], bucket_bytes=bucket_bytes))
    for number, unit in enumerate(units):
        holding = [bucket for bucket in buckets if any(item[0] == number for item in bucket)]
        assert len(holding) == 1 or sum(unit) > bucket_bytes // 2


@given(UNITS, st.integers(1, 120))
def test_what_is_held_is_a_bucket_or_one_larger_item(units, bucket_bytes):
    sizes = [sum(bucket) for bucket in cut(units, bucket_bytes)]
    largest = max((item for unit in units for item in unit), default=0)
    peak = peak_bytes(sizes, bucket_bytes=bucket_bytes)
    assert max(sizes, default=0) <= peak <= max(bucket_bytes, largest)


def test_a_layer_stays_together_if_it_fits():
    assert cut([[3], [3, 3], [2], [9, 1]], 12) == [[3], [3, 3], [2], [9], [1]]
    assert cut([[3], [2, 1], [2, 2, 2]], 12) == [[3, 2, 1], [2, 2, 2]]


def test_a_model_on_one_rank_is_streamed_as_it_stands_and_released_as_it_is_read():
    model = torch.nn.ModuleDict({str(index): torch.nn.Linear(4, 4) for index in range(5)})
    state = model.state_dict()
    for bucket_bytes in (1, 200, 2**20):
        buckets = []
        for bucket in full_buckets(model, bucket_bytes=bucket_bytes):
            buckets.append([name for name, _ in bucket])
            read = dict(one_by_one([bucket]))
            assert not bucket
            assert all(tensor.data_ptr() == state[name].data_ptr() for name, tensor in read.items())
        assert [name for names in buckets for name in names] == list(state)
        assert len(buckets) == {1: 10, 200: 5, 2**20: 1}[bucket_bytes]


def test_reading_one_by_one_takes_from_the_bucket():
    bucket = deque([("a", torch.ones(1)), ("b", torch.ones(2))])
    reading = one_by_one([bucket])
    assert next(reading)[0] == "a"
    assert [name for name, _ in bucket] == ["b"]
