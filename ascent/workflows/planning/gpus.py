"""Kinds of GPU and networks: what one card can do, and what the model of costs was fitted to.

One H200 was measured (benchmarks/results/plan.md). Every other kind is assumed: its published bandwidth and
operations, times the share of them that an H200 reaches, with the overheads of an H200's host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """A kind of GPU. Rates are those that can be reached, in bytes and bfloat16 operations per second."""

    name: str
    memory: int
    bandwidth: float
    rate: float
    link: float
    """Bytes per second between two cards of a node, one way."""
    measured: bool = False


def _assumed(name: str, gigabytes: float, terabytes: float, teraflops: float, link: float) -> Card:
    """From what a vendor publishes: an H200 reaches 4.3 of 4.8 TB/s and 790 of 989 TFLOP/s."""
    memory = int(0.985 * gigabytes * 1e9) if gigabytes > 100 else int(0.985 * gigabytes * GIB)
    return Card(name, memory, terabytes * 1e12 * 4.3 / 4.8, teraflops * 1e12 * 790 / 989, link)


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("h200", 150_109_880_320, 4.3e12, 790e12, 300e9, measured=True),
        _assumed("h100", 80, 3.35, 989, 300e9),
        _assumed("b200", 180, 8.0, 2250, 600e9),
        _assumed("a100", 80, 2.04, 312, 200e9),
        _assumed("mi300x", 192, 5.3, 1307, 300e9),
        _assumed("l40s", 48, 0.864, 362, 20e9),
        _assumed("rtx4090", 24, 1.01, 165, 20e9),
    )
}


@dataclass(frozen=True)
class Fit:
    """Constants of the model of costs, fitted to one H200: `python -m benchmarks.plan` fits them anew and compares."""

    layer: float = 3.30e-5
    """Seconds that a layer takes in a decoding step, however little it computes."""
    products: float = 1.42
    """Products of a decoding step: times the least, by bytes or operations."""
    caches: float = 1.12
    """Attention of a decoding step: times the least, by the bytes of the caches."""
    operations: float = 1.0
    """Products of an update: times the least, by operations."""
    attention: float = 2.93
    """Attention of an update: times the least, by operations."""
    passes: float = 13.1
    """Times that an update moves what autograd keeps of a token."""
    launch: float = 3.65e-3
    """Seconds that the host takes for a layer of a micro-batch, forward and backward; the card works meanwhile."""
    update: float = 1.38e-2
    """Seconds of an update beside its micro-batches."""


FIT = Fit()


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal cards."""

    card: Card
    gpus: int
    """Cards of a node."""
    nodes: int
    network: float
    """Bytes per second that a node sends to others."""

    @property
    def size(self) -> int:
        return self.gpus * self.nodes

    def across(self, ranks: int) -> float:
        """Bytes per second of each rank in a ring over so many: a node's network is shared by nobody in a ring."""
        return self.card.link if ranks <= self.gpus else min(self.card.link, self.network)

    def summed(self, data: float, ranks: int) -> float:
        """Seconds in which every rank has the sum of everybody's numbers (a ring)."""
        return 0.0 if ranks == 1 else 2 * (ranks - 1) / ranks * data / self.across(ranks)

    def gathered(self, data: float, ranks: int) -> float:
        """Seconds in which every rank has everybody's part of this many bytes, or sums them into parts."""
        return self.summed(data, ranks) / 2


def card_of(name: str) -> Card:
    if name.lower() not in CARDS:
        raise ConfigError(f"--gpu {name}: there are {', '.join(CARDS)}.{nearest(name.lower(), CARDS)}")
    return CARDS[name.lower()]


def bytes_per_second(text: str) -> float:
    """40GB/s, 400Gb/s, 5e9."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kMGT]?)(b|B|bit)(?:/s|ps))?\s*", text)
    try:
        value = float(found[1]) if found else 0.0
    except ValueError:
        value = 0.0
    if found is None or not 0 < value < 1e18:
        raise ConfigError(f"--network {text}: bytes per second of a node, as 40GB/s, or bits, as 400Gb/s")
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(found[2] or "", 1.0)
    return value * scale / (1 if found[3] in (None, "B") else 8)
