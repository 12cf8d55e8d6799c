"""torchrun's own agent, with ranks that are forked from a process that has imported everything.

``python -m tests.faults.warm_agent [options] CONFIG.toml [--section.key value ...]``, the options being those
of torchrun that tests need. A restart then takes a second or two instead of the ten that importing torch and
TorchTitan takes. Rendezvous, supervision, signals and restarts are those of torchrun: the agent is the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import uuid

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.faults import jobs
from tests.integration import runs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--nnodes", default="1:1")
    parser.add_argument("--rdzv-endpoint", default="localhost:0")
    parser.add_argument("--rdzv-id", default="")
    parser.add_argument("--last-call-timeout", type=int, default=1)
    options, arguments = parser.parse_known_args()
    multiprocessing.set_forkserver_preload([*runs.PRELOAD, "tests.faults.jobs"])
    fewest, _, most = options.nnodes.partition(":")
    config = LaunchConfig(
        min_nodes=int(fewest),
        max_nodes=int(most),
        nproc_per_node=options.nproc_per_node,
        run_id=options.rdzv_id or str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=options.rdzv_endpoint,
        rdzv_configs={"last_call_timeout": options.last_call_timeout},
        local_addr="localhost",
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    elastic_launch(config, jobs.rank)(arguments)


if __name__ == "__main__":
    main()
