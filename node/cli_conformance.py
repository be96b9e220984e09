"""`nous-node conformance`: tests of any client, ours or another's. Registered with `cli.app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_exit import EXIT_CODES

conformance_app = typer.Typer(
    no_args_is_help=True,
    help="Test a client against the specification: its adapter with all vectors, or the running client.",
)

TESTS = "What is tested"
OUTPUT = "Output"
PLACE = "{invite}"
"""Stands in a client's command where its invite goes."""

JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        rich_help_panel=OUTPUT,
        help="Write the sheet as JSON; `-`: one line a check to standard output, the sheet as the last line.",
    ),
]
JunitFile = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", rich_help_panel=OUTPUT, help="Write the sheet as JUnit XML."),
]
OnlyFlag = Annotated[
    str | None,
    typer.Option(
        "--only",
        metavar="NAME,..",
        rich_help_panel=TESTS,
        help="Only these: names of files of vectors, of checks, or requirement ids.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.add_typer(conformance_app, name="conformance")


ADAPTER_HELP = (
    "Ask a client's adapter all vectors: a program that reads questions, a JSON object a line, on standard "
    "input, and answers on standard output (specs/14-conformance.md). Example: nous-node conformance adapter "
    "-- node adapter.js"
)


@conformance_app.command(
    epilog=EXIT_CODES, help=ADAPTER_HELP, context_settings={"allow_interspersed_args": False}
)
def adapter(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What starts the adapter.")],
    only: OnlyFlag = None,
    vectors: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            rich_help_panel=TESTS,
            help="Vectors of another revision, with their ops.toml. Default: those of this release.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=3600,
            metavar="S",
            rich_help_panel=TESTS,
            help="How long one answer may take. Default: 10, and 60 where a model computes.",
        ),
    ] = None,
    fuzz: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=TESTS,
            help="Instead of the vectors: N mutations of them, whose answers are compared with this node's.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, metavar="S", rich_help_panel=TESTS, help="Of the mutations. Default: 1.")
    ] = 1,
    fuzz_case: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            rich_help_panel=TESTS,
            help="Only mutation N of this seed; its question is shown.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            rich_help_panel=TESTS,
            help="Compare mutations with this adapter instead of this node's own.",
        ),
    ] = None,
    json: JsonFile = None,
    junit: JunitFile = None,
) -> None:
    from .conformance import Choice, run_adapter
    from .conformance_stop import called_off_cleanly

    if against is not None and fuzz is None and fuzz_case is None:
        raise typer.BadParameter("--against compares mutations: give --fuzz N or --fuzz-case N, too.")
    choice = Choice(command, only, vectors, seconds, fuzz, seed, fuzz_case, against)
    with called_off_cleanly():
        raise typer.Exit(run_adapter(choice, json, junit))


PEER_HELP = (
    "Test a running client. With INVITE or its address: this node dials it and plays transcripts, wrong ones "
    "included, so it has to be yours, or its owner has to agree. With a command that holds {invite}: this "
    "node makes a run, is its trainer, and starts the client with the run's invite. Example: nous-node "
    "conformance peer -- node volunteer.js {invite}"
)


@conformance_app.command(epilog=EXIT_CODES, help=PEER_HELP)
def peer(
    target: Annotated[
        list[str] | None,
        typer.Argument(metavar="INVITE|ADDR|-- CMD... {invite}", help="Which client.", show_default=False),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="HEX", rich_help_panel=TESTS, help="The run of a client that an address names."),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", rich_help_panel=TESTS, help="Print an invite and wait for a client started by hand."
        ),
    ] = False,
    only: OnlyFlag = None,
    json: JsonFile = None,
    junit: JunitFile = None,
) -> None:
    from .conformance_output import Output
    from .conformance_stop import called_off_cleanly

    names = frozenset(name.strip() for name in (only or "").split(",")) - {""}
    words = target or []
    is_command = any(PLACE in word for word in words)
    if wait == bool(words) or (len(words) > 1 and not is_command):
        raise typer.BadParameter(
            f"Give one invite or address, or --wait, or a command after `--` that holds {PLACE}."
        )
    if run is not None and (wait or is_command):
        raise typer.BadParameter("--run names the run of a client at an address; here the kit makes the run.")
    with called_off_cleanly(), Output(json, junit) as output:
        if wait or is_command:
            from .stand import stand

            sheet = stand(words if is_command else None, names, output.tell, output.say)
        else:
            from .live import play

            sheet = play(words[0], run, names, output.tell)
        raise typer.Exit(output.finish(sheet))


@conformance_app.command(epilog=EXIT_CODES)
def own() -> None:
    """This node's own adapter, on standard input and output."""
    import sys

    from .adapter import serve

    serve(sys.stdin.buffer, sys.stdout.buffer)
