"""Waits until the Ray cluster at RAY_ADDRESS has NODES nodes, at most SECONDS; says which it has."""

from __future__ import annotations

import os
import sys
import time

import ray


def main(nodes: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    alive: list[str] = []
    while time.monotonic() < deadline:
        try:
            if not ray.is_initialized():
                ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
            found = sorted(node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"])
        except (ConnectionError, ValueError, RuntimeError) as error:  # the head is not there yet
            print(f"waiting for the head: {error}", flush=True)
            found = []
        if found != alive:
            alive = found
            print(f"Ray has {len(alive)} of {nodes} nodes: {' '.join(alive)}", flush=True)
        if len(alive) >= nodes:
            return 0
        time.sleep(1.0)
    print(f"Ray has {len(alive)} of {nodes} nodes after {seconds:g} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
