"""Which games of textarena are offered, and that their processes agree. [TXA-1]"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nous_node.envs.errors import UnknownEnvironment
from nous_node.envs.textarena import TextArena
from nous_node.envs.textarena_facts import DEPENDENCIES, GAMES, REFUSED

SWEEP = Path(__file__).with_name("textarena_sweep.py")


@pytest.mark.parametrize("member", sorted({reason: member for member, reason in REFUSED.items()}.values()))
def test_a_refused_game_is_refused_with_its_reason(member: str) -> None:
    with pytest.raises(UnknownEnvironment, match=re.escape(REFUSED[member])):
        TextArena.facts(member)


def test_an_unknown_game_is_told_apart_from_a_refused_one() -> None:
    with pytest.raises(UnknownEnvironment, match="no game 'Ludo-v0-raw'"):
        TextArena.facts("Ludo-v0-raw")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python reads those games")
def test_games_written_for_a_newer_python_are_refused_on_an_older_one() -> None:
    with pytest.raises(UnknownEnvironment, match=r"needs Python 3\.12"):
        TextArena.facts("Chess-v0-raw")
    assert "Chess-v0-raw" not in TextArena.members()


def test_members_and_facts_need_no_textarena() -> None:
    program = (
        "import sys; from nous_node.envs.textarena import TextArena as T;"
        "[T.facts(m) for m in T.members()]; print('textarena' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_game_that_wants_no_numpy_is_made_without_it() -> None:
    """The library comes without it, and so does what `env install textarena` makes."""
    program = (
        "import sys; sys.modules['numpy'] = None; from nous_node.envs.textarena import TextArena as T;"
        "print(T.make('KuhnPoker-v0-raw', {}).info.id)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["textarena/KuhnPoker-v0-raw"]


def test_sixty_games_and_more_are_offered() -> None:
    assert len({member.split("-v0")[0] for member in TextArena.members()}) >= 60
    facts = TextArena.facts("LiarsDice-v0-raw")
    assert (facts.id, facts.agents, facts.distributions) == ("textarena/LiarsDice-v0-raw", 2, ("textarena",))


def test_what_a_game_computes_with_is_part_of_its_version() -> None:
    """From the sources, which not every Python can read; `Coup` only prints with `rich`."""
    spec = importlib.util.find_spec("textarena")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "envs"
    found = {}
    for game in {member.partition("-")[0] for member in GAMES} & {one.name for one in folder.iterdir()}:
        source = "\n".join(file.read_text() for file in (folder / game).glob("*.py"))
        imports = "\n".join(re.findall(r"^\s*(?:import|from) .*", source, re.MULTILINE))
        libraries = [
            one for one in ("chess", "networkx", "nltk", "numpy") if re.search(rf"\b{one}\b", imports)
        ]
        if libraries:
            found[game] = tuple(libraries)
    assert found == DEPENDENCIES
    assert TextArena.facts("Sokoban-v0-raw").distributions == ("textarena", "numpy")


def swept(wanted: Sequence[str], games: int, hash_seed: int) -> dict[str, list[dict[str, object]]]:
    """What the games did, in a process of their own."""
    done = subprocess.run(
        [sys.executable, str(SWEEP), str(games), *wanted],
        env=dict(os.environ, PYTHONHASHSEED=str(hash_seed)),
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    for records in found.values():
        for record in records:
            record.pop("seconds")
    return found


SAMPLE = [
    "Blackjack-v0-raw:1",
    "Minesweeper-v0-small-raw:1",
    "ThreeCardMonte-v0-raw:1",
    "Battleship-v0-raw:2",
    "Stratego-v0-raw:2",
    "Golf-v0-raw:2,4",
    "Surround-v0-raw:3",
]


def test_games_of_two_processes_are_equal_in_any_order() -> None:
    """[TXA-1] A sample of the table."""
    first, second = swept(SAMPLE, 1, 0), swept(SAMPLE[::-1], 1, 0)
    assert first == second
    assert not [record["error"] for records in first.values() for record in records if record["error"]]


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_every_game_of_the_table_is_equal_in_two_processes() -> None:
    """[TXA-1]"""
    wanted = []
    for member in TextArena.members():
        game = GAMES[member]
        counts = range(game.least, game.most + 1, game.step)
        some = sorted({counts[0], counts[len(counts) // 2], counts[-1]})
        wanted.append(f"{member}:{','.join(map(str, some))}")
    first, second = swept(wanted, 3, 0), swept(wanted[::-1], 3, 0)
    assert first == second
    assert not [record["error"] for records in first.values() for record in records if record["error"]]
    assert sorted(first) == TextArena.members()
