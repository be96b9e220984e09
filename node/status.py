"""`nous-node status`: what became of this node's rollouts, run by run, also while a node runs.

Everything is read from the outboxes and journals in the home; nothing is written and nobody is asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from nous_node.envs.access import Access
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import Code, LocalError, NousError, RemoteError
from nous_node.protocol.runs import RunManifest, open_manifest

from .advice import advice
from .guidance import Guidance, installed_version
from .home import StorageError
from .outbox import Outbox, SentGroup, Word
from .runfolder import RunFolder
from .store import Journal
from .wording import count, duration, moment, plural, printable, share

HISTORY = 10_000
"""Groups looked through for the last one of each code: all that an outbox remembers one by one."""


class Refusal(msgspec.Struct, frozen=True):
    """All groups of a run that were refused with one code."""

    code: str
    groups: int
    measured: float | None
    """Of the last one, where the rule is a comparison."""
    threshold: float | None
    advice: str


class TrainersWord(msgspec.Struct, frozen=True):
    """What a trainer said last of a key, signed. [RCP-6]"""

    state: str
    accepted: int
    refused: int
    credit: int
    """Trained tokens credited, before debits."""
    debit: int
    """Trained tokens taken off for tasks that never arrived."""
    rank: int
    """1 for the most credit less debit; 0 without any."""
    of: int
    until: float | None
    """Unix seconds at which a quarantine ends."""
    said: float
    """Unix seconds, by the trainer's clock."""


class EngineFacts(msgspec.Struct, frozen=True):
    """What made the last groups."""

    name: str
    version: str
    dtype: str
    device: str


class FailingEnvironment(msgspec.Struct, frozen=True):
    """An environment that did not always do its work on this machine."""

    environment: str
    groups: int
    """Given up in the last session."""
    paused_until_ms: int
    """Unix milliseconds; 0 where it is not paused."""
    why: str
    """The last time; empty once it made a group again."""


class JoinedStatus(msgspec.Struct, frozen=True, tag="joined", tag_field="role"):
    """A run that this node takes part in."""

    name: str
    run: str
    accepted: int
    waiting: int
    given_up: int
    credit: int
    refused: list[Refusal]
    version: int
    """Of the last group made; -1 before the first."""
    checkpoint: str
    last_made: float | None
    """Unix seconds of the last group."""
    state: str
    """How the trainer treats this key, in words."""
    next: str
    """What to do, in words."""
    word: TrainersWord | None = None
    engine: EngineFacts | None = None
    generating_share: float | None = None
    """Share of its time in which the last session generated."""
    failing: list[FailingEnvironment] = []
    """Environments of which the last session gave up groups."""


class TrainedStatus(msgspec.Struct, frozen=True, tag="trained", tag_field="role"):
    """A run that this node trains."""

    name: str
    run: str
    accepted: int
    waiting: int
    """Groups without a verdict."""
    unused: int
    """Accepted groups that no version has used yet."""
    credit: int
    volunteers: int
    """Keys ever heard of."""
    refused: list[Refusal]
    version: int
    """Last published version; -1 before the first."""
    checkpoint: str
    published: float | None
    """Unix seconds."""
    greedy: float | None
    """Held-out accuracy of the last version that was measured."""


class BrokenStatus(msgspec.Struct, frozen=True, tag="broken", tag_field="role"):
    """State in the home that cannot be read; the text says what to do."""

    folder: str
    text: str


RunStatus = JoinedStatus | TrainedStatus | BrokenStatus


def statuses(home: Path) -> Iterator[RunStatus]:
    """All runs of a home. A damaged one is told and does not hide the others; a folder that nobody ever put
    a manifest into is no run."""
    for folder in sorted(home.glob("joined/*/")):
        if not (folder / "run.envelope").exists():
            continue
        try:
            yield joined_status(folder, time.time())
        except NousError as error:
            yield BrokenStatus(str(folder), str(error))
    for folder in sorted(home.glob("runs/*/")):
        if not (folder / "run.envelope").exists():
            continue
        try:
            yield trained_status(folder)
        except NousError as error:
            yield BrokenStatus(str(folder), str(error))


