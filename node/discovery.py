"""Runs on the local network, by mDNS: `nous-node join` without an invite looks for one here.

    async with advertise(run_id, network.addresses): ...
    found = await discover(3.0)

One service instance a node under `_nous-run._tcp`, with the run id and the addresses in its TXT record
(RFC 6763). Anybody on the network may answer, so what is found is only a proposal: the run manifest that
is fetched from there must hash to the run id, and a person is shown which run it is.

Zeroconf is opened on one interface: that of the default route, or the one that is named.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

import trio
from zeroconf import IPVersion, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from .network_errors import DiscoveryError

SERVICE = "_nous-run._tcp.local."
LOOPBACK = "127.0.0.1"

RUN_ID = re.compile(rb"[0-9a-fA-F]{64}")
# Of a TXT record: a handful of addresses, each within the 255 bytes of one TXT string.
MAX_ADDRESSES = 8
MAX_ADDRESS_BYTES = 240
MAX_FOUND = 64  # more instances than that on one network are a flood
GRACE_S = 0.5  # others that answer this soon after the first are reported, too
RESOLVE_MS = 1000.0


@dataclass(frozen=True)
class Found:
    """A run that somebody on the local network says he serves."""

    run_id: bytes  # 32 bytes
    addresses: tuple[str, ...]  # multiaddrs with /p2p/..., unchecked beyond their size


def local_address() -> str:
    """The IPv4 address of the interface with the default route, or that of the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


@asynccontextmanager
async def advertise(
    run_id: bytes, addresses: Iterable[str], interface: str | None = None
) -> AsyncIterator[None]:
    """Answer mDNS questions for the length of the block. `interface`: the IPv4 address of one of ours.

    Raises DiscoveryError where the interface cannot be used.
    """
    interface = interface or local_address()
    info = _service_info(run_id, tuple(addresses), interface)
    zeroconf = await _open(interface)
    try:
        await trio.to_thread.run_sync(partial(zeroconf.register_service, info, allow_name_change=True))
        yield
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(zeroconf.close)  # says goodbye, too


def others_reach(addresses: Iterable[str]) -> list[str]:
    """Those that other machines can reach. [DSC-1]"""
    return [address for address in addresses if f"/{LOOPBACK}/" not in address]


@asynccontextmanager
async def nearby(run_id: bytes, addresses: Iterable[str]) -> AsyncIterator[None]:
    """Like `advertise`, for a node that works as well without: only if others can reach one of its
    addresses, and quietly not where the interface cannot be used."""
    public = others_reach(addresses)
    async with AsyncExitStack() as stack:
        if public:
            with suppress(DiscoveryError):
                await stack.enter_async_context(advertise(run_id, public))
        yield


async def discover(deadline: float, interface: str | None = None) -> list[Found]:
    """What is there within `deadline` seconds; returns soon after the first answer, and RESOLVE_MS after the
    deadline at the latest.

    Raises DiscoveryError where the interface cannot be used.
    """
    zeroconf = await _open(interface or local_address())
    names: dict[str, None] = {}
    first = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def add(name: str) -> None:
        if len(names) < MAX_FOUND:
            names[name] = None
        first.set()

    def changed(
        zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:  # in Zeroconf's thread
        if state_change is ServiceStateChange.Added:
            token.run_sync_soon(add, name)

    try:
        ServiceBrowser(zeroconf, SERVICE, handlers=[changed])
        with trio.move_on_after(deadline):
            await first.wait()
            await trio.sleep(GRACE_S)
        infos = await _resolved(zeroconf, list(names))  # more may come meanwhile
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(zeroconf.close)
    found = (heard(info.properties) for info in infos if info is not None)
    return [entry for entry in found if entry is not None]


async def _resolved(zeroconf: Zeroconf, names: list[str]) -> list[ServiceInfo | None]:
    """All at once: one that does not answer costs the others no time."""
    infos: list[ServiceInfo | None] = []

    async def resolve(name: str) -> None:
        infos.append(
            await trio.to_thread.run_sync(
                zeroconf.get_service_info, SERVICE, name, RESOLVE_MS, limiter=threads
            )
        )

    threads = trio.CapacityLimiter(MAX_FOUND)
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(resolve, name)
    return infos


async def _open(interface: str) -> Zeroconf:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((interface, 0))  # Zeroconf leaves its socket open when this fails inside it
        return await trio.to_thread.run_sync(
            partial(Zeroconf, interfaces=[interface], ip_version=IPVersion.V4Only)
        )
    except (OSError, ValueError) as error:
        raise DiscoveryError(interface, str(error)) from error


def record(run_id: bytes, addresses: Sequence[str]) -> dict[bytes, bytes]:
    """Of the TXT record, by key."""
    told = {b"a%d" % number: address.encode() for number, address in enumerate(addresses[:MAX_ADDRESSES])}
    return {b"run": run_id.hex().encode(), **told}


def label(run_id: bytes, addresses: Sequence[str]) -> str:
    """The instance, while nobody else has its name."""
    return f"{run_id.hex()[:12]}-{addresses[0][-8:] if addresses else 'none'}"


def _service_info(run_id: bytes, addresses: tuple[str, ...], interface: str) -> ServiceInfo:
    instance = label(run_id, addresses)
    return ServiceInfo(
        SERVICE,
        f"{instance}.{SERVICE}",
        port=_port(addresses),
        addresses=[ipaddress.IPv4Address(interface).packed],
        properties=record(run_id, addresses),
        server=f"{instance}.local.",
    )


def _port(addresses: tuple[str, ...]) -> int:
    """The TCP port of the first address: only for other tools, we read the TXT record."""
    parts = addresses[0].split("/") if addresses else []
    port = parts[parts.index("tcp") + 1] if "tcp" in parts[:-1] else ""
    return int(port) if port.isdecimal() else 0


def heard(properties: Mapping[bytes, bytes | None]) -> Found | None:
    """A TXT record from the network; None unless it is one of ours. [DSC-2]"""
    named = properties.get(b"run") or b""
    if not RUN_ID.fullmatch(named):
        return None
    try:
        raw = [properties.get(b"a%d" % number) for number in range(MAX_ADDRESSES)]
        addresses = tuple(entry.decode("ascii") for entry in raw if entry)
    except ValueError:
        return None
    sane = all(len(text) <= MAX_ADDRESS_BYTES and text.startswith("/") for text in addresses)
    return Found(bytes.fromhex(named.decode()), addresses) if addresses and sane else None
