"""How fast a checkpoint gets to those who take part, beside a bare stream, PyPI `shardcast` and plain HTTP.

    python tests/bench/bench_swarm.py [--parts one,four,shaped,memory] [--bytes 269000000] [--full] [...]

Prints a JSON line for each measurement. All nodes are processes of their own; a random file of the size of
SmolLM2 in bf16 goes from the one that has it to the others, from the word to start until the last has
verified and renamed it. `cpu_sources` and `cpu_fetching` are CPU seconds of both sides: with as many
processes as cores or more, they are what the time is made of. `memory_sources` and `memory_fetching` are the
MB by which the resident memory of one process of either side grew at most, looked at every 50 ms.

- `one`: 1 -> 1 on loopback over libp2p alone; `of_stock` is the rate over that of one stream of py-libp2p
  as it is, which neither hashes nor writes; `of_shardcast` over that of shardcast.
- `four`: 1 -> 4 on loopback, over libp2p alone and with HTTP. `last_over_single`: seconds over those of
  `one`; `last_over_bound`: over four times its CPU seconds, on all cores. `uploaded`: what the source sent,
  in copies of the file.
- `memory`: 1 -> 1 on loopback, over libp2p alone and with HTTP, and nothing beside: for large files, as with
  `--parts memory --bytes 5000000000`, which needs room for two copies.
- `shaped`: one source with an uplink of 5 MB/s and six nodes with 20 MB/s each way, in network namespaces
  (needs root); 64 MB, or with `--full` the whole size. `over_uplink`: seconds over size / uplink.
  shardcast as a star and as a tree of two middle nodes with two clients each; the middle nodes count too. It
  gets shards in proportion to the size, and retries every second where its own default is 2 s and then 15.

shardcast, wget and curl are used where they are installed (`pip install nous-node[bench]`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nous_node.node.create import folder_entries
from nous_node.protocol.checkpoints import FULL, CheckpointManifest

sys.path.insert(0, str(Path(__file__).parent))
import swarm_spaces
from swarm_processes import Child, children, race, script

SMOLLM2 = 269_000_000
SHAPED = 64_000_000
SHARD = 50_000_000  # shardcast's own default for files of this size
UPLINK, DOWNLINK, VOLUNTEERS = 5e6, 20e6, 6
PIECE = 1 << 20
LOOPBACK = "127.0.0.1"
CORES = len(os.sched_getaffinity(0))

Node = tuple[str | None, str]
"""Network namespace and address."""


class Ground:
    """What is distributed, and where everything lies."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.source = folder / "source"
        self.manifests = [self._checkpoint(number, length) for number, length in enumerate((100_000, size))]
        self.file = self.source / "1" / "model.safetensors"
        self._places = 0

    def _checkpoint(self, number: int, size: int) -> str:
        folder = self.source / str(number)
        folder.mkdir(parents=True)
        head = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        entropy = random.Random(number)
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            for start in range(0, size, PIECE):
                file.write(entropy.randbytes(min(PIECE, size - start)))
        manifest = CheckpointManifest(number, FULL, folder_entries(folder), {"w": bytes(32)}, bytes(32))
        path = self.folder / f"manifest-{number}"
        path.write_bytes(manifest.to_bytes())
        return str(path)

    def place(self) -> Path:
        self._places += 1
        return self.folder / f"place-{self._places}"

    def tidy(self) -> None:
        """Makes room for the next measurement."""
        for path in self.folder.glob("place-*"):
            shutil.rmtree(path)


