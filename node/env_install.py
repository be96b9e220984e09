"""Ecosystems of environments in virtual environments of their own: `nous-node env install NAME`.

    <home>/envs/NAME/bin/python      the interpreter that runs the environments of NAME
    <home>/envs/NAME/installed.json  what was asked for

Such a folder is put together beside its place and renamed once it is complete, also where something is
added to it: whatever fails or is interrupted, the one before stays as it was. A virtual environment names
its own place in the scripts in `bin/`; they are rewritten before the rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Final

import msgspec

from nous_node.envs.recipes import RECIPES, Recipe

from .home import UNDER_WAY, Home, HomeBusyError, disk_errors
from .pip_run import InstallError, Told, run
from .wording import plural, printable, size

FOLDER: Final = "envs"
"""Of a home: the virtual environments."""

RECORD: Final = "installed.json"
MAX_RECORD: Final = 1_000_000
MAX_SCRIPT: Final = 1_000_000
"""Bytes of a script that names its place; larger ones are programs."""

MIN_PYTHON: Final = (3, 11)
"""As for this package, whose modules run there as well."""

MIN_PIP: Final = (22, 3)
"""The first that works on another interpreter."""

_SOURCES: Final = (".tar.gz", ".zip", ".tar.bz2")


class Record(msgspec.Struct, frozen=True):
    """What a virtual environment was made of; equal records make equal ones."""

    recipe: str
    requirements: list[str]
    """Of the recipe."""
    extra: list[str]
    """What --with added, folders as absolute paths."""
    pins: str
    """SHA-256 of the recipe's constraints, hexadecimal."""
    python: str
    """The interpreter's version."""
    builds: bool
    """Whether source distributions were allowed."""


class Installed(msgspec.Struct, frozen=True):
    """What came of an install. With `--json` these are the keys."""

    name: str
    folder: str
    changed: bool
    """False where everything was there already."""
    distributions: int
    bytes: int
    seconds: float
    extra: list[str]
    """Name and release of what --with named."""
    text: str


def install(
    home: Path,
    recipe: Recipe,
    told: Told,
    *,
    extra: Sequence[str] = (),
    builds: bool = False,
    python: Path | None = None,
) -> Installed:
    """Makes the virtual environment of a recipe, or another one that has `extra` as well.

    Raises StorageError, InstallError, UnreachableError.
    """
    started = time.monotonic()
    root = Home.open(home.absolute()).path / FOLDER
    with disk_errors(root):
        root.mkdir(mode=0o700, exist_ok=True)
    place = root / recipe.name
    with _alone(root, recipe.name):
        before = _record(place)
        wanted = _wanted(recipe, before, extra, builds, _release(python or Path(sys.executable)))
        changed = before != wanted or any(_is_path(one) for one in extra) or not interpreter(place).exists()
        if changed:
            _make(place, recipe, wanted, python or Path(sys.executable), told)
    return _installed(place, wanted, changed, time.monotonic() - started)


def remove(home: Path, name: str) -> Path:
    """Deletes the virtual environment of a recipe; its folder. Raises StorageError, InstallError."""
    root = home.absolute() / FOLDER
    place = root / name
    if name not in RECIPES or not place.is_dir():
        raise InstallError(f"Nothing named {name[:64]!r} is installed in {root}.")
    with _alone(root, name), disk_errors(place):
        gone = root / f".{name}.gone"
        shutil.rmtree(gone, ignore_errors=True)
        place.rename(gone)  # never half a folder where a node looks
        shutil.rmtree(gone)
    return place


def find_recipe(name: str) -> Recipe:
    """The recipe of a name. Raises InstallError."""
    recipe = RECIPES.get(name)
    if recipe is None:
        raise InstallError(
            f"There is no recipe {name[:64]!r}. There are: {', '.join(RECIPES)}. Another package of "
            "environments is added to one of them with --with, or installed beside nous-node with pip."
        )
    return recipe


