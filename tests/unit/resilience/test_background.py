"""What an asynchronous save copies to, and with which priority it writes."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from titan_rl.resilience import background


def test_the_copy_is_of_now_and_goes_to_the_same_memory_every_time():
    weights, copies = torch.arange(6.0), background.stager()
    first = copies.stage({"weights": weights, "nested": {"step": 3}})
    where = first["weights"].data_ptr()
    weights.add_(1)
    assert first["weights"].tolist() == [0, 1, 2, 3, 4, 5]
    second = copies.stage({"weights": weights, "nested": {"step": 4}})
    assert second["weights"].tolist() == [1, 2, 3, 4, 5, 6]
    assert second["nested"] == {"step": 4}
    assert second["weights"].data_ptr() == where != weights.data_ptr()
    copies.close()


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="Linux alone has priorities of threads")
def test_the_thread_that_writes_comes_after_those_that_train(monkeypatch, tmp_path):
    def priority(*_):
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.setattr(FileSystemWriter, "write_data", priority)
    before, writer = priority(), background._YieldingWriter(str(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(writer.write_data, None, None).result() == 19
    assert priority() == before < 19
