"""Which chunk is asked of which source next. A state machine: no clock and no I/O, times are arguments.

Chunks are numbers; sets of them are the bits of an integer, so that a checkpoint of 30,000 chunks costs
microseconds. Of what a source has the rarest chunk is taken, ties by lot. A complete source is where
everything comes from at first: it is spared what others have who still download, and what falls to them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from .ownership import Ownership, draw, mask
from .picker_source import SPARED_SECONDS, PickerSource
from .records import EXPECTED_RATE, MAX_RECORDS, Records

MAX_FLYING = 32 * 1024 * 1024
"""Bytes asked for at once, over all sources: what a download may hold in memory."""

FIRST_FLYING = 4 * 1024 * 1024
FLYING_SECONDS = 10.0
"""No more than what the sources that are asked make in this time, where that is between the two: over a slow
line that all of them share, chunks asked for together would all come too late."""

MIN_DEADLINE_S = 10.0
MAX_DEADLINE_S = 60.0
DEADLINE_FACTOR = 4.0
"""A chunk may take this many times what the source's rate makes of all that is asked of it, and
MIN_DEADLINE_S more; MAX_DEADLINE_S at most."""

SLOW = 1 / 8
"""Of the median rate: a source below it is asked only for what no other has."""

BUSY_SECONDS = 0.5
"""For which a source is left alone that says it is busy; twice as long each time, 8 times at most."""

MAX_COPIES = 2
"""Sources asked for the same chunk at the end."""

MAX_FAILURES = 3
"""One after the other, after which a source is not asked again in this download."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to make."""

    source: str
    chunk: int
    deadline: float
    """Seconds."""


