"""Commands about environments. Registered with `cli.app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_exit import EXIT_CODES
from .cli_options import HomeFlag, JsonFlag, ServerFlag, TrustFlag

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


EnvArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Such as sort-digits or reasoning-gym/chain_sum; see `env list`."),
]
SettingFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="KEY=VALUE",
        help='A setting of the environment, its value as in TOML: true, 3, "text"; may be repeated.',
    ),
]
ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="FOLDER|HUB-ID", help="A transformers folder. Default: the embedded policy."
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.add_typer(env_app, name="env")
    app.command("eval", epilog=EXIT_CODES)(eval_)


def eval_(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A transformers folder, such as a checkpoint, or a hub's id."),
    ],
    env: Annotated[list[str], typer.Option("--env", metavar="NAME", help="An environment; may be repeated.")],
    tasks: Annotated[int, typer.Option(min=1, max=65_536, metavar="N", help="Held-out tasks.")] = 128,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Take the most probable token each time. The default.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=1e-6, max=10, metavar="T", help="Sample instead.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Sampled tokens of one trajectory, at most.")
    ] = None,
    config: SettingFlag = None,
    trust_env: TrustFlag = None,
    env_server: ServerFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Score a model on tasks that no run assigns, with a 95 % interval."""
    from .env_commands import run_eval
    from .eval_model import EvalOptions

    if greedy and temperature is not None:
        raise typer.BadParameter("--greedy and --temperature exclude each other: name one of them.")
    options = EvalOptions(model, env, config or [], tasks, temperature, max_tokens)
    raise typer.Exit(run_eval(options, home, trust_env, env_server, json=json))


@env_app.command("list", epilog=EXIT_CODES)
def list_(
    family: Annotated[
        str, typer.Argument(metavar="[FAMILY]", help="Its members, also those that are refused.")
    ] = "",
    trust_env: TrustFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """The environments that are installed here: what they are, and where they run."""
    import msgspec

    from .cli_commands import access_of, home_path
    from .env_views import list_lines, listed
    from .home import Home

    rows = listed(family, access_of(Home.open(home_path(home)), trust_env))
    lines = (
        [msgspec.json.encode(row).decode() for row in rows]
        if json
        else list_lines(rows, described=not family)
    )
    for line in lines:
        typer.echo(line)


@env_app.command("info", epilog=EXIT_CODES)
def info(
    name: EnvArgument,
    config: SettingFlag = None,
    trust_env: TrustFlag = None,
    env_server: ServerFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """All that is known of one environment: its facts, its version, its settings, and how a run takes it."""
    import msgspec

    from .cli_commands import access_of, home_hint, home_path
    from .env_config import read_config
    from .env_views import info_lines, known
    from .home import Home

    access = access_of(Home.open(home_path(home)), trust_env, env_server)
    facts = known(name, read_config(config or []), access)
    typer.echo(msgspec.json.encode(facts).decode() if json else "\n".join(info_lines(facts, home_hint(home))))


@env_app.command("try", epilog=EXIT_CODES)
def try_(
    name: EnvArgument,
    model: ModelFlag = None,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Which task: the same number gives the same one.")
    ] = 0,
    config: SettingFlag = None,
    level: Annotated[int, typer.Option(metavar="N", help="Of its curriculum.")] = 0,
    group: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Samples of the task.")] = 4,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Sampled tokens of one trajectory, at most.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=1e-6, max=10, metavar="T")] = 1.0,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write it as one page, with every token."),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show each token with its id and log-prob.")
    ] = False,
    trust_env: TrustFlag = None,
    env_server: ServerFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Play one group of a task and see it: prompts, answers, rewards, and what a trainer would learn."""
    from .env_commands import TryOptions, run_try

    rules = TryOptions(model, seed, config or [], level, group, max_tokens, temperature, html, tokens)
    raise typer.Exit(run_try(name, rules, home, trust_env, env_server, json=json))


@env_app.command("check", epilog=EXIT_CODES)
def check(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="An environment, or a family: all its members.")
    ],
    config: SettingFlag = None,
    tasks: Annotated[int, typer.Option(min=2, max=1_000, metavar="N", help="Tasks to look at.")] = 8,
    model: ModelFlag = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Members at once.")] = 2,
    deadline: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Of one call. Default: what nodes allow."),
    ] = None,
    trust_env: TrustFlag = None,
    env_server: ServerFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Look for what would go wrong in a run: tasks that differ, nonsense that is paid, hangs, leaks.

    Plays it in several processes with made-up answers; of a model it uses tokenizer and chat format only.
    """
    from .env_commands import CheckOptions, run_check

    options = CheckOptions(model, config or [], tasks, jobs, deadline)
    raise typer.Exit(run_check(name, options, home, trust_env, env_server, json=json))


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