def joined_status(folder: Path, now: float) -> JoinedStatus:
    """`now`: Unix seconds. Raises StorageError for an outbox that cannot be read."""
    run, manifest = _manifest(folder / "run.envelope")
    installed = partial(installed_version, access=Access.of(folder.parent.parent))
    if not (folder / "outbox.sqlite").is_file():
        known = Guidance(manifest, None, None, [], installed)
        state, step = known.state(now * 1000), known.next_step(now * 1000)
        return JoinedStatus(manifest.name, run.hex(), 0, 0, 0, 0, [], -1, "", None, state, step)
    with Outbox.read(folder / "outbox.sqlite") as outbox:
        totals, history = outbox.totals(), outbox.history(HISTORY)
        word, engine, generating = outbox.word, outbox.engine, outbox.generating_share
        failing = outbox.failing
    known = Guidance(manifest, engine, None if word is None else word.standing, history, installed)
    last = history[0] if history else None
    return JoinedStatus(
        name=manifest.name,
        run=run.hex(),
        accepted=totals.accepted,
        waiting=totals.waiting,
        given_up=totals.given_up,
        credit=totals.credit,
        refused=_refusals(totals.refused, history),
        version=-1 if last is None else last.version,
        checkpoint="" if last is None else last.checkpoint.hex(),
        last_made=None if last is None else last.made_ms / 1000,
        state=known.state(now * 1000),
        next=known.next_step(now * 1000),
        word=None if word is None else _said(word),
        engine=None if engine is None else EngineFacts(**msgspec.structs.asdict(engine)),
        generating_share=generating,
        failing=[FailingEnvironment(*one) for one in failing],
    )


def trained_status(folder: Path) -> TrainedStatus:
    """Raises LocalError for a folder without a run, StorageError for a journal that cannot be read."""
    run = RunFolder.open(folder)
    if not run.journal.is_file():
        return TrainedStatus(run.manifest.name, run.run.hex(), 0, 0, 0, 0, 0, [], -1, "", None, None)
    with Journal.read(run.journal) as journal:
        stats, checkpoints = journal.stats(), journal.checkpoints()
    last = checkpoints[-1] if checkpoints else None
    measured = [one.eval["greedy"] for one in checkpoints if "greedy" in one.eval]
    return TrainedStatus(
        name=run.manifest.name,
        run=run.run.hex(),
        accepted=stats.accepted,
        waiting=stats.pending,
        unused=stats.unused,
        credit=stats.credit,
        volunteers=stats.keys,
        refused=_refusals(stats.refused, []),
        version=-1 if last is None else last.version,
        checkpoint="" if last is None else last.hash.hex(),
        published=None if last is None else last.published_ms / 1000,
        greedy=measured[-1] if measured else None,
    )


def print_status(home: Path, hint: str = "", *, json: bool) -> None:
    """To stdout; one JSON line a run with `json`. `hint`: what a proposed command ends with.

    Raises LocalError where the home is no folder.
    """
    if home.exists() and not home.is_dir():
        raise LocalError(f"{home} is no folder, and so no home of a node. Name another one with --home.")
    found = list(statuses(home))
    if json:
        for one in found:
            print(msgspec.json.encode(one).decode())
        return
    if not found:
        make, join = f"nous-node init NAME{hint}", f"nous-node join INVITE{hint}"
        print(f"No runs in {home}. Make one with `{make}` or join one with `{join}`.")
    now = time.time()
    for one in found:
        print("\n".join(lines(one, now)))


def lines(one: RunStatus, now: float) -> list[str]:
    """A run for a person. `now`: Unix seconds."""
    match one:
        case JoinedStatus():
            return _joined_lines(one, now)
        case TrainedStatus():
            return _trained_lines(one, now)
        case BrokenStatus():
            return [f"{printable(one.folder)} cannot be read", f"  {printable(one.text)}"]


def _joined_lines(one: JoinedStatus, now: float) -> list[str]:
    made = "no group made yet" if one.last_made is None else f"version {one.version} {one.checkpoint[:16]}"
    return [
        f"{printable(one.name)} ({one.run[:16]}), joined",
        f"  standing    {one.state}{_rank(one.word)}",
        f"  accepted    {plural(one.accepted, 'group')}, {count(one.credit)} trained tokens credited",
        *_word_lines(one.word, now),
        f"  waiting     {plural(one.waiting, 'group')} without a receipt, {one.given_up:,} given up",
        f"  last group  {made}{_engine(one.engine)}{_ago(one.last_made, now)}",
        *_share_lines(one.generating_share),
        *[f"  environment {_failing(failing, now)}" for failing in one.failing],
        *_refusal_lines(one.refused, with_advice=True),
        f"  next        {one.next}",
    ]


