"""Commands about the checkpoints on this disk. Registered with `cli.app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_exit import EXIT_CODES, Exit
from .cli_options import HomeFlag, JsonFlag

checkpoints_app = typer.Typer(
    no_args_is_help=True,
    help="The checkpoints that this node holds: look at them, verify them, take one out as a model folder. "
    "Nobody is asked and nothing in the home is written; a node may be running on it.",
)

RunFlag = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="Name or id of the run, where there are several.")
]
WANTED = "VERSION|HASH"
Wanted = Annotated[
    str | None,
    typer.Argument(metavar=WANTED, help="A version, or at least 8 digits of a hash. Default: the newest."),
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.add_typer(checkpoints_app, name="checkpoints")


@checkpoints_app.command("list", epilog=EXIT_CODES)
def list_(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Name or id of a run. Default: all.")
    ] = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """List them: version, hash, kind, size, how much is here, age, evaluation, and which one is in use."""
    import time

    import msgspec

    from nous_node.protocol.errors import NousError

    from .checkpoint_shelf import chosen, shelves
    from .checkpoint_views import list_lines, listed
    from .cli_commands import home_hint, home_path
    from .wording import printable

    found = list(shelves(home_path(home))) if run is None else [chosen(home_path(home), run, home_hint(home))]
    broken = False
    for shelf in found:
        if isinstance(shelf, NousError):
            broken = True
            typer.echo(printable(str(shelf), 1000), err=True)
            continue
        rows = list(listed(shelf))
        if json:
            for row in rows:
                typer.echo(msgspec.json.encode(row).decode())
        else:
            typer.echo("\n".join(list_lines(shelf, rows, time.time())))
    if not found and not json:
        typer.echo(
            f"No runs in {home_path(home)}: train or join one first, or name another home with --home."
        )
    if broken:
        raise typer.Exit(Exit.STORAGE)


@checkpoints_app.command("show", epilog=EXIT_CODES)
def show(
    wanted: Wanted = None,
    run: RunFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Print a checkpoint's manifest: files, hashes, chain, mirrors, evaluation, training figures."""
    import time

    from .checkpoint_shelf import chosen
    from .checkpoint_views import show_json, show_lines
    from .cli_commands import home_hint, home_path

    shelf = chosen(home_path(home), run, home_hint(home))
    stored = shelf.find(wanted)
    typer.echo(show_json(shelf, stored) if json else "\n".join(show_lines(shelf, stored, time.time())))


@checkpoints_app.command("verify", epilog=EXIT_CODES)
def verify(
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar=f"{WANTED}|all", help="A version, 8 digits of a hash, or all. Default: the newest."
        ),
    ] = None,
    run: RunFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Compare every chunk and every tensor with the signed manifest, one line a checkpoint."""
    import msgspec

    from .checkpoint_check import check
    from .checkpoint_shelf import chosen
    from .cli_commands import home_hint, home_path
    from .wording import printable

    shelf = chosen(home_path(home), run, home_hint(home))
    every = [one for one in shelf.stored if one.is_here]
    wrong = False
    for stored in every if wanted == "all" else [shelf.find(wanted)]:
        checked = check(shelf, stored)
        wrong = wrong or checked.is_wrong
        typer.echo(msgspec.json.encode(checked).decode() if json else printable(checked.text, 2000))
    if wanted == "all" and not every and not json:
        typer.echo(f"The run {shelf.name} has no checkpoint here yet.")
    raise typer.Exit(Exit.FAILED if wrong else Exit.OK)


@checkpoints_app.command("export", epilog=EXIT_CODES)
def export(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar=f"[{WANTED}] FOLDER",
            help="Which checkpoint (default: the newest complete one), and where to.",
        ),
    ],
    blobs: Annotated[
        bool,
        typer.Option(
            "--blobs",
            help="Write FOLDER/blob/HASH files instead, for a web server or an object store that a trainer "
            "names with --mirror. What is there already stays.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a model that is in the folder.")] = False,
    run: RunFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Write a verified checkpoint as a plain transformers folder with a model card.

    AutoModelForCausalLM.from_pretrained(FOLDER) loads it. Nothing is left of weights that are damaged.
    """
    import msgspec

    from .checkpoint_export import export_blobs, export_model
    from .checkpoint_shelf import chosen
    from .cli_commands import home_hint, home_path

    if len(places) > 2:
        raise typer.BadParameter(f"give a version or hash and a folder, not {len(places)} arguments")
    *version, folder = places
    shelf = chosen(home_path(home), run, home_hint(home))
    stored = shelf.find(version[0] if version else None)
    if blobs:
        done = export_blobs(shelf, stored, Path(folder))
    else:
        done = export_model(shelf, stored, Path(folder), force=force)
    typer.echo(msgspec.json.encode(done).decode() if json else done.text)
