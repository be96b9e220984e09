"""The flags that commands share, each with the sentence that `--help` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LIMITS = "Limits of what this machine gives"
OUTPUT = "Output and state"

HomeFlag = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        rich_help_panel=OUTPUT,
        help="Where identity and state live (NOUS_NODE_HOME). Two nodes on one machine need two homes.",
    ),
]
JsonFlag = Annotated[
    bool,
    typer.Option(
        "--json",
        rich_help_panel=OUTPUT,
        help="JSON for programs: a line for each event, run, check or answer.",
    ),
]
ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        exists=True,
        dir_okay=False,
        rich_help_panel=OUTPUT,
        help="Settings of this node; environment variables go over them, flags over both.",
    ),
]
ListenFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--listen",
        metavar="MULTIADDR",
        help="Address to listen on, such as /ip4/0.0.0.0/tcp/4001; may be repeated.",
    ),
]
AnnounceFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--announce",
        metavar="MULTIADDR",
        help="Another address at which others reach this node, such as /dns4/node.example.org/tcp/4001 of a "
        "router that forwards a port; it goes into the invite. May be repeated.",
    ),
]
MdnsFlag = Annotated[
    bool | None,
    typer.Option("--mdns/--no-mdns", help="Whether to tell the local network of this run. Default: yes."),
]
ThreadsFlag = Annotated[
    int | None, typer.Option(min=1, max=1024, metavar="N", rich_help_panel=LIMITS, help="Threads of torch.")
]
MemoryFlag = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=LIMITS,
        help="Memory that the worker may use, such as 4GiB. A larger model is refused before its download.",
    ),
]
DeviceFlag = Annotated[
    str | None, typer.Option(metavar="DEVICE", rich_help_panel=LIMITS, help="cpu, mps, cuda or cuda:1.")
]
NiceFlag = Annotated[
    int | None,
    typer.Option(
        min=0, max=19, metavar="N", rich_help_panel=LIMITS, help="How far the worker steps back (0 to 19)."
    ),
]
UploadFlag = Annotated[
    str | None,
    typer.Option(metavar="RATE", rich_help_panel=LIMITS, help="Bytes sent a second, such as 500KB."),
]
DiskFlag = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", rich_help_panel=LIMITS, help="Disk that checkpoints may take, such as 20GB."
    ),
]
KeepFlag = Annotated[
    int | None,
    typer.Option(
        "--keep",
        min=1,
        max=100_000,
        metavar="N",
        rich_help_panel=LIMITS,
        help="Checkpoints to keep, where --disk has room. What the run still needs is kept in any case.",
    ),
]
HttpFlag = Annotated[
    int | None,
    typer.Option(
        "--http",
        min=1_024,
        max=65_535,
        metavar="PORT",
        help="Also serve checkpoint chunks over plain HTTP at this port: faster than libp2p's streams.",
    ),
]
MirrorFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--mirror",
        metavar="URL",
        help="Where volunteers find chunks at URL/blob/HASH as well; may be repeated.",
    ),
]
RollbackFlag = Annotated[
    bool,
    typer.Option(
        "--rollback",
        help="Where this folder is an older copy of the run and the newer one is lost: publish its newest "
        "version again above those that volunteers hold, which are given up.",
    ),
]
OnlyFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME",
        rich_help_panel=LIMITS,
        help="Work only on these environments of the run; may be repeated.",
    ),
]
TrustFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--trust-env",
        metavar="NAME",
        help="Run this environment, or a whole family, without the sandbox, with all that you can read and "
        "reach; may be repeated.",
    ),
]
ServerFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--env-server",
        metavar="NAME=URL",
        help="The server that an environment may talk to, such as openenv/echo=http://127.0.0.1:8000; may be "
        "repeated.",
    ),
]
ForceFlag = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
