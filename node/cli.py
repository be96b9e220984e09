"""`nous-node`: the command line. Parses first; what is heavy is imported inside the command that needs it."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from . import cli_checkpoints, cli_conformance, cli_demo, cli_envs, cli_models, cli_trust
from .cli_exit import EXIT_CODES, Exit, verdict, write_crash
from .cli_options import (
    AnnounceFlag,
    ConfigFlag,
    DeviceFlag,
    DiskFlag,
    ForceFlag,
    HomeFlag,
    HttpFlag,
    JsonFlag,
    KeepFlag,
    ListenFlag,
    MdnsFlag,
    MemoryFlag,
    MirrorFlag,
    NiceFlag,
    OnlyFlag,
    RollbackFlag,
    ServerFlag,
    ThreadsFlag,
    TrustFlag,
    UploadFlag,
)

app = typer.Typer(
    name="nous-node",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Volunteers generate rollouts, a trainer learns from them; libp2p between them, no server.",
    epilog=EXIT_CODES,
)
identity_app = typer.Typer(
    no_args_is_help=True,
    help="This node's key: the name under which rollouts are published and credit is given.",
)
app.add_typer(identity_app, name="identity")
cli_trust.register(app)
cli_checkpoints.register(app)
cli_conformance.register(app)
cli_demo.register(app)
cli_envs.register(app)
cli_models.register(app)

MAX_SENTENCE = 4096
"""Characters of an error: a sentence with two long paths."""


def main() -> None:
    """The console script. Every way out is a code of `cli_exit.Exit`."""
    try:
        app()
    except Exception as error:
        from .wording import printable

        code, text = verdict(error)
        if code is Exit.INTERNAL:
            text = _internal(error, text)
        print(printable(text, MAX_SENTENCE), file=sys.stderr)  # names in it may come from a peer
        sys.exit(code)


def _internal(error: Exception, text: str) -> str:
    from .home import default_home

    path = write_crash(_named_home(sys.argv) or default_home(os.environ), error)
    where = f"the traceback is in {path}" if path else "and the traceback could not be written to the home"
    return f"An error of nous-node itself ({text}); {where}. Please report it with that file."


def _named_home(arguments: list[str]) -> Path | None:
    """The value of --home, which no longer is at hand when an error comes up here."""
    for flag, value in pairwise([*arguments, ""]):
        if flag == "--home" and value:
            return Path(value).expanduser()
        if flag.startswith("--home="):
            return Path(flag.removeprefix("--home=")).expanduser()
    return None


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"nous-node {version('nous-node')}")
        raise typer.Exit


def paragraphs(text: str) -> str:
    """One line a paragraph: the help then breaks lines where the terminal does."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EXIT_CODES)
def init(
    name: Annotated[str, typer.Argument(help="Name of the run: letters, digits, '.', '_', '-'.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|HUB-ID",
            help="transformers folder of the base model, or its id at the model hub. Default: the embedded "
            "policy.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=WEIGHT]", help="An environment; may be repeated. Default: sort-digits."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="All other settings of the run; flags go over it."),
    ] = None,
    group: Annotated[int | None, typer.Option(metavar="N", help="Samples of one task. Default: 8.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Sampled tokens of one trajectory, at most.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="Default: 1.0.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="float32 or bfloat16: what volunteers compute in. Default: the model's."
        ),
    ] = None,
    staleness: Annotated[
        int | None, typer.Option(metavar="N", help="Versions that a rollout may be behind. Default: 4.")
    ] = None,
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Accept loose verification thresholds for this model.")
    ] = False,
    trust_env: TrustFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Make a run: its signed manifest and its base checkpoint."""
    from .cli_init import make_run

    flags = {
        "model": model,
        "group": group,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "dtype": dtype,
        "staleness": staleness,
        "uncalibrated": uncalibrated or None,
    }
    typer.echo(make_run(name, config, flags, env or [], home, trust_env, as_json=json))


TRAIN_HELP = """Train a run: verify the rollouts that arrive, learn from them, publish checkpoints and
receipts.

Prints one invite to copy; whoever runs `nous-node join INVITE` takes part. Ctrl-C finishes cleanly, and the
same command resumes where it stopped."""


@app.command(epilog=EXIT_CODES, help=paragraphs(TRAIN_HELP))
def train(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run made with `nous-node init`.")],
    listen: ListenFlag = None,
    announce: AnnounceFlag = None,
    mdns: MdnsFlag = None,
    threads: ThreadsFlag = None,
    device: DeviceFlag = None,
    upload: UploadFlag = None,
    disk: DiskFlag = None,
    keep: KeepFlag = None,
    http: HttpFlag = None,
    mirror: MirrorFlag = None,
    trust_env: TrustFlag = None,
    env_server: ServerFlag = None,
    rollback: RollbackFlag = False,
    home: HomeFlag = None,
    config: ConfigFlag = None,
    json: JsonFlag = False,
    seed: Annotated[int | None, typer.Option(hidden=True)] = None,
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Train with thresholds that nobody calibrated.")
    ] = False,
) -> None:
    from .cli_commands import train_run

    flags = {
        "listen": listen,
        "announce": announce,
        "mdns": mdns,
        "threads": threads,
        "device": device,
        "upload": upload,
        "disk": disk,
        "keep": keep,
        "http": http,
        "mirror": mirror,
        "trust_env": trust_env,
        "env_server": env_server,
    }
    train_run(run, config, flags, home, json=json, seed=seed, uncalibrated=uncalibrated, rollback=rollback)


JOIN_HELP = """Join a run as a volunteer: generate rollouts and publish them.