def code_notice(recipe: Recipe, *, builds: bool) -> str:
    """Whose code an install runs."""
    if builds:
        return (
            "Packages that are no wheels are built here: their own code runs with your rights, outside the "
            "sandbox."
        )
    if recipe.sources:
        return (
            f"{' and '.join(recipe.sources)} come as source: their own build code runs with your rights, "
            "outside the sandbox. All else is wheels, which bring no build code."
        )
    return "Only wheels are taken: no build code of theirs runs here. Environments run in the sandbox."


def interpreter(place: Path) -> Path:
    """The interpreter of a virtual environment, there or not."""
    return place / "bin" / "python"


def builds_code(requirement: str) -> bool:
    """Whether installing it runs code that it brings: a folder, a source archive, a repository."""
    if _is_path(requirement):
        return not requirement.endswith(".whl")
    return "://" in requirement and not requirement.partition("#")[0].endswith(".whl")


def _is_path(requirement: str) -> bool:
    return "://" not in requirement and (
        requirement.endswith((".whl", *_SOURCES)) or os.sep in requirement or requirement in (".", "..")
    )


def _wanted(recipe: Recipe, before: Record | None, extra: Sequence[str], builds: bool, python: str) -> Record:
    kept = before.extra if before else []
    added = [_resolved(one) for one in extra]
    if before and set(added) <= set(kept):
        builds = builds or before.builds  # was said when it was added
    for one in [*kept, *added]:
        if builds_code(one) and not builds:
            raise InstallError(
                f"Installing {one} runs code that it brings, with your rights and outside the sandbox. If "
                "you trust it, add --allow-build; otherwise install a wheel of it."
            )
    return Record(
        recipe.name,
        [*recipe.bare, *recipe.requirements, *recipe.needs],
        list(dict.fromkeys([*kept, *added])),
        hashlib.sha256(recipe.pins.read_bytes()).hexdigest(),
        python,
        builds,
    )


def _resolved(requirement: str) -> str:
    if not requirement.strip() or requirement.lstrip().startswith("-"):
        raise InstallError(f"--with takes a package, a wheel or a folder, not {requirement[:64]!r}.")
    if not _is_path(requirement):
        return requirement
    path = Path(requirement).expanduser().absolute()
    if not path.exists():
        raise InstallError(f"There is no {path}: give --with a package, a wheel or a folder.")
    return str(path)


def _make(place: Path, recipe: Recipe, wanted: Record, python: Path, told: Told) -> None:
    part = place.with_name(f".{place.name}{UNDER_WAY}")
    with disk_errors(part):
        shutil.rmtree(part, ignore_errors=True)
        try:
            told(f"Making {place}")
            pip = _own_pip(part)
            run([python, "-I", "-m", "venv", *(["--without-pip"] if pip else []), part], told)
            for words in _installs(part, recipe, wanted):
                run([*(pip or [interpreter(part), "-I", "-m", "pip"]), "install", *words], told)
            (part / RECORD).write_bytes(msgspec.json.encode(wanted))
            _move_scripts(part, place)
            _swap(part, place)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def _own_pip(part: Path) -> list[str | Path] | None:
    """Our own pip, told to work on that interpreter: a copy of pip in every one takes longer than most
    packages. None where there is none."""
    try:
        release = version("pip").split(".")[:2]
    except PackageNotFoundError:
        return None
    if tuple(map(int, release)) < MIN_PIP:
        return None
    return [sys.executable, "-I", "-m", "pip", "--python", interpreter(part)]


def _installs(part: Path, recipe: Recipe, wanted: Record) -> Iterator[list[str]]:
    """The arguments of `pip install`, one list a run."""
    common = ["--disable-pip-version-check", "--progress-bar=off", "--no-warn-script-location"]
    common += ["-c", str(recipe.pins)]
    if wanted.builds:
        common.append("--prefer-binary")
    else:
        common += ["--only-binary=:all:", *(f"--no-binary={name}" for name in recipe.sources)]
    extra = wanted.extra
    if recipe.bare:
        yield [*common, "--no-deps", *recipe.bare, *extra]
        extra = _asked(part, recipe.bare)
    yield [*common, *recipe.requirements, *recipe.needs, *extra]


