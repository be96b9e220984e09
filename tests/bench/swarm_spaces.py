"""Network namespaces with shaped links for `bench_swarm.py`: one switch, a cable to each node. Needs root.

Rates are bytes a second. `tbf` shapes both ends of a cable: what a node sends at its own end, what it gets at
the switch's. There is no delay: that takes netem, which not every kernel has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "nousbench"
SWITCH = f"{PREFIX}-switch"


def problem() -> str | None:
    """Why this machine cannot; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc (iproute2) are missing"
    return None


@contextmanager
def spaces(rates: list[float]) -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of a node for each rate."""
    made = [SWITCH]
    try:
        _run("ip", "netns", "add", SWITCH)
        _run("ip", "-n", SWITCH, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", SWITCH, "link", "set", "switch", "up")
        nodes = []
        for number, rate in enumerate(rates, 1):
            name, address = f"{PREFIX}-{number}", f"10.213.0.{number}"
            _run("ip", "netns", "add", name)
            made.append(name)
            _cable(name, f"port{number}", address, rate)
            nodes.append((name, address))
        yield nodes
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def sent(space: str) -> int:
    """Bytes that a node has sent, headers and all."""
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    return int(_run("ip", "netns", "exec", space, "cat", path))


def _cable(space: str, port: str, address: str, rate: float) -> None:
    _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", SWITCH)
    _run("ip", "-n", SWITCH, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
    for link in ("eth0", "lo"):
        _run("ip", "-n", space, "link", "set", link, "up")
    shape = ["root", "tbf", "rate", f"{int(rate * 8)}bit", "burst", "128kb", "latency", "100ms"]
    _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", *shape)
    _run("tc", "-n", SWITCH, "qdisc", "add", "dev", port, *shape)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
