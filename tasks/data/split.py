"""Identity of a prompt, the train/eval split that follows from it, and the order in which epochs draw.

The split is a property of the prompt text alone: the sha256 of the normalised prompt, read as a number in
[0, 1), lies below the eval share or it does not. Two prompts that differ only in case, white space or Unicode
form therefore land on the same side, also when a small task space produces the same question many times.
"""

from __future__ import annotations

import hashlib
import random
import unicodedata
from collections.abc import Collection, Sequence

ID_DIGITS = 16
_ID_SPACE = 2.0 ** (4 * ID_DIGITS)


def normalise(prompt: str) -> str:
    """Unicode NFKC, case folded, every run of white space one space, none at the ends.

    Case folding can undo NFKC (a folded character may decompose), so NFKC is applied on both sides of it.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", prompt).casefold())
    return " ".join(folded.split())


def prompt_id(prompt: str) -> str:
    """First 16 hex digits (64 bits) of the sha256 of the normalised prompt in UTF-8."""
    # A lone surrogate can come out of a JSON escape and has no UTF-8 form of its own.
    data = normalise(prompt).encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).hexdigest()[:ID_DIGITS]


def is_eval(identifier: str, eval_share: float) -> bool:
    """Whether a prompt with this id belongs to the eval side: id / 2^64 < `eval_share`."""
    return int(identifier, 16) < eval_share * _ID_SPACE


def epoch_slice(seed: int, cursor: int, size: int, population: int) -> list[int]:
    """Indices in range(`population`) at draw positions [`cursor`, `cursor` + `size`) under `seed`.

    Position p belongs to epoch p // population. Where a batch crosses from one epoch into the next, the
    indices that it already holds are moved behind its end in the new epoch's order. Which positions such a
    batch has follows from `size` and `cursor` % `size`, so no state is needed.
    """
    indices: list[int] = []
    position = cursor
    while len(indices) < size:
        epoch, start = divmod(position, population)
        order = _epoch_order(seed, epoch, size, cursor % size, population)
        taken = order[start : start + size - len(indices)]
        indices.extend(taken)
        position += len(taken)
    return indices


def _epoch_order(seed: int, epoch: int, size: int, phase: int, population: int) -> list[int]:
    """Order of one epoch for batches that start at positions congruent to `phase` modulo `size`.

    Moving indices back reaches at most `size` places into an epoch. With two batches or more per epoch the
    end of an epoch is therefore its plain permutation, and one epoch back is enough; a smaller set is
    followed from the first epoch on.
    """
    if size > population:
        return _permutation(seed, epoch, population)
    first = max(0, epoch - 1) if population >= 2 * size else 0
    order = _permutation(seed, first, population)
    for current in range(first + 1, epoch + 1):
        carried = (current * population - phase) % size
        held = set(order[population - carried :]) if carried else set()
        order = _permutation(seed, current, population)
        if held:
            order = _moved_back(order, held, size - carried)
    return order


def _moved_back(order: Sequence[int], held: Collection[int], head: int) -> list[int]:
    """`order` with its first `head` indices outside `held` in front; everything else keeps its order."""
    front = [i for i in order if i not in held][:head]
    chosen = set(front)
    return front + [i for i in order if i not in chosen]


def _permutation(seed: int, epoch: int, population: int) -> list[int]:
    digest = hashlib.sha256(f"epoch-order:{seed}:{epoch}".encode()).digest()
    order = list(range(population))
    random.Random(int.from_bytes(digest, "big")).shuffle(order)
    return order