def _asked(part: Path, bare: Sequence[str]) -> list[str]:
    """What packages ask for that were installed by themselves, but for those that are to stay bare: pip would
    add all that these ask for."""
    left_out = {_canonical(one.partition("==")[0]) for one in bare}
    added = [
        one for one in distributions(path=[str(_packages(part))]) if _canonical(one.name) not in left_out
    ]
    asked = [requirement for one in added for requirement in one.requires or ()]
    return [one for one in asked if _canonical(_project(one)) not in left_out]


def _move_scripts(part: Path, place: Path) -> None:
    """Scripts and settings that name the folder where they were made name the one where they will be."""
    for path in [part / "pyvenv.cfg", *(part / "bin").iterdir()]:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_SCRIPT:
            continue
        before = path.read_bytes()
        after = before.replace(os.fsencode(part), os.fsencode(place))
        if before != after:
            path.write_bytes(after)


def _swap(part: Path, place: Path) -> None:
    gone = place.with_name(f".{place.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if place.exists():
        place.rename(gone)
    part.rename(place)
    shutil.rmtree(gone, ignore_errors=True)


def _record(place: Path) -> Record | None:
    """What stands there; None where nothing does, or nothing of ours."""
    try:
        with (place / RECORD).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_RECORD), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None


def _release(python: Path) -> str:
    script = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
    try:
        done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, timeout=60)
        release = done.stdout.strip()
        recent = tuple(map(int, release.split("."))) >= MIN_PYTHON
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise InstallError(
            f"{python} is no Python interpreter that runs; name another with --python."
        ) from error
    if not recent:
        raise InstallError(
            f"{python} is Python {release}; environments need {'.'.join(map(str, MIN_PYTHON))} or newer. "
            "Name another interpreter with --python."
        )
    return release


@contextlib.contextmanager
def _alone(root: Path, name: str) -> Iterator[None]:
    """Held while a virtual environment is changed; the kernel lets go of it when the process ends."""
    path = root / f".{name}.lock"
    with disk_errors(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise HomeBusyError(
            f"Another process installs or removes {name} in {root}. Wait until it is done."
        ) from error
    finally:
        os.close(handle)


def _installed(place: Path, record: Record, changed: bool, seconds: float) -> Installed:
    found = list(distributions(path=[str(_packages(place))]))
    named = [name for one in record.extra if (name := _name(one, found))]
    taken = _size(place)
    done = "is installed" if changed else "was installed already"
    lines = [
        f"{record.recipe} {done} in {place}: {plural(len(found), 'package')}, {size(taken)}.",
        *(f"Added: {printable(name, 200)}" for name in named),
        f"Its environments are called {record.recipe}/NAME; `nous-node env list` shows them.",
    ]
    return Installed(
        record.recipe, str(place), changed, len(found), taken, round(seconds, 1), named, "\n".join(lines)
    )


def _packages(place: Path) -> Path:
    return next(iter(sorted(place.glob("lib/python3*/site-packages"))), place)


def _name(requirement: str, found: Sequence[Distribution]) -> str | None:
    """Name and release of the distribution that a requirement brought; None where that cannot be told."""
    wanted = _canonical(_project(requirement))
    for one in found:
        came = one.read_text("direct_url.json") or ""
        if _canonical(one.name) == wanted or (_is_path(requirement) and f'"file://{requirement}"' in came):
            return f"{one.name} {one.version}"
    return None


def _project(requirement: str) -> str:
    """The name at the beginning of a requirement."""
    return re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _size(place: Path) -> int:
    """Bytes on the disk."""
    return sum(
        (Path(folder) / name).lstat().st_blocks * 512 for folder, _, names in os.walk(place) for name in names
    )
