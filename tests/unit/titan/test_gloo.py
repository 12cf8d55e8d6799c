"""Groups of gloo have one thread, whoever makes them, and are those that torch would make otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_rl.titan import device


@pytest.fixture(params=["", "lo"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    device.install()
    if request.param:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", request.param)
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield
    dist.destroy_process_group()


def options_of(group: Any) -> Any:
    return group._get_backend(torch.device("cpu")).options


@pytest.mark.usefixtures("world")
def test_every_group_has_one_thread_and_keeps_its_timeout() -> None:
    other = dist.new_group(backend="gloo", timeout=timedelta(seconds=33))
    for group, seconds in ((dist.group.WORLD, 77), (other, 33)):
        assert options_of(group)._threads == 1
        assert options_of(group)._timeout == timedelta(seconds=seconds)


@pytest.mark.usefixtures("world")
def test_collectives_that_are_under_way_together_give_what_they_should() -> None:
    inputs = [torch.full((3,), float(number)) for number in range(20)]
    outputs = [torch.empty(3) for _ in inputs]
    works: list[Any] = [
        dist.all_gather_single(into, of, async_op=True) for into, of in zip(outputs, inputs, strict=True)
    ]
    for work in works:
        work.wait()
    assert all(torch.equal(into, of) for into, of in zip(outputs, inputs, strict=True))
