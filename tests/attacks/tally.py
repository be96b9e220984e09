"""Attacks by name: what was tried, and what was caught.

    @pytest.mark.attack("replay", "duplicate")    the name in specs/11-threats.md, the code that answers

Every test with this mark counts as one try, caught if it passes; a test that makes many tries says so with
`record_property("caught", (caught, tried))`. `--attack-table` runs the slow part too and prints the table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

Attack = tuple[str, str]
"""Name and code."""

KNOWN = pytest.StashKey[dict[Attack, set[str]]]()
"""Files in which each attack was found."""
FILES = pytest.StashKey[set[str]]()
"""Files that were collected."""
TALLY = pytest.StashKey[dict[Attack, list[int]]]()
"""Caught and tried."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attack-table", action="store_true", help="run slow attacks too, and print the table")


def attacks_of(item: pytest.Item) -> Iterator[Attack]:
    for mark in item.iter_markers("attack"):
        name, code = mark.args
        yield str(name), str(code)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.config.stash.setdefault(FILES, set()).add(item.path.name)
    known = item.config.stash.setdefault(KNOWN, {})
    for attack in attacks_of(item):
        known.setdefault(attack, set()).add(item.path.name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow attacks run only where they are asked for."""
    if config.getoption("--attack-table", default=False) or config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "call":
        tally = item.config.stash.setdefault(TALLY, defaultdict(lambda: [0, 0]))
        passed = call.excinfo is None
        caught, tried = dict(item.user_properties).get("caught", (int(passed), 1))
        for attack in attacks_of(item):
            tally[attack][0] += caught
            tally[attack][1] += tried
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--attack-table", default=False):
        return
    terminalreporter.write_sep("=", "attacks")
    width = max([len(name) for name, _ in config.stash.get(TALLY, {})], default=0)
    for (name, code), (caught, tried) in sorted(config.stash.get(TALLY, {}).items()):
        terminalreporter.write_line(f"{name:{width}}  {code or '-':20}  {caught:5} / {tried}")
