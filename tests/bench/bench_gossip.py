"""Gossip and chunk transfer between two processes on 127.0.0.1; prints one JSON line.

    python tests/bench/bench_gossip.py [--seconds 4] [--sizes 1024 25000]

For each size: messages a second from one publisher to one subscriber as fast as back-pressure allows,
and the CPU milliseconds a message of each side (`process_time`; the judge only accepts); `paced`: the
same at 200 messages a second. `chunks`: 1 MiB answers of a request/response protocol, MB/s and CPU
milliseconds a chunk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import trio

from nous_node.node.network import Network, NetworkConfig, Verdict, open_network

TOPIC = "/nous/1/bench/rollouts/0"
CHUNK = 1 << 20
PACE = 200.0  # messages a second of the demo: nothing is there to batch, so each message costs more
LOCAL = NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",))


def accept(data: bytes, forwarder: str) -> Verdict:
    return Verdict.ACCEPT


async def subscriber() -> None:
    """Reads the topic, counts, and serves chunks and its own counters."""
    count = 0
    chunk = bytes(CHUNK)
    async with open_network(b"s" * 32, LOCAL) as network:

        async def counters(peer: str, request: bytes) -> bytes:
            return json.dumps({"count": count, "cpu": time.process_time()}).encode()

        async def chunks(peer: str, request: bytes) -> bytes:
            return chunk

        network.serve("/bench/counters", counters, max_request=1, max_response=1000)
        network.serve("/bench/chunk", chunks, max_request=1, max_response=CHUNK)
        inbox = network.subscribe(TOPIC, accept, capacity=64)
        print(network.addresses[0], flush=True)
        async for _ in inbox:
            count += 1


async def read_counters(network: Network, peer: str) -> dict[str, float]:
    answer = await network.request(peer, "/bench/counters", b"", max_response=1000)
    return dict(json.loads(answer))


async def gossip(
    network: Network, peer: str, size: int, seconds: float, rate: float | None = None
) -> dict[str, float]:
    data = bytes(size)
    before = await read_counters(network, peer)
    cpu, start, sent = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        await network.publish(TOPIC, data)
        sent += 1
        if rate is not None:
            await trio.sleep(max(0.0, start + sent / rate - time.perf_counter()))
    while (  # noqa: ASYNC110  # the counter is in another process
        after := await read_counters(network, peer)
    )["count"] - before["count"] < sent:
        await trio.sleep(0.01)
    elapsed = time.perf_counter() - start
    return {
        "messages_per_second": round(sent / elapsed, 1),
        "publisher_cpu_ms": round(1000 * (time.process_time() - cpu) / sent, 3),
        "subscriber_cpu_ms": round(1000 * (after["cpu"] - before["cpu"]) / sent, 3),
    }


async def chunks(network: Network, peer: str, seconds: float) -> dict[str, float]:
    before = await read_counters(network, peer)
    cpu, start, read = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        answer = await network.request(peer, "/bench/chunk", b"", max_response=CHUNK)
        assert len(answer) == CHUNK
        read += 1
    elapsed = time.perf_counter() - start
    after = await read_counters(network, peer)
    return {
        "megabytes_per_second": round(read * CHUNK / 1e6 / elapsed, 1),
        "client_cpu_ms": round(1000 * (time.process_time() - cpu) / read, 3),
        "server_cpu_ms": round(1000 * (after["cpu"] - before["cpu"]) / read, 3),
    }


async def publisher(address: str, sizes: list[int], seconds: float) -> dict[str, object]:
    async with open_network(b"p" * 32, NetworkConfig(listen=())) as network:
        peer = await network.connect(address)
        await network.wait_subscriber(TOPIC)
        await gossip(network, peer, 1024, 0.5)  # warm up
        result: dict[str, object] = {
            f"gossip_{size}": await gossip(network, peer, size, seconds) for size in sizes
        }
        result["gossip_1024_paced"] = await gossip(network, peer, 1024, seconds, PACE)
        result["chunks"] = await chunks(network, peer, seconds)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 25_000])
    parser.add_argument("--subscriber", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.subscriber:
        trio.run(subscriber)
        return
    child = subprocess.Popen([sys.executable, __file__, "--subscriber"], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        result = trio.run(publisher, address, arguments.sizes, arguments.seconds)
    finally:
        child.kill()
        child.wait()
    print(json.dumps({"bench": "gossip", **result}))


if __name__ == "__main__":
    main()
