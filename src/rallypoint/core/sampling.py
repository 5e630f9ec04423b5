"""Who takes which samples of a dataset: one shuffled order that all ranks know, dealt out in turns.

The order depends on the number of samples and on the seed, and on nothing else: not on the number of ranks, nor on which of them
asks. So every rank finds the same order without asking the others, and a job that goes on with more or fewer ranks can
deal out the rest of an order that was begun.

The order is the one of ``torch.randperm`` with a generator of the same seed: Fisher and Yates' shuffle, driven by the Mersenne
Twister, for any number of samples below `SAME_AS_TORCH_BELOW`. A rank with torch and a rank without it agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["SAME_AS_TORCH_BELOW", "deal", "samples_each", "shuffled", "twister_state"]

SAME_AS_TORCH_BELOW = 214_748_364  # samples; for more, torch shuffles in another way
WORD = 0xFFFF_FFFF
STATE_WORDS = 624
SPREAD = 1_812_433_253  # the multiplier with which the authors of the Mersenne Twister spread a seed over its state


def twister_state(seed: int) -> tuple[int, ...]:
    """The words of a Mersenne Twister that was seeded with a number; only the seed's lowest 32 bits count."""
    words = [seed & WORD]
    for index in range(1, STATE_WORDS):
        last = words[-1]
        words.append((SPREAD * (last ^ (last >> 30)) + index) & WORD)
    return tuple(words)


def shuffled(count: int, draw_word: Callable[[], int]) -> list[int]:
    """The numbers below `count` in the order that the words drawn, of 32 bits each, put them in."""
    order = list(range(count))
    for place in range(count - 1):
        other = place + draw_word() % (count - place)
        order[place], order[other] = order[other], order[place]
    return order


def samples_each(count: int, replicas: int) -> int:
    """How many samples each of the replicas takes, so that all take the same number and none is left out."""
    return -(-count // replicas)


def deal(order: Sequence[int], replicas: int, rank: int, each: int) -> list[int]:
    """The share of one rank: every `replicas`-th of the order; where the order ends too soon, it begins again."""
    share = list(order[rank : each * replicas : replicas])
    while len(share) < each:
        share.append(order[(rank + len(share) * replicas) % len(order)])
    return share
