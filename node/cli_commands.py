"""What the commands do, behind the flags: settings, home and role put together."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from random import Random

from nous_node.protocol.constants import MAX_ADDRESSES
from nous_node.protocol.errors import LocalError, RemoteError
from nous_node.protocol.runs import Invite

from .config import Flags, load_settings
from .device import check_device
from .home import Home, default_home

FIXED_PORT = ("/ip4/0.0.0.0/tcp/4001",)
"""Trainers and relays listen on libp2p's usual port unless told otherwise: an invite outlives a restart."""
DISCOVERY_SECONDS = 3.0
"""Longer than any answer by mDNS takes; it ends soon after the first."""


def home_path(home: Path | None) -> Path:
    """The home that a flag names, else the environment, else the one in the user's folder."""
    return home.expanduser() if home is not None else default_home(os.environ)


def train_run(
    name: str, config: Path | None, flags: Flags, home: Path | None, *, json: bool, seed: int | None
) -> None:
    """`nous-node train`: until Ctrl-C."""
    from .cli_roles import run_role
    from .runfolder import RunFolder
    from .trainer import trainer
    from .views import open_view

    opened = Home.open(home_path(home))
    settings = load_settings(opened, config, os.environ, flags, listen=FIXED_PORT)
    folder = RunFolder.open(opened.runs / name)
    check_device(settings.device)
    entropy = os.urandom if seed is None else Random(seed).randbytes  # a seed is for the demo only
    with opened.lock():
        run_role(
            lambda report, stop: trainer(settings, opened, folder, report, stop, entropy=entropy),
            open_view(json=json),
        )


def join_run(
    invite: str | None,
    config: Path | None,
    flags: Flags,
    home: Path | None,
    *,
    json: bool,
    rollouts: int | None,
    minutes: float | None,
) -> None:
    """`nous-node join`: until Ctrl-C, or as many rollout groups or minutes as were asked for."""
    opened = Home.open(home_path(home))
    settings = load_settings(opened, config, os.environ, flags)
    chosen = choose_run(opened, invite)
    check_device(settings.device)
    from .cli_roles import run_role
    from .views import open_view
    from .volunteer import volunteer

    with opened.lock():
        run_role(
            lambda report, stop: volunteer(
                settings, opened, chosen, report, stop, rollouts=rollouts, minutes=minutes
            ),
            open_view(json=json),
        )


def relay_run(invite: str, config: Path | None, flags: Flags, home: Path | None, *, json: bool) -> None:
    """`nous-node relay`: until Ctrl-C."""
    chosen = Invite.from_text(invite)
    opened = Home.open(home_path(home))
    settings = load_settings(opened, config, os.environ, flags, listen=FIXED_PORT)
    from .cli_roles import run_role
    from .relay import relay
    from .views import open_view

    with opened.lock():
        run_role(lambda report, stop: relay(settings, opened, chosen, report, stop), open_view(json=json))


def found_nearby() -> Invite | None:
    """The run on the local network, with all addresses it was found at; None where nobody answers.

    Raises LocalError where there are several: which one to help is for a person to say.
    """
    import trio

    from .discovery import discover
    from .network_errors import DiscoveryError

    addresses: dict[bytes, list[str]] = {}
    try:
        for found in trio.run(discover, DISCOVERY_SECONDS):
            addresses.setdefault(found.run_id, []).extend(found.addresses)
    except DiscoveryError:  # no usable interface is no reason not to say how to get an invite
        return None
    if len(addresses) > 1:
        runs = ", ".join(sorted(run.hex()[:16] for run in addresses))
        raise LocalError(f"Several runs answer on the local network ({runs}); join one by its invite.")
    for run, places in addresses.items():
        invite = Invite(run, list(dict.fromkeys(places))[:MAX_ADDRESSES])
        with suppress(RemoteError):  # anybody may answer, also with what is no address
            return Invite.from_text(invite.to_text())
    return None


def choose_run(home: Home, invite: str | None) -> Invite:
    """The invite given, else that of the last run, else of a run on the local network.

    Raises LocalError with how to get an invite where there is none of them.
    """
    text = invite or home.last_run()
    if text is not None:
        return Invite.from_text(text)
    nearby = found_nearby()
    if nearby is None:
        raise LocalError(
            "There is no run to join: none was joined from this home before, and none answers on the local "
            "network. Ask for the invite that the trainer prints, then run `nous-node join INVITE`."
        )
    return nearby
