"""PyPI `shardcast` for `bench_swarm.py`, by its own classes; it fetches with wget.

    {"role": "origin", "folder": ..., "port": ..., "file": ..., "shard": bytes, "late": whether only at `go`}
    {"role": "middle", "folder": ..., "port": ..., "servers": [...]}
    {"role": "client", "folder": ..., "servers": [...]}

Each process imports a copy of the package from a folder of its own: a client writes a file beside it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    plan = json.loads(sys.argv[1])
    folder = Path(plan["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    if plan["role"] == "origin":
        from shardcast.origin_server import OriginServer

        (folder / "data1.bin").write_bytes(bytes(1000))  # a client measures each server with it
        origin = OriginServer(str(folder), plan["port"])
        if plan["late"]:
            say(ready=True)
            sys.stdin.readline()
        origin.broadcast(plan["file"], plan["shard"])
        say(ready=True)
    elif plan["role"] == "middle":
        from shardcast.middle_node import MiddleNode

        (folder / "data1.bin").write_bytes(bytes(1000))
        node = MiddleNode(plan["servers"], str(folder), plan["port"], check_interval=1)
        say(ready=True)
        sys.stdin.readline()
        while "v1" not in node.processed_versions:
            time.sleep(0.01)
        say(done=True)
    else:
        from shardcast.client_node import ClientNode

        client = ClientNode(plan["servers"], str(folder))
        say(ready=True)
        sys.stdin.readline()
        while client.download_version("v1", str(folder / "file")) is None:
            time.sleep(0.1)
        say(done=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