def _rank(word: TrainersWord | None) -> str:
    return f", rank {word.rank:,} of {word.of:,}" if word is not None and word.rank else ""


def _word_lines(word: TrainersWord | None, now: float) -> list[str]:
    """The trainer's own count, which is what holds."""
    if word is None:
        return []
    debit = f" less {count(word.debit)} for tasks that never came" if word.debit else ""
    return [
        f"  credit      {count(word.credit)} trained tokens{debit}, {word.accepted:,} accepted and "
        f"{word.refused:,} refused by the trainer's word{_ago(word.said, now)}"
    ]


def _share_lines(generating: float | None) -> list[str]:
    return [] if generating is None else [f"  generated   {share(generating)} of the last session's time"]


def _failing(one: FailingEnvironment, now: float) -> str:
    told = f"{printable(one.environment)} gave up {plural(one.groups, 'group')}"
    if one.paused_until_ms > 1000 * now:
        told += f" and is paused until {moment(one.paused_until_ms)}"
    why = f": {printable(one.why)}" if one.why else " and works again"
    return f"{told}{why}"


def _engine(engine: EngineFacts | None) -> str:
    return f", {printable(engine.dtype, 32)} on {printable(engine.device, 32)}" if engine is not None else ""


def _trained_lines(one: TrainedStatus, now: float) -> list[str]:
    version = "nothing published yet" if one.version < 0 else f"version {one.version} {one.checkpoint[:16]}"
    told = [
        f"{printable(one.name)} ({one.run[:16]}), trained here",
        f"  checkpoint  {version}{_ago(one.published, now)}, held-out greedy {share(one.greedy)}",
        f"  accepted    {plural(one.accepted, 'group')} of {plural(one.volunteers, 'key')}, "
        f"{count(one.credit)} trained tokens credited",
        f"  waiting     {plural(one.waiting, 'group')} to be judged, {one.unused:,} to be learned from",
    ]
    return told + _refusal_lines(one.refused, with_advice=False)


def _refusal_lines(refused: list[Refusal], *, with_advice: bool) -> list[str]:
    """Advice is for whoever made the groups."""
    told = []
    for refusal in refused:
        measured = ""
        if refusal.code == Code.QUARANTINED and refusal.threshold is not None:
            measured = f" (last: until {moment(refusal.threshold)})"
        elif refusal.measured is not None and refusal.threshold is not None:
            measured = f" (last: {refusal.measured:.4g}, limit {refusal.threshold:.4g})"
        told.append(f"  refused     {refusal.groups:,} x {printable(refusal.code, 64)}{measured}")
        if with_advice:
            told.append(f"              {refusal.advice}")
    return told


def _refusals(refused: dict[str, int], history: list[SentGroup]) -> list[Refusal]:
    """The most frequent first; `history` is newest first."""
    last: dict[str, SentGroup] = {}
    for group in history:
        if group.state == "refused":
            last.setdefault(group.code, group)
    ranked = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    return [
        Refusal(
            code,
            groups,
            last[code].measured if code in last else None,
            last[code].threshold if code in last else None,
            advice(code),
        )
        for code, groups in ranked
    ]


def _said(word: Word) -> TrainersWord:
    standing = word.standing
    return TrainersWord(
        state=standing.state,
        accepted=standing.accepted,
        refused=standing.refused,
        credit=standing.credit,
        debit=standing.debit,
        rank=standing.rank,
        of=standing.of,
        until=standing.until / 1000 if standing.until else None,
        said=word.ts / 1000,
    )


def _ago(moment: float | None, now: float) -> str:
    return "" if moment is None else f", {duration(max(0.0, now - moment))} ago"


def _manifest(path: Path) -> tuple[bytes, RunManifest]:
    try:
        envelope = unseal(path.read_bytes(), MAX_MANIFEST)
        return envelope.head.run, open_manifest(envelope, envelope.head.run)
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}); join the run again.") from error
    except RemoteError as error:
        raise StorageError(f"{path} is damaged ({error}); join the run again with its invite.") from error
