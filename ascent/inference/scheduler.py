"""Caches in pages: who runs, who waits, and who gets which page.

A cache is a number of pages, each with room for the keys and values of `size` tokens. A prompt's pages are held once,
by all rows of its group; a row's own tokens lie in pages of its own behind them. So a row takes what it uses, and
not what it might.

    waiting   no pages yet, or none any more: the row was evicted, and is encoded again when it comes back
    running   has a lane, and draws one token per step
    parked    keeps its pages as long as there is room, but not its lane: its environment is at work

Where room runs out, prompts that nobody reads are dropped first, then the row that entered last is evicted. The oldest
row is never evicted for a younger one. So something always finishes, as long as one row alone fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as GenericSequence

from ascent.core.errors import ConfigError
from ascent.inference.block_manager import BlockManager
from ascent.inference.sequence import NOWHERE, Sequence

SPARE = 8
"""Running rows per page that is kept free for their growth when another row enters."""


class Scheduler:
    """Which responses run in which lane, on which pages.

    Response i belongs to prompt i // samples. The caller encodes `fresh` prompts and the tokens of rows that come back
    (`Row.length` > 0), draws, and says what came of it.
    """

    def __init__(
        self,
        prompts: GenericSequence[int],
        samples: int,
        lanes: int,
        limit: int,
        pages: BlockManager,
        together: int = 1,
        begun: Mapping[int, int] | None = None,
        over: Collection[int] = (),
    ):
        """`prompts`: keys of each prompt. `limit`: tokens that a row's own pages must be able to hold.

        `together`: prompts that get pages at once, where there is room, because they are encoded together. `begun`: of
        responses that an earlier call began, the tokens to encode when they come back; `over`: those that it ended.
        """
        self.keys, self.samples, self.pages, self.together = dict(enumerate(prompts)), samples, pages, together
        self.own: dict[int, int] = {}
        """The prompts of responses that came while the others ran (`add`)."""
        least = pages.need(max(prompts, default=0)) + pages.need(limit)
        if pages.count < least:
            raise ConfigError(
                f"the cache has room for {pages.count * pages.size} tokens, and one response may take "
                f"{least * pages.size}: set a lower --max-tokens, or free memory"
            )
        self.limit = limit
        self.waiting = deque(i for i in range(len(prompts) * samples) if i not in over)
        self.rows: dict[int, Sequence] = {}
        """Running and parked rows, by response, in the order in which they entered."""
        self.ready: deque[int] = deque()
        """Parked rows that want a lane, and pages for what they were given."""
        self.away: set[int] = set()
        """Rows that were evicted while they were parked."""
        self.free_lanes = list(range(lanes))[::-1]
        self.prompts: dict[int, list[int]] = {}
        """The pages of each prompt that is encoded."""
        self.fresh: list[int] = []
        """Prompts that have pages and nothing on them: the caller encodes them and empties this list."""
        self.kept: dict[int, int] = dict(begun or {})
        """Of responses that were evicted, the tokens to encode when they come back."""
        self.left = dict.fromkeys(range(len(prompts)), samples)
        """Responses of each prompt that have not ended."""
        for response in over:
            self.left[response // samples] -= 1
        self.readers = dict.fromkeys(range(len(prompts)), 0)
        """Rows on each prompt's pages."""
        self.evictions = 0

    def prompt(self, response: int) -> int:
        return self.own.get(response, response // self.samples)

    def add(self, response: int, prompt: int, keys: int, kept: int = 0) -> None:
        """One more response waits, to a prompt that may be new. `kept`: tokens to encode when it enters."""
        self.own[response] = prompt
        if prompt not in self.keys:
            self.keys[prompt], self.left[prompt], self.readers[prompt] = keys, 0, 0
        self.left[prompt] += 1
        if kept:
            self.kept[response] = kept
        self.waiting.append(response)

    @property
    def running(self) -> list[Sequence]:
        return [row for row in self.rows.values() if row.lane != NOWHERE]

    def admit(self, ahead: int = 1, most: int | None = None) -> list[Sequence]:
        """Rows that now get a lane, parked ones that are ready and then waiting ones, with room for `ahead` tokens.

        `most`: how many may run then, if fewer than there are lanes.
        """
        entering: list[Sequence] = []
        lanes = len(self.free_lanes) if most is None else min(len(self.free_lanes), most - len(self.running))
        while len(entering) < lanes and self.ready and self._widen(row := self.rows[self.ready[0]], ahead):
            self.ready.popleft()
            row.lane = self.free_lanes.pop()
            entering.append(row)
        while len(entering) < lanes and self.waiting and (new := self._enter(self.waiting[0], ahead)) is not None:
            self.waiting.popleft()
            new.lane = self.free_lanes.pop()
            entering.append(new)
        return entering

    def _widen(self, row: Sequence, ahead: int) -> bool:
        """Pages for what a parked row was given; others that do not run are evicted for it only if nobody runs."""
        want = self.pages.need(min(row.length + ahead, self.limit)) - len(row.pages)
        if want > len(self.pages):
            self._drop_idle()
            self._make_room(want, row.prompt)
        while want > len(self.pages) and not self.running and row.response in self.rows:
            self._evict()
        if want > len(self.pages) or row.response not in self.rows:
            return False
        row.pages += self.pages.take(max(0, want))
        return True

    def _enter(self, response: int, ahead: int) -> Sequence | None:
        prompt, length = self.prompt(response), self.kept.get(response, 0)
        own = self.pages.need(min(length + ahead, self.limit))
        new = 0 if prompt in self.prompts else self.pages.need(self.keys[prompt])
        if len(self.pages) < own + new + len(self.rows) // SPARE:
            held = self.pages.count - len(self.pages) - sum(map(len, self.prompts.values()))
            growth = len(self.rows) * self.pages.need(self.limit) - held  # what the rows may still come to need
            want = own + new + min(len(self.rows) // SPARE, growth)
            if len(self.pages) < want:
                self._drop_idle(keep=prompt)
                if len(self.pages) < want and not self._make_room(want, prompt):
                    return None
        self.kept.pop(response, None)
        row = Sequence(response, prompt, length, self.pages.take(own))
        if prompt not in self.prompts:
            self._encode_from(prompt)
        self.rows[response] = row
        self.readers[prompt] += 1
        return row

    def _make_room(self, pages: int, prompt: int) -> bool:
        """This many free pages, at the cost of rows that wait for a turn which may never be asked for."""
        parked = [row for row in self.rows.values() if row.lane == NOWHERE and row.response not in self.ready]
        for row in parked if self.own else []:
            if len(self.pages) >= pages:
                break
            self._evict(row)
            self._drop_idle(keep=prompt)
        return len(self.pages) >= pages

    def _encode_from(self, prompt: int) -> None:
        """Pages for this prompt, and for those behind it as far as they leave room for the rows to grow."""
        for p in (p for p in range(prompt, prompt + self.together) if p in self.keys):
            need = self.pages.need(self.keys[p])
            if p != prompt and (p in self.prompts or not self.left[p] or len(self.pages) < need + 2 * len(self.rows)):
                continue
            self.prompts[p] = self.pages.take(need, high=True)
            self.fresh.append(p)

    def _drop_idle(self, keep: int | None = None) -> None:
        for prompt in [p for p in self.prompts if self.readers[p] == 0 and p != keep]:
            self.pages.give(self.prompts.pop(prompt))
            self.fresh = [p for p in self.fresh if p != prompt]

    def fits(self, ahead: int) -> bool:
        """Is there room for `ahead` more tokens in all rows that run, with nobody evicted?"""
        size, free = self.pages.size, len(self.pages)
        short = (row for row in self.running if row.length + ahead > len(row.pages) * size)
        return sum(self.pages.need(min(row.length + ahead, self.limit)) - len(row.pages) for row in short) <= free

    def grow(self, ahead: int, rows: GenericSequence[Sequence] | None = None) -> list[Sequence]:
        """Room for `ahead` more tokens in these rows (all that run), oldest first; those that were evicted for it."""
        evicted: list[Sequence] = []
        for row in self.running if rows is None else rows:
            if row.length + ahead <= len(row.pages) * self.pages.size or row.response not in self.rows:
                continue
            want = self.pages.need(min(row.length + ahead, self.limit)) - len(row.pages)
            while want > len(self.pages) and row.response in self.rows:
                self._drop_idle()
                if want > len(self.pages):
                    evicted.append(self._evict())
            if row.response in self.rows and want > 0:
                row.pages += self.pages.take(want)
        return evicted

    def _evict(self, row: Sequence | None = None) -> Sequence:
        """This row, or the one that entered last, gives up its pages and waits, first in line."""
        row = row or self.rows[next(reversed(self.rows))]
        self.kept[row.response] = row.length
        if row.lane == NOWHERE and row.response not in self.ready:
            self.away.add(row.response)
        else:
            self.waiting.appendleft(row.response)
        self._remove(row)
        self.evictions += 1
        return row

    def park(self, response: int) -> None:
        """This row waits for its environment: another takes its lane, its pages stay."""
        row = self.rows[response]
        self.free_lanes.append(row.lane)
        row.lane = NOWHERE

    def unpark(self, response: int, length: int) -> None:
        """A parked row may continue with so many tokens; one that was evicted meanwhile waits for pages first."""
        if response in self.away:
            self.away.remove(response)
            self.kept[response] = length
            self.waiting.appendleft(response)
        else:
            self.rows[response].length = length
            self.ready.append(response)

    def end(self, response: int) -> None:
        """This response is over; with its prompt's last one the prompt's pages are free too."""
        prompt = self.prompt(response)
        if response in self.rows:
            self._remove(self.rows[response])
        elif response in self.away:
            self.away.remove(response)
        else:
            self.waiting.remove(response)
        self.kept.pop(response, None)
        self.left[prompt] -= 1
        if self.left[prompt] == 0:
            self.pages.give(self.prompts.pop(prompt, []))
            self.fresh = [p for p in self.fresh if p != prompt]
        if self.own.pop(response, None) is not None and self.left[prompt] == 0:
            del self.keys[prompt], self.left[prompt], self.readers[prompt]

    def _remove(self, row: Sequence) -> None:
        del self.rows[row.response]
        self.pages.give(row.pages)
        self.readers[row.prompt] -= 1
        if row.lane != NOWHERE:
            self.free_lanes.append(row.lane)
        elif row.response in self.ready:
            self.ready.remove(row.response)
