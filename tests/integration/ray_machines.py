"""A Ray cluster whose machines are all this one, in a process of its own: `python -m tests.integration.ray_machines FOLDER`.

Ray reads its settings when it is imported, so they are set before. Commands on standard input, one a line: `add NAME` and
`remove NAME`, which Ray is not told about. The first line of its output is the cluster's address, then each command is
answered by a line. It ends at the end of its input.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAST_HEALTH_CHECKS = {
    "health_check_period_ms": 500,
    "health_check_initial_delay_ms": 500,
    "health_check_failure_threshold": 8,  # with 3, a busy machine loses nodes that are alive
}
SMALL = {"num_cpus": 2, "object_store_memory": 80_000_000}
HEAD = "machine-0"
STARTUP_S = 120.0
"""For a raylet to appear. Ray's own 30 s are not enough on a machine that runs many tests."""


def main(folder: Path) -> None:
    from ray._private import services
    from ray.cluster_utils import Cluster

    services.get_node = patient(services.get_node)
    nodes: dict[str, Any] = {}
    use_temporary_folder(folder / HEAD)
    extra = {"include_dashboard": False, "_system_config": FAST_HEALTH_CHECKS}
    cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "node_name": HEAD, **extra})
    try:
        print(cluster.address, flush=True)
        for line in sys.stdin:
            command, name = line.split()
            if command == "add":
                cluster.wait_for_nodes(STARTUP_S)  # until Ray has noticed that an earlier one of this name is gone
                use_temporary_folder(folder / name)
                nodes[name] = cluster.add_node(**SMALL, node_name=name)
            else:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            print("done", flush=True)
    finally:
        cluster.shutdown()


def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Like `get_node`, but it waits for the node."""

    def waiting(*arguments: Any, **options: Any) -> Any:
        deadline_s = time.monotonic() + STARTUP_S
        while True:
            try:
                return get_node(*arguments, **options)
            except RuntimeError:  # it is not registered yet
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(0.1)

    return waiting


def use_temporary_folder(folder: Path) -> None:
    """What is started from now on has its temporary files there."""
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