class Picker:
    """One download. `sizes`: bytes of each chunk that is missing. `us`: the name that others know us by."""

    def __init__(
        self, sizes: Mapping[int, int], records: Records, entropy: random.Random, us: str = ""
    ) -> None:
        self.missing = mask(sizes)
        self._all = self.missing
        self._free = self.missing
        """Those of them that nobody is asked for."""
        self._sizes, self._records, self._entropy = sizes, records, entropy
        self._levels = [self.missing]
        """By the number of sources that are no whole ones and have them: chunks."""
        self._sources: dict[str, PickerSource] = {}
        self._gone: dict[str, PickerSource] = {}
        """Those that are not offered any more: who comes back is known."""
        self._given_up: set[str] = set()
        self._ownership = Ownership(us)
        self._shrunk = -math.inf
        """When a chunk that only complete sources had came to somebody else."""
        self._seen = 0
        """What sources that are no whole ones have had: who says so again brings nothing."""
        self._flying = 0
        self._typical = sum(sizes.values()) / max(1, len(sizes))

    # What is known of sources

    def offer(self, name: str, claims: int, now: float, *, peer: str = "", assumed: bool = False) -> None:
        """A source has these chunks; with `assumed` nobody has said so. `peer`: whose it is, where that has
        another name."""
        source = self._sources.get(name)
        if source is None:
            known = self._gone.pop(name, None)
            source = known or PickerSource(self._records.of(name, now), peer or name)
            self._sources[name] = source
        source.assumed = assumed
        whole = claims & self._all == self._all
        if not whole and not source.overdue(now):
            if claims & self._levels[0] & self.missing & ~self._seen:
                self._shrunk = now
            self._seen |= claims
        self._claim(source, claims & self._all & ~source.failed, whole)
        self._share_among(now)

    def _share_among(self, now: float) -> None:
        others = (one for one in self._sources.values() if not one.whole and not one.overdue(now))
        self._ownership.share(one.peer for one in others)

    def leave(self, name: str, now: float) -> None:
        """A source is gone; what was asked of it is asked of others. What it failed at is not forgotten."""
        source = self._sources.get(name)
        if source is None:
            return
        if source.overdue(now):
            self._fail(name, source, now)
        for chunk in list(source.asked):
            self._land(source, chunk)
        self._claim(source, 0, False)
        del self._sources[name]
        self._gone[name] = source
        if len(self._gone) > MAX_RECORDS:
            del self._gone[next(iter(self._gone))]

    def sources(self) -> list[str]:
        return list(self._sources)

    def given_up(self, name: str) -> bool:
        """Whether a source has failed too often in this download."""
        return name in self._given_up

    def _claim(self, source: PickerSource, claims: int, whole: bool) -> None:
        before, after = 0 if source.whole else source.claims, 0 if whole else claims
        self._count(after & ~before, 1)
        self._count(before & ~after, -1)
        source.claims, source.whole = claims, whole

    def _count(self, chunks: int, step: int) -> None:
        """Moves chunks to the next level of rarity, or back."""
        if not chunks:
            return
        order = range(len(self._levels) - 1, -1, -1) if step > 0 else range(1, len(self._levels))
        for level in order:
            moved = self._levels[level] & chunks
            if not moved:
                continue
            self._levels[level] ^= moved
            if level + step == len(self._levels):
                self._levels.append(0)
            self._levels[level + step] |= moved

    # What became of requests

    def came(self, name: str, chunk: int) -> None:
        """Something came, and is about to be verified."""
        source = self._sources.get(name)
        if source is not None and chunk in source.asked and source.record.rate:
            source.here.add(chunk)

    def arrived(self, name: str, chunk: int, now: float) -> list[str]:
        """A chunk came and is what it should be; the others who were asked for it."""
        source = self._sources.get(name)
        if source is not None and chunk in source.asked:
            self._land(source, chunk)
            source.record.delivered(self._sizes[chunk], now, idle=not source.asked)
            source.failures = source.busy = 0
            source.doubtful = False
        others = [other for other, known in self._sources.items() if chunk in known.asked]
        for other in others:
            if self._sources[other].overdue(now):
                self._sources[other].record.failed(now)
        bit = 1 << chunk
        self.missing &= ~bit
        self._free &= ~bit
        for level, chunks in enumerate(self._levels):
            self._levels[level] = chunks & ~bit
        return others

    def called_off(self, name: str, chunk: int) -> None:
        """A request that is not needed any more has ended."""
        if name in self._sources:
            self._land(self._sources[name], chunk)

    def busy(self, name: str, chunk: int, now: float) -> None:
        """The source has too much to do."""
        source = self._sources.get(name)
        if source is None:
            return
        self._land(source, chunk)
        source.busy_until = now + BUSY_SECONDS * 2 ** min(source.busy, 3)
        source.busy += 1

    def lacks(self, name: str, chunk: int, now: float) -> None:
        """The source does not hold the chunk: a failure where it said that it does."""
        source = self._sources.get(name)
        if source is None:
            return
        if not source.assumed:
            self.failed(name, chunk, now)
            return
        source.doubtful, source.record.proven = True, False
        self._disclaim(source, chunk)

    def failed(self, name: str, chunk: int, now: float) -> None:
        """The source did not deliver: it is asked for this chunk no more, for others after a pause where
        others have them."""
        source = self._sources.get(name)
        if source is None:
            return
        self._disclaim(source, chunk)
        self._fail(name, source, now)

    def _fail(self, name: str, source: PickerSource, now: float) -> None:
        source.failures += 1
        source.record.failed(now)
        if source.failures >= MAX_FAILURES:
            self._given_up.add(name)
            source.failed = self._all
            self._claim(source, 0, source.whole)

    def _disclaim(self, source: PickerSource, chunk: int) -> None:
        self._land(source, chunk)
        source.failed |= 1 << chunk
        self._claim(source, source.claims & ~(1 << chunk), source.whole)

    def _land(self, source: PickerSource, chunk: int) -> None:
        if source.asked.pop(chunk, None) is None:
            return
        source.here.discard(chunk)
        size = self._sizes[chunk]
        source.flying -= size
        self._flying -= size
        if not any(chunk in other.asked for other in self._sources.values()):
            self._free |= self.missing & (1 << chunk)

    # What to do next

    def next(self, now: float) -> Ask | None:
        """The next request, which is then under way; None where there is nothing to ask for now."""
        if not self.missing:
            return None
        good = self._good(now)
        reliable = awaited = 0
        for name in good:
            source = self._sources[name]
            reliable |= source.claims
            awaited |= 0 if source.overdue(now) else source.claims
        spared = self._spared(good, now)
        for name, source in self._by_load(now):
            chunks = source.claims & self._free
            if name not in good:
                chunk = self._rarest(chunks & ~reliable)
            elif source.whole:
                chunk = self._of_whole(source, chunks & ~spared, now)
            else:
                chunk = self._rarest(chunks)
            if chunk is not None and self._fits(chunk, now):
                return self._ask(name, source, chunk, now)
        return None if self._free & awaited else self._again(now, good)

    def stuck(self, now: float) -> bool:
        """Whether nothing is under way and no time will help: only other sources, or new claims, will."""
        return self._flying == 0 and not any(
            source.busy_until > now and source.claims & self.missing for source in self._sources.values()
        )

    def _slow(self) -> set[str]:
        rates = {name: one.record.rate for name, one in self._sources.items() if one.record.rate}
        if len(rates) < 2:
            return set()
        least = SLOW * median(rates.values())
        return {name for name, rate in rates.items() if rate < least}

    def _good(self, now: float) -> set[str]:
        """Sources that may be relied on."""
        slow = self._slow()
        return {
            name
            for name, one in self._sources.items()
            if name not in slow
            and not one.doubtful
            and one.record.until <= now
            and one.busy_until <= now
            and one.claims
        }

    def _spared(self, good: set[str], now: float) -> int:
        """What complete sources are not asked for: those who still download have it and are fast enough."""
        partial = [
            source
            for source in map(self._sources.__getitem__, good)
            if not source.whole and not source.overdue(now)
        ]
        whole = [self._sources[name].record.rate or math.inf for name in good if self._sources[name].whole]
        chunks = 0
        for source in partial:
            chunks |= source.claims & self._free
        rate = sum(source.record.rate or EXPECTED_RATE for source in partial)
        soon = chunks.bit_count() * self._typical <= SPARED_SECONDS * rate
        return chunks if soon or rate >= max(whole, default=0.0) else 0

    def _by_load(self, now: float) -> Iterator[tuple[str, PickerSource]]:
        """Sources that may be asked for one more, those first that will have it soonest; of those that say
        nothing, who delivered when it was asked last: others may begin just now, too."""
        able = [
            (
                source.assumed and not source.record.proven,
                source.wait(self._typical),
                self._entropy.random(),
                name,
                source,
            )
            for name, source in self._sources.items()
            if source.claims
            and source.busy_until <= now
            and len(source.asked) - len(source.here) < source.window(self._typical)
        ]
        for *_, name, source in sorted(able, key=lambda one: one[:3]):
            yield name, source

    def _of_whole(self, source: PickerSource, chunks: int, now: float) -> int | None:
        """What nobody has who still downloads is fetched by the one of them whom it falls to; the others
        leave it alone as long as such chunks go on arriving there."""
        lonely = chunks & self._levels[0]
        ours = self._ownership.draw(lonely, self._entropy)
        if ours is not None:
            return ours
        patience = min(SPARED_SECONDS, 2 * source.wait(self._typical))
        return self._rarest(chunks if now - self._shrunk > patience else chunks & ~lonely)

    def _rarest(self, chunks: int) -> int | None:
        if not chunks:
            return None
        for level in self._levels:
            if level & chunks:
                return draw(level & chunks, self._entropy)
        return None

    def _fits(self, chunk: int, now: float) -> bool:
        """Whether the line has room for it. What was asked for longer ago than FLYING_SECONDS is not on it:
        sources that stall keep nobody from asking others."""
        if self._flying and self._flying + self._sizes[chunk] > MAX_FLYING:
            return False
        rate, flying = 0.0, 0
        for source in self._sources.values():
            if source.asked:
                rate += source.record.rate
                flying += sum(
                    self._sizes[one] for one, since in source.asked.items() if now - since < FLYING_SECONDS
                )
        return not flying or flying + self._sizes[chunk] <= max(FIRST_FLYING, FLYING_SECONDS * rate)

    def _ask(self, name: str, source: PickerSource, chunk: int, now: float) -> Ask:
        size = self._sizes[chunk]
        expected = source.wait(size) if source.record.rate else MAX_DEADLINE_S
        deadline = min(MAX_DEADLINE_S, MIN_DEADLINE_S + DEADLINE_FACTOR * expected)
        if not source.asked:
            source.record.begins(now)
        source.asked[chunk] = now
        source.flying += size
        self._flying += size
        self._free &= ~(1 << chunk)
        return Ask(name, chunk, deadline)

    # The end

    def _again(self, now: float, good: set[str]) -> Ask | None:
        """Everything is asked for: what will come last is asked of another source, too, where that is to have
        it in half the time."""
        best: tuple[float, str, PickerSource, int] | None = None
        for chunk, (copies, left) in self._outstanding(now).items():
            if copies >= MAX_COPIES or not self._fits(chunk, now):
                continue
            for name, source in self._by_load(now):
                bit = 1 << chunk
                if name not in good or chunk in source.asked or not source.claims & bit:
                    continue
                if source.overdue(now):
                    continue
                gain = left - 2 * source.wait(self._sizes[chunk])
                if gain > 0 and (best is None or gain > best[0]):
                    best = gain, name, source, chunk
                break
        return None if best is None else self._ask(best[1], best[2], best[3], now)

    def _outstanding(self, now: float) -> dict[int, tuple[int, float]]:
        """Of each chunk in flight: how many are asked for it that still may deliver, and in how many seconds
        the first of them is to be expected; one that is overdue is to take as long again."""
        found: dict[int, tuple[int, float]] = {}
        for source in self._sources.values():
            late = source.overdue(now)
            for chunk, since in source.asked.items():
                waited = now - since
                expected = source.wait(0)
                left = expected - waited if waited < expected else waited
                copies, least = found.get(chunk, (0, left))
                found[chunk] = copies + (not late), min(least, left)
        return found
