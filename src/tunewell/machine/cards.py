"""GPU cards that a machine may not have: memory, bandwidth and rates, from the data file `cards.json`."""

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache

from tunewell.core.errors import UserError, did_you_mean
from tunewell.core.files import read_data
from tunewell.machine.facts import DeviceFacts, gpu_facts


@dataclass(frozen=True)
class Card:
    """A GPU card. Rates are dense, in FLOP/s, as its maker states them."""

    name: str
    label: str
    memory_bytes: int
    bytes_per_second: float
    bf16: float | None
    """None if the card emulates bf16, even though torch accepts it."""
    fp16: float
    fp32: float
    capability: tuple[int, int]
    source: str

    def rate(self, precision: str) -> float:
        """Return the FLOP/s of matrix products in a precision."""
        return {"bf16": self.bf16 or self.fp32, "fp16": self.fp16}.get(precision, self.fp32)

    def facts(self) -> DeviceFacts:
        """Return the facts of an idle card."""
        size = self.memory_bytes
        return gpu_facts("cuda:0", self.label, size, size, capability=self.capability, is_here=False)


@lru_cache
def known_cards() -> dict[str, Card]:
    """Return the cards by name."""
    entries = read_data(__file__, "cards.json")["cards"]
    return {entry["name"]: Card(**entry | {"capability": tuple(entry["capability"])}) for entry in entries}


def find_card(name: str, *, where: str = "--gpu") -> Card:
    """Return a card by its name, like `t4` or `RTX 4090`; raise UserError with the closest names."""
    cards, wanted = known_cards(), _plain(name)
    if wanted in cards:
        return cards[wanted]
    if several := re.fullmatch(r"\d+ ?x ?(.+)", name.strip().lower()):
        what = f"`{name}` is several cards: a model must fit on one of them"
        raise UserError(what, where=where, fix=f"give the card alone: `{several[1]}`")
    if matched := match_card(name):
        return matched
    close = difflib.get_close_matches(wanted, cards, n=2, cutoff=0.5)
    guesses = did_you_mean(close, "")
    raise UserError(
        f"there is no GPU card `{name}` in the list",
        where=where,
        fix=f"{guesses} known cards: {', '.join(cards)}".strip(),
    )


def match_card(label: str) -> Card | None:
    """Return the card with a product name as torch and nvidia-smi report it: `NVIDIA A100-SXM4-80GB`."""
    words = set(re.findall(r"[a-z]*\d+[a-z]*|ti|super|ada|pcie", label.lower()))
    best: tuple[int, Card] | None = None
    for card in known_cards().values():
        own = set(re.findall(r"[a-z]*\d+[a-z]*|ti|super|ada|pcie", card.label.lower()))
        sizes = {word for word in own if word.endswith("gb")}
        needed = own - sizes
        if needed <= words and not ((words - own) & {"ti", "super", "ada", "pcie"} and "pcie" not in words):
            score = 2 * len(needed) + len(sizes & words)
            if best is None or score > best[0]:
                best = (score, card)
    return best[1] if best else None


def _plain(name: str) -> str:
    text = re.sub(r"\b(nvidia|geforce|tesla|rtx|gb)\b", "", name.strip().lower())
    return re.sub(r"(?<=\d)gb$", "", re.sub(r"[\s_]+", "-", text.strip()))
