"""The command that shows learning on one machine. Registered with `cli.app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_exit import EXIT_CODES
from .cli_options import OUTPUT, JsonFlag


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command(epilog=EXIT_CODES)(demo)


def demo(
    volunteers: Annotated[int, typer.Option(min=0, max=64, metavar="N", help="Volunteer processes.")] = 2,
    client: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="Another implementation's volunteer beside them, with {invite} and {home} where it takes "
            "them; may be repeated.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=5, metavar="S", help="How long to learn.")] = 150,
    seed: Annotated[int, typer.Option(min=0, metavar="K", help="Other keys, other tasks.")] = 0,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures of the demo there as JSON.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="SHARE", help="Stop once held-out greedy accuracy reaches this."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Settings of another run, as `init --config` takes them. Default: the embedded policy sorts "
            "digits.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER|HUB-ID", help="Base model, over that of the settings.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the course of accuracy there.")
    ] = None,
    trust_env: Annotated[
        list[str] | None,
        typer.Option("--trust-env", metavar="NAME", help="Run this environment without the sandbox."),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", rich_help_panel=OUTPUT, help="Keep all state there. Default: a temporary folder."
        ),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            min=1, max=1024, metavar="N", help="Threads of the trainer's torch; volunteers have one each."
        ),
    ] = 1,
    json: JsonFlag = False,
) -> None:
    """A trainer and volunteers on this machine, as separate processes, learning to sort digits, or what
    --config says.

    Exits with 1 if held-out greedy accuracy did not rise by 0.2.
    """
    from .demo import DemoOptions, run_demo

    options = DemoOptions(
        volunteers,
        seconds,
        seed,
        report,
        target,
        home,
        json,
        config,
        model,
        plot,
        tuple(trust_env or ()),
        threads,
        tuple(client or ()),
    )
    raise typer.Exit(run_demo(options))