def swarm(ground: Ground, nodes: Sequence[Node], http: bool) -> dict:
    """From the first node to the others."""
    with children() as started:
        peers: list[str] = []
        for number, (space, address) in enumerate(nodes, 1):
            folder = ground.place() if peers else ground.source
            plan = {"number": number, "manifests": ground.manifests, "listen": f"/ip4/{address}/tcp/0"}
            plan |= {"folder": str(folder), "http": http, "peers": peers, "members": len(nodes) - 1}
            started.append(Child(script("swarm_node.py", plan), space))
            where = started[-1].hear()["address"]
            peers = peers or [where]
        source, *fetching = started
        met = [child.hear()["peers"] for child in fetching]
        before = _sent(nodes[0])
        result = race([source], fetching)
        after = _sent(nodes[0])
        for child in started:
            child.say("stop")
        ends = [child.hear() for child in started]
        uploaded = ends[0]["streams"] + ends[0]["http"]
        if before is not None and after is not None:
            uploaded = after - before
        result |= {"uploaded": round(uploaded / ground.size, 2), "neighbours": min(met)}
        result["http_share"] = round(
            sum(end["http"] for end in ends) / sum(end["http"] + end["streams"] for end in ends), 2
        )
        faults = {name: count for end in ends for name, count in end["faults"].items()}
    ground.tidy()
    return result | ({"faults": faults} if faults else {})


def stock(ground: Ground) -> dict:
    with children() as started:
        source = Child(script("swarm_stock.py", {"bytes": ground.size}))
        started.append(source)
        plan = {"bytes": ground.size, "peer": source.hear()["address"]}
        started.append(Child(script("swarm_stock.py", plan)))
        started[-1].hear()
        return race([source], started[1:])


def shardcast(ground: Ground, nodes: Sequence[Node], tree: bool = False) -> dict | None:
    """As a star; with `tree` over two middle nodes, to which the others go by turns."""
    package = importlib.util.find_spec("shardcast")
    if package is None or package.origin is None or shutil.which("wget") is None:
        return None
    shard = SHARD if ground.size >= SMOLLM2 // 2 else SHARD * ground.size // SMOLLM2

    def child(node: Node, plan: dict) -> Child:
        own = ground.place()
        shutil.copytree(Path(package.origin).parent, own / "shardcast")
        return Child(script("swarm_shardcast.py", {"folder": str(own / "data"), **plan}), node[0], own)

    with children() as started:
        ports = [_free_port() for _ in nodes]
        urls = [f"http://{address}:{port}" for (_, address), port in zip(nodes, ports, strict=True)]
        plan = {"role": "origin", "port": ports[0], "file": str(ground.file), "shard": shard, "late": tree}
        started.append(child(nodes[0], plan))
        started[0].hear()
        for number, node in enumerate(nodes[1:], 1):
            if tree and number <= 2:
                plan = {"role": "middle", "port": ports[number], "servers": urls[:1]}
            else:
                plan = {"role": "client", "servers": [urls[1 + number % 2] if tree else urls[0]]}
            started.append(child(node, plan))
            started[-1].hear()
        before = _sent(nodes[0])
        if tree:  # middle nodes fetch whatever is there when they start
            started[0].say("go")
        result = race(started[:1], started[1:])
        after = _sent(nodes[0])
    ground.tidy()
    if before is not None and after is not None:
        result["uploaded"] = round((after - before) / ground.size, 2)
    return result


def star(ground: Ground, nodes: Sequence[Node]) -> dict | None:
    """Python's own web server, and curl."""
    if shutil.which("curl") is None:
        return None
    fetch = "import subprocess, sys; print('1', flush=True); sys.stdin.readline();"
    fetch += "subprocess.run(sys.argv[1:], check=True); print('1', flush=True); sys.stdin.readline()"
    with children() as started:
        port = _free_port()
        space, address = nodes[0]
        serve = [sys.executable, "-c", WEB_SERVER, str(ground.file.parent), address, str(port)]
        started.append(Child(serve, space))
        started[0].hear()
        url = f"http://{address}:{port}/{ground.file.name}"
        for space, _ in nodes[1:]:
            place = ground.place()
            command = ["curl", "-s", "-f", "--create-dirs", "-o", str(place / "file"), url]
            started.append(Child([sys.executable, "-c", fetch, *command], space))
            started[-1].hear()
        result = race(started[:1], started[1:])
    ground.tidy()
    return result


