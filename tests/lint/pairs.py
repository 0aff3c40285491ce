"""Recall and precision on loops before and after public fixes: `python -m tests.lint.pairs [-v]`."""

import sys
from dataclasses import dataclass
from pathlib import Path

from accumulation_harness.lint.__main__ import found
from accumulation_harness.lint.source import Source

FILE = Path(__file__).with_name("pairs.diff")


@dataclass(frozen=True)
class Pair:
    """A loop `before` its fix has `causes`; `after` it has none, or (`still`) others that the fix left."""

    name: str
    thread: str
    causes: frozenset[str]
    still: frozenset[str]
    group: str
    before: str
    after: str


def pairs():
    """Read the file of pairs."""
    for part in FILE.read_text().split("\n@@ ")[1:]:
        header, _, body = part.partition("\n")
        name, thread, causes, *rest = (one.strip() for one in header.split("|"))
        lines = body.splitlines()
        before, after = ("\n".join(line[1:] for line in lines if line[:1] in ("", " ", mark)) for mark in "-+")
        still = frozenset(word for one in rest if one.startswith("still") for word in one.split()[1:])
        group = next((one for one in rest if not one.startswith("still")), "tried on")
        yield Pair(name, thread, frozenset(causes.split()), still, group, before, after)


def told(text):
    return {str(hit.cause) for hit in found(Source(text)) if hit.sure or "--look" in sys.argv}


def measured(of):
    """Return faults told, faults, hits that are right, and all hits, of pairs."""
    faults = hits = right = told_faults = 0
    for pair in of:
        before, after = told(pair.before), told(pair.after)
        faults += 1
        told_faults += bool(before & pair.causes)
        hits += len(before) + len(after)
        right += len(before & (pair.causes | pair.still)) + len(after & pair.still)
        if "-v" in sys.argv and (not before & pair.causes or before - pair.causes - pair.still or after - pair.still):
            print(f"{pair.name}: {', '.join(pair.causes)} -> before {sorted(before)}, after {sorted(after)}")
    return told_faults, faults, right, hits


if __name__ == "__main__":
    for group in ("tried on", "held out", "second", "third", "fourth") if "--held-out" in sys.argv else ("tried on",):
        told_faults, faults, right, hits = measured([pair for pair in pairs() if pair.group == group])
        print(f"{group}: recall {told_faults} of {faults}, precision {right} of {hits}")
