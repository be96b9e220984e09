"""Commands about environments. Registered with `cli.app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_exit import EXIT_CODES
from .cli_options import HomeFlag, JsonFlag

env_app = typer.Typer(
    no_args_is_help=True,
    help="Environments: what a run gives as tasks and how it rewards answers.",
)

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="reasoning-gym, textarena, gymnasium, verifiers-v0, verifiers, openenv or atropos.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.add_typer(env_app, name="env")


@env_app.command("install", epilog=EXIT_CODES)
def install(
    name: NameArgument,
    add: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="REQUIREMENT",
            help="A package of environments for it, a wheel or a folder; may be repeated. What was added "
            "before stays.",
        ),
    ] = None,
    allow_build: Annotated[
        bool,
        typer.Option(
            "--allow-build",
            help="Also take packages that are no wheels. They are built here: their own code then runs with "
            "your rights, outside the sandbox.",
        ),
    ] = False,
    python: Annotated[
        Path | None,
        typer.Option("--python", metavar="FILE", help="Another Python interpreter, 3.11 or newer."),
    ] = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Install an ecosystem of environments into a virtual environment of its own, HOME/envs/NAME.

    Takes exactly the releases that this version of nous-node was written for, down to dependencies of
    dependencies: nodes with other ones would give other tasks. Repeat it at will; what is complete stays.
    """
    import msgspec

    from .cli_commands import home_path
    from .env_install import code_notice, find_recipe
    from .env_install import install as install_recipe
    from .step_view import steps

    recipe = find_recipe(name)
    if not json:
        typer.echo(code_notice(recipe, builds=allow_build), err=True)
    with steps(as_json=json) as told:
        done = install_recipe(
            home_path(home), recipe, told, extra=add or [], builds=allow_build, python=python
        )
    typer.echo(msgspec.json.encode(done).decode() if json else done.text)


@env_app.command("remove", epilog=EXIT_CODES)
def remove(name: NameArgument, home: HomeFlag = None, json: JsonFlag = False) -> None:
    """Delete what `install` made for NAME, with everything that --with added to it."""
    import msgspec

    from .cli_commands import home_path
    from .env_install import remove as remove_recipe

    folder = remove_recipe(home_path(home), name)
    typer.echo(
        msgspec.json.encode({"name": name, "folder": str(folder)}).decode() if json else f"Removed {folder}."
    )