WEB_SERVER = """
import functools, http.server, sys
folder, address, port = sys.argv[1:]
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
server = http.server.ThreadingHTTPServer((address, int(port)), handler)
print("1", flush=True)
server.serve_forever()
"""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return one.getsockname()[1]


def _sent(node: Node) -> int | None:
    return None if node[0] is None else swarm_spaces.sent(node[0])


def _over(theirs: dict | None, ours: dict) -> float | None:
    return None if theirs is None else round(theirs["seconds"] / ours["seconds"], 2)


def say(part: str, **what: object) -> None:
    print(json.dumps({"bench": "swarm", "part": part, **what}), flush=True)


def one(ground: Ground) -> tuple[dict, dict]:
    nodes: list[Node] = [(None, LOOPBACK)] * 2
    bare, theirs, ours = stock(ground), shardcast(ground, nodes), swarm(ground, nodes, http=False)
    by_http = swarm(ground, nodes, http=True)
    say(
        "one",
        megabytes=ground.size / 1e6,
        cores=CORES,
        of_stock=_over(bare, ours),
        of_shardcast=_over(theirs, ours),
        libp2p=ours,
        http=by_http,
        stock=bare,
        shardcast=theirs,
        curl=star(ground, nodes),
    )
    return ours, by_http


def memory(ground: Ground) -> None:
    nodes: list[Node] = [(None, LOOPBACK)] * 2
    for http in (False, True):
        say("memory", http=http, megabytes=ground.size / 1e6, ours=swarm(ground, nodes, http))


def four(ground: Ground, singles: tuple[dict, dict]) -> None:
    nodes: list[Node] = [(None, LOOPBACK)] * 5
    theirs = shardcast(ground, nodes)
    for http, single in zip((False, True), singles, strict=True):
        cpu = single["cpu_sources"] + single["cpu_fetching"]
        ours = swarm(ground, nodes, http)
        say(
            "four",
            http=http,
            megabytes=ground.size / 1e6,
            cores=CORES,
            last_over_bound=round(ours["seconds"] / (4 * cpu / CORES), 2),
            last_over_single=round(ours["seconds"] / single["seconds"], 2),
            of_shardcast=_over(theirs, ours),
            ours=ours,
            shardcast=theirs,
        )
    say("four", curl=star(ground, nodes))


def shaped(ground: Ground) -> None:
    reason = swarm_spaces.problem()
    if reason is not None:
        say("shaped", skipped=reason)
        return
    ideal = ground.size / UPLINK

    def told(name: str, result: dict | None) -> None:
        ratio = None if result is None else round(result["seconds"] / ideal, 2)
        say("shaped", what=name, megabytes=ground.size / 1e6, over_uplink=ratio, result=result)

    with swarm_spaces.spaces([UPLINK] + [DOWNLINK] * VOLUNTEERS) as made:
        nodes: list[Node] = list(made)
        told("libp2p", swarm(ground, nodes, http=False))
        told("http", swarm(ground, nodes, http=True))
        told("shardcast, tree", shardcast(ground, nodes, tree=True))
        told("shardcast, star", shardcast(ground, nodes))
        told("curl, star", star(ground, nodes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="one,four,shaped")
    parser.add_argument("--bytes", type=int, default=SMOLLM2)
    parser.add_argument("--full", action="store_true", help="the whole size where links are shaped")
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where files are written; default: the temporary folder")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    for _ in range(arguments.tries):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            if {"one", "four"} & set(parts):
                ground = Ground(Path(folder) / "whole", arguments.bytes)
                singles = one(ground)
                if "four" in parts:
                    four(ground, singles)
                shutil.rmtree(ground.folder)
            if "memory" in parts:
                ground = Ground(Path(folder) / "large", arguments.bytes)
                memory(ground)
                shutil.rmtree(ground.folder)
            if "shaped" in parts:
                size = arguments.bytes if arguments.full else min(arguments.bytes, SHAPED)
                shaped(Ground(Path(folder) / "shaped", size))


if __name__ == "__main__":
    main()
