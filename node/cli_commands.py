"""What the commands do, behind the flags: settings, home and role put together."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import typer

from nous_node.envs.access import Access
from nous_node.protocol.constants import MAX_ADDRESSES
from nous_node.protocol.errors import LocalError, RemoteError
from nous_node.protocol.runs import Invite, Thresholds

from .config import ANY_PORT, FIXED_PORT, Flags, Settings, load_settings, unknown_variables
from .device import check_device
from .home import Home, default_home
from .wording import printable

DISCOVERY_SECONDS = 3.0
"""Longer than any answer by mDNS takes; it ends soon after the first."""


def home_path(home: Path | None) -> Path:
    """The home that a flag names, else the environment, else the one in the user's folder."""
    return home.expanduser() if home is not None else default_home(os.environ)


def home_hint(home: Path | None) -> str:
    """What a command that is proposed has to end with, so that it means the home of this one."""
    return "" if home is None else f" --home {shlex.quote(str(home))}"


def access_of(home: Home, trusted: list[str] | None, servers: list[str] | None = None) -> Access:
    """What environments may do in commands that take part in no run; flags go over the home's settings."""
    return load_settings(home, None, os.environ, {"trust_env": trusted, "env_server": servers}).access


def train_run(
    name: str,
    config: Path | None,
    flags: Flags,
    home: Path | None,
    *,
    json: bool,
    seed: int | None,
    uncalibrated: bool,
    rollback: bool = False,
) -> None:
    """`nous-node train`: until Ctrl-C."""
    from .cli_roles import run_role
    from .runfolder import RunFolder, check_name
    from .trainer import trainer
    from .views import open_view

    check_name(name)
    opened = Home.open(home_path(home))
    settings = _settings(opened, config, flags, FIXED_PORT)
    if not (opened.runs / name).is_dir():
        raise LocalError(
            f"There is no run in {opened.runs / name}. Make one with "
            f"`nous-node init {name}{home_hint(home)}`, or see `nous-node train --help`."
        )
    folder = RunFolder.open(opened.runs / name)
    check_calibrated(folder.manifest.thresholds, name, uncalibrated=uncalibrated)
    check_device(settings.device)
    entropy = os.urandom if seed is None else Random(seed).randbytes  # a seed is for the demo only
    with opened.lock():
        run_role(
            lambda report, stop: trainer(
                settings, opened, folder, report, stop, entropy=entropy, rollback=rollback
            ),
            open_view(json=json),
        )


def check_calibrated(thresholds: Thresholds, name: str, *, uncalibrated: bool) -> None:
    """Raises LocalError for thresholds that nobody calibrated, unless that is accepted."""
    if thresholds.groups and thresholds.model is not None:
        return
    if not uncalibrated:
        raise LocalError(
            f"The verification thresholds of {name!r} were not calibrated for its model: honest rollouts may "
            "be refused and false ones accepted. Calibrate it and make the run again (`nous-node calibrate "
            "--help`), or train it all the same with --uncalibrated."
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
    nearby: bool,
) -> None:
    """`nous-node join`: until Ctrl-C, or as many rollout groups or minutes as were asked for."""
    opened = Home.open(home_path(home))
    settings = _settings(opened, config, flags, ANY_PORT)
    chosen = choose_run(opened, invite, home_hint(home), nearby=nearby)
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
    settings = _settings(opened, config, flags, FIXED_PORT)
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


def choose_run(home: Home, invite: str | None, hint: str = "", *, nearby: bool = False) -> Invite:
    """The invite given, else that of the last run, else of a run on the local network, which a person has to
    want: by --nearby, which also passes the last run over, or by an answer. `hint`: see `home_hint`.

    Raises LocalError with how to get an invite where there is none of them.
    """
    text = invite if invite is not None or nearby else home.last_run()
    if text is not None:
        return Invite.from_text(text)
    found = found_nearby()
    if found is None:
        before = "" if nearby else "none was joined from this home before, and "
        raise LocalError(
            f"There is no run to join: {before}none answers on the local network. Ask for the invite that "
            f"the trainer prints, then run `nous-node join INVITE{hint}`."
        )
    if not nearby:
        _ask(found, hint)
    return found


def _ask(found: Invite, hint: str) -> None:
    """Raises LocalError unless somebody at a terminal wants to join a run that anybody may have announced."""
    run = f"the run {found.run.hex()[:16]} at {printable(found.addresses[0])}"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise LocalError(
            f"The local network offers {run}. Join it with `nous-node join --nearby{hint}`, or another one "
            f"with `nous-node join INVITE{hint}`."
        )
    if not typer.confirm(f"The local network offers {run}. Join it?"):
        raise LocalError(f"Nothing was joined. Join another run with `nous-node join INVITE{hint}`.")


def _settings(home: Home, config: Path | None, flags: Flags, listen: tuple[str, ...]) -> Settings:
    """All settings; variables that look like one and are none are told on stderr."""
    for text in unknown_variables(os.environ):
        print(f"warning: {printable(text)}", file=sys.stderr)
    return load_settings(home, config, os.environ, flags, listen=listen)