What is shared with the network: this machine's network address, this node's public key, and the rollouts it
generates (tokens, log-probs, rewards, and which engine and device made them). Anybody in the run can read
them. Nothing else is shared: no files, no account.

Ctrl-C finishes cleanly and says what was contributed."""


@app.command(epilog=EXIT_CODES, help=paragraphs(JOIN_HELP))
def join(
    invite: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE",
            help="What the trainer printed. Without it: the last run, else, if you want it, one found on the "
            "local network.",
        ),
    ] = None,
    rollouts: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop by itself after N rollout groups.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, metavar="M", help="Stop by itself after M minutes.")
    ] = None,
    nearby: Annotated[
        bool, typer.Option("--nearby", help="Join the run that answers on the local network.")
    ] = False,
    threads: ThreadsFlag = None,
    memory: MemoryFlag = None,
    device: DeviceFlag = None,
    nice: NiceFlag = None,
    upload: UploadFlag = None,
    disk: DiskFlag = None,
    keep: KeepFlag = None,
    http: HttpFlag = None,
    env: OnlyFlag = None,
    trust_env: TrustFlag = None,
    env_server: ServerFlag = None,
    listen: ListenFlag = None,
    home: HomeFlag = None,
    config: ConfigFlag = None,
    json: JsonFlag = False,
) -> None:
    from .cli_commands import join_run

    flags = {
        "threads": threads,
        "memory": memory,
        "device": device,
        "nice": nice,
        "upload": upload,
        "disk": disk,
        "keep": keep,
        "http": http,
        "env": env,
        "trust_env": trust_env,
        "env_server": env_server,
        "listen": listen,
    }
    join_run(invite, config, flags, home, json=json, rollouts=rollouts, minutes=minutes, nearby=nearby)


@app.command(epilog=EXIT_CODES)
def relay(
    invite: Annotated[str, typer.Argument(metavar="INVITE", help="What the trainer printed.")],
    listen: ListenFlag = None,
    announce: AnnounceFlag = None,
    mdns: MdnsFlag = None,
    upload: UploadFlag = None,
    disk: DiskFlag = None,
    keep: KeepFlag = None,
    http: HttpFlag = None,
    home: HomeFlag = None,
    config: ConfigFlag = None,
    json: JsonFlag = False,
) -> None:
    """Forward a run's gossip and serve its checkpoints, without a model and without torch."""
    from .cli_commands import relay_run

    flags = {
        "listen": listen,
        "announce": announce,
        "mdns": mdns,
        "upload": upload,
        "disk": disk,
        "keep": keep,
        "http": http,
    }
    relay_run(invite, config, flags, home, json=json)


@app.command(epilog=EXIT_CODES)
def status(home: HomeFlag = None, json: JsonFlag = False) -> None:
    """What became of this node's rollouts, run by run: accepted, refused and why, and what to do about it."""
    from .cli_commands import home_hint, home_path
    from .status import print_status

    print_status(home_path(home), home_hint(home), json=json)


@app.command(epilog=EXIT_CODES)
def doctor(home: HomeFlag = None, device: DeviceFlag = None, json: JsonFlag = False) -> None:
    """Check this machine: Python, torch, memory, disk, clock, port, and whether rollouts made here verify."""
    from .cli_commands import home_path
    from .doctor import print_checks

    raise typer.Exit(print_checks(home_path(home), device, json=json))


@identity_app.command("show")
def identity_show(home: HomeFlag = None, json: JsonFlag = False) -> None:
    """Print this node's public key and peer id (one is made if there is none yet)."""
    from .cli_identity import show

    typer.echo(show(home, as_json=json))


@identity_app.command("export")
def identity_export(
    file: Annotated[Path, typer.Argument(help="Where to write the private key.")],
    home: HomeFlag = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Write the private key to a file (PKCS#8 PEM, mode 0600): a backup, or a move to another machine.

    Whoever has this file can publish under your name and spoil its credit.
    """
    from .cli_identity import export

    typer.echo(export(home, file, force=force, as_json=json))


@identity_app.command("import")
def identity_import(
    file: Annotated[Path, typer.Argument(help="A private key (PKCS#8 PEM, Ed25519, not encrypted).")],
    home: HomeFlag = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Take a private key as this node's identity.

    One key belongs on one running node at a time: two that run at once spoil each other's task counters.
    """
    from .cli_identity import bring

    typer.echo(bring(home, file, force=force, as_json=json))


if __name__ == "__main__":
    main()
