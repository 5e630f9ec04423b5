"""For the data side of a training script: a sampler that can go on with another number of workers, and an iterator over epochs.

Neither needs torch. Where torch is imported already, it does the shuffling, because it is quicker; the order is the same.

One shuffled order that all ranks know is dealt out in turns. It depends on the number of samples and on the seed, and on nothing
else: not on the number of ranks, nor on which of them asks. So every rank finds the same order without asking the others, and a
job that goes on with more or fewer ranks can deal out the rest of an order that was begun.

The order is the one of ``torch.randperm`` with a generator of the same seed: Fisher and Yates' shuffle, driven by the Mersenne
Twister, for any number of samples below `SAME_AS_TORCH_BELOW`. A rank with torch and a rank without it agree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

from rallypoint.base import defaults, environment
from rallypoint.base.environment import imported_torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    _T = TypeVar("_T")

__all__ = [
    "SAME_AS_TORCH_BELOW",
    "CyclingIterator",
    "ElasticDistributedSampler",
    "deal",
    "samples_each",
    "shuffled",
    "twister_state",
]


# --- sampling --------------------------------------------------------------------------------------------------------------


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


# --- data ------------------------------------------------------------------------------------------------------------------


_TWISTER_VERSION = 3  # of the states that random.Random takes


class CyclingIterator(Iterator["_T"]):
    """The items of epoch `start_epoch`, and then of each epoch after it below `n`, each made by ``generator_fn(epoch)``.

    The first epoch's iterator is made at once, so there is always one epoch; any other, when the one before it is at its end.
    """

    def __init__(self, n: int, generator_fn: Callable[[int], Iterable[_T]], start_epoch: int = 0) -> None:
        self._n = n
        self._epoch = start_epoch
        self._generator_fn = generator_fn
        self._iter = iter(generator_fn(start_epoch))

    def __iter__(self) -> CyclingIterator[_T]:
        return self

    def __next__(self) -> _T:
        while True:
            try:
                return next(self._iter)
            except StopIteration:
                if self._epoch >= self._n - 1:
                    raise
            self._epoch += 1
            self._iter = iter(self._generator_fn(self._epoch))


class ElasticDistributedSampler:
    """The indices of the samples that this rank is to take in this epoch, for any dataset that has a length.

    All ranks together take every sample from `start_index` on, in an order that is shuffled anew for each epoch; so that all take
    the same number, up to ``num_replicas - 1`` samples are taken twice. Where `num_replicas` or `rank` are not given,
    they are those of torch's process group, if there is one, else WORLD_SIZE and RANK.

    After a restart, ``resume(epoch, consumed)`` goes on within an epoch, with any number of replicas. `start_index` cuts
    samples off the *dataset*, in every epoch: it does not mean that the first samples of a shuffled epoch are done.
    """

    # What readers of torch's samplers look for. Nothing here can be turned off.
    shuffle = True
    drop_last = False
    seed = 0

    def __init__(self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None, start_index: int = 0) -> None:
        self.dataset = dataset
        self.num_replicas = _replicas_of_the_job() if num_replicas is None else num_replicas
        self.rank = _rank_in_the_job() if rank is None else rank
        self.start_index = start_index
        self.epoch = 0
        self.consumed = 0
        _check(self.num_replicas, self.rank, start_index, len(dataset))
        self._count_samples()

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order the next iteration takes; another than the present one begins with its first sample."""
        if epoch != self.epoch:
            self.resume(epoch, 0)

    def resume(self, epoch: int, consumed: int) -> None:
        """Go on within `epoch`, of which all ranks together have taken `consumed` samples, however many ranks those were.

        The order of an epoch does not depend on the number of ranks. So, if each of 4 ranks has taken 100 samples,
        ``resume(epoch, 400)`` on each of 6 ranks deals out what is left, and nothing twice.
        """
        if consumed < 0:
            raise ValueError(f"{consumed} samples cannot have been consumed")
        self.epoch = epoch
        self.consumed = min(consumed, len(self.dataset) - self.start_index)
        self._count_samples()

    def _count_samples(self) -> None:
        left = len(self.dataset) - self.start_index - self.consumed
        self.num_samples = samples_each(left, self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = _order(len(self.dataset) - self.start_index, self.epoch)[self.consumed :]
        if samples_each(len(order), self.num_replicas) != self.num_samples:
            raise RuntimeError(
                f"the dataset now has {len(self.dataset)} samples, other than when this sampler counted them; make a new sampler"
            )
        share = deal(order, self.num_replicas, self.rank, self.num_samples)
        return iter([self.start_index + index for index in share])


def _check(num_replicas: int, rank: int, start_index: int, size: int) -> None:
    if not 0 <= rank < num_replicas:
        raise ValueError(f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]")
    if start_index >= size:
        raise ValueError(f"Start index {start_index} should be less than dataset size {size}")
    if start_index < 0:
        raise ValueError(f"Start index {start_index} should not be negative")


def _order(count: int, seed: int) -> list[int]:
    if torch := imported_torch():
        # Whatever device the script has made the default one, every rank must find the same order.
        generator = torch.Generator(device="cpu").manual_seed(seed)
        order: list[int] = torch.randperm(count, generator=generator, device="cpu").tolist()
        return order
    twister = random.Random()
    state = twister_state(seed)
    twister.setstate((_TWISTER_VERSION, (*state, len(state)), None))
    return shuffled(count, lambda: twister.getrandbits(32))


def _replicas_of_the_job() -> int:
    group = _process_group()
    return int(group.get_world_size()) if group else _number_from_environment(defaults.ENV_WORLD_SIZE, "num_replicas")


def _rank_in_the_job() -> int:
    group = _process_group()
    return int(group.get_rank()) if group else _number_from_environment(defaults.ENV_RANK, "rank")


def _process_group() -> Any | None:
    """torch.distributed, if the script has imported it and set up a process group."""
    distributed = imported_torch("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None


def _number_from_environment(name: str, parameter: str) -> int:
    try:
        return int(environment.own[name])
    except KeyError:
        raise ValueError(f"{parameter} is not given, there is no process group, and {name} is not set") from None
    except ValueError:
        raise ValueError(f"{parameter} is not given, and {name} is {environment.own[name]!r}, which is no whole number") from None
