"""Commands about trust: calibration, peers, audits, receipts. Registered with `cli.app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_exit import EXIT_CODES
from .cli_options import HomeFlag, JsonFlag, TrustFlag

receipts_app = typer.Typer(
    no_args_is_help=True,
    help="Proof of contribution: what trainers signed about this node's rollouts, in one portable file.",
)

RunFlag = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="Name or id of the run, where there are several.")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    for command in (calibrate, peers, audit):
        app.command(epilog=EXIT_CODES)(command)
    app.add_typer(receipts_app, name="receipts")


def calibrate(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="transformers folder. Default: the embedded policy."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=WEIGHT]", help="An environment; may be repeated. Default: sort-digits."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32 or bfloat16: what volunteers compute in.")
    ] = None,
    rollouts: Annotated[
        int, typer.Option(min=64, metavar="N", help="Honest rollouts to generate and verify.")
    ] = 2048,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Sampled tokens of one rollout, at most.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="The run's settings, as `init --config` takes them: its environments above all, since short "
            "answers vary more. Flags go over it.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Default: in the home, where `init` finds it."),
    ] = None,
    trust_env: TrustFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Measure what honest rollouts of a model show in verification, and set the thresholds from it.

    A run made with `nous-node init --model MODEL` afterwards takes them into its manifest.
    """
    from .calibrate import CalibrateOptions, run_calibrate

    run_calibrate(
        CalibrateOptions(model, env or [], dtype, rollouts, max_tokens, out, home, json, trust_env, config)
    )


def peers(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Name of a run trained here.")] = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Who takes part in a run that is trained here: state, credit, refusals, faults, and until when."""
    from .peers import print_peers

    print_peers(run, home, json=json)


def audit(
    recorded: Annotated[
        Path,
        typer.Argument(
            metavar="JOURNAL|FILE", help="A run's folder, its journal.sqlite, or a file of envelopes."
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Verify against this checkpoint's folder where the run's is gone."),
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The run's run.envelope. Default: the one beside the journal."),
    ] = None,
    trust_env: TrustFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Verify recorded rollout groups again, one line a group: id, verdict, code, measured, threshold."""
    from .audit import run_audit
    from .cli_commands import access_of, home_path
    from .home import Home

    access = access_of(Home.open(home_path(home)), trust_env)
    raise typer.Exit(run_audit(recorded, checkpoint, manifest, access, json=json))


@receipts_app.command("export", epilog=EXIT_CODES)
def receipts_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write.")],
    run: RunFlag = None,
    home: HomeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Write all that trainers signed about this node's rollouts, with the run's manifest, into one file."""
    from .proofs import export_proofs

    typer.echo(export_proofs(file, run, home, as_json=json))


@receipts_app.command("verify", epilog=EXIT_CODES)
def receipts_verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Made by `nous-node receipts export`.")],
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="INVITE|ID|FILE", help="The run that it has to be of: its run.envelope, say."
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Check such a file, anywhere and offline: whose it is, for which run, and what is signed in it."""
    from .proofs import verify_proofs

    typer.echo(verify_proofs(file, run, as_json=json))
