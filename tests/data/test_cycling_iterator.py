"""An iterator over several epochs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rallypoint.data import CyclingIterator


class Epochs:
    """Makes the two items of an epoch, and remembers which epochs were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, epoch: int) -> Iterator[int]:
        self.asked.append(epoch)
        return iter([10 * epoch + 1, 10 * epoch + 2])


@pytest.fixture
def epochs() -> Epochs:
    return Epochs()


def test_epochs_follow_each_other(epochs: Epochs) -> None:
    assert list(CyclingIterator(3, epochs)) == [1, 2, 11, 12, 21, 22]
    assert epochs.asked == [0, 1, 2]


def test_an_epoch_is_made_when_it_begins(epochs: Epochs) -> None:
    items = CyclingIterator(3, epochs)
    assert (next(items), next(items), epochs.asked) == (1, 2, [0])
    assert (next(items), epochs.asked) == (11, [0, 1])


def test_it_can_begin_later(epochs: Epochs) -> None:
    assert list(CyclingIterator(4, epochs, start_epoch=2)) == [21, 22, 31, 32]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_there_is_always_one_epoch_as_with_torch(n: int, epochs: Epochs) -> None:
    assert list(CyclingIterator(n, epochs, start_epoch=5)) == [51, 52]


def test_once_at_its_end_it_stays_there(epochs: Epochs) -> None:
    items = CyclingIterator(2, epochs)
    assert len(list(items)) == 4
    assert next(items, None) is None
    assert epochs.asked == [0, 1]


def test_it_is_its_own_iterator(epochs: Epochs) -> None:
    items = CyclingIterator(2, epochs)
    assert iter(items) is items


def test_empty_epochs_are_passed_over_however_many() -> None:
    assert list(CyclingIterator(5000, lambda epoch: [epoch] if epoch in (0, 4998) else [])) == [0, 4998]


def test_an_error_of_the_generator_comes_through() -> None:
    def boom(epoch: int) -> Iterator[int]:
        if epoch:
            raise OSError("no more data")
        return iter([1])

    items = CyclingIterator(2, boom)
    assert next(items) == 1
    with pytest.raises(OSError, match="no more data"):
        next(items)


@pytest.mark.torch
@pytest.mark.parametrize(("n", "start"), [(0, 0), (1, 0), (3, 0), (3, 2), (3, 7)])
def test_torch_gives_the_same(n: int, start: int) -> None:
    from torch.distributed.elastic.utils.data import CyclingIterator as OfTorch

    ours, theirs = Epochs(), Epochs()
    assert list(CyclingIterator(n, ours, start)) == list(OfTorch(n, theirs, start))
    assert ours.asked == theirs.asked
