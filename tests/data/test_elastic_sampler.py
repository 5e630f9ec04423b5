"""Who takes which samples: everything once, evenly, in an order that all ranks agree on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.data import ElasticDistributedSampler

SIZES = st.integers(1, 200)
REPLICAS = st.integers(1, 17)
EPOCHS = st.integers(0, 2**63)


def shares(size: int, replicas: int, start_index: int = 0, epoch: int = 0, consumed: int = 0) -> list[list[int]]:
    """What each of the ranks takes."""
    samplers = [ElasticDistributedSampler(range(size), replicas, rank, start_index) for rank in range(replicas)]
    for sampler in samplers:
        sampler.resume(epoch, consumed)
    return [list(sampler) for sampler in samplers]


def dealt(shares: list[list[int]]) -> list[int]:
    """The samples in the order in which the ranks take them."""
    return [sample for turn in zip(*shares, strict=True) for sample in turn]


@given(data=st.data(), size=SIZES, replicas=REPLICAS, epoch=EPOCHS)
def test_all_ranks_together_take_everything_evenly(data: st.DataObject, size: int, replicas: int, epoch: int) -> None:
    start = data.draw(st.integers(0, size - 1))
    each = shares(size, replicas, start, epoch)
    taken = Counter(sample for share in each for sample in share)
    assert set(taken) == set(range(start, size))
    assert len({len(share) for share in each}) == 1
    assert max(taken.values()) - min(taken.values()) <= 1
    assert taken.total() - (size - start) < replicas


@given(data=st.data(), size=SIZES, before=REPLICAS, after=REPLICAS, epoch=EPOCHS)
def test_with_other_ranks_the_rest_follows_without_repeating(
    data: st.DataObject, size: int, before: int, after: int, epoch: int
) -> None:
    first = shares(size, before, epoch=epoch)
    steps = data.draw(st.integers(0, len(first[0])))
    done = dealt([share[:steps] for share in first])
    rest = dealt(shares(size, after, epoch=epoch, consumed=len(done)))
    assert set(done) | set(rest) == set(range(size))
    left = size - min(len(done), size)
    assert len(set(rest[:left])) == left
    assert not set(rest) & set(done)


@given(size=SIZES, replicas=REPLICAS, others=REPLICAS, epoch=EPOCHS)
def test_the_order_does_not_depend_on_the_number_of_ranks(size: int, replicas: int, others: int, epoch: int) -> None:
    assert dealt(shares(size, replicas, epoch=epoch))[:size] == dealt(shares(size, others, epoch=epoch))[:size]


def test_each_epoch_has_its_own_order() -> None:
    assert shares(50, 1, epoch=0) != shares(50, 1, epoch=1)
    assert shares(50, 1, epoch=1) == shares(50, 1, epoch=1)


def test_a_later_epoch_begins_with_its_first_sample() -> None:
    sampler = ElasticDistributedSampler(range(10), 2, 0)
    sampler.resume(3, 6)
    sampler.set_epoch(3)  # as the loop of a resumed script does
    assert (len(sampler), sampler.num_samples, sampler.total_size) == (2, 2, 4)
    sampler.set_epoch(4)
    assert (len(sampler), sampler.num_samples, sampler.total_size) == (5, 5, 10)


def test_an_epoch_that_is_done_gives_nothing() -> None:
    sampler = ElasticDistributedSampler(range(10), 4, 0)
    sampler.resume(0, 12)  # with the two that were taken twice
    assert (list(sampler), len(sampler)) == ([], 0)


def test_what_callers_of_torchs_class_read() -> None:
    sampler = ElasticDistributedSampler(range(10), num_replicas=3, rank=1, start_index=3)
    names = ("num_replicas", "rank", "epoch", "drop_last", "num_samples", "total_size", "shuffle", "seed", "start_index")
    assert [getattr(sampler, name) for name in names] == [3, 1, 0, False, 3, 9, True, 0, 3]
    assert sampler.dataset == range(10)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((3, 3, 0), r"Invalid rank 3, rank should be in the interval \[0, 2\]"),
        ((3, -1, 0), r"Invalid rank -1, rank should be in the interval \[0, 2\]"),
        ((0, 0, 0), r"Invalid rank 0, rank should be in the interval \[0, -1\]"),
        ((3, 0, 10), "Start index 10 should be less than dataset size 10"),
        ((3, 0, -1), "Start index -1 should not be negative"),
    ],
)
def test_impossible_arguments(arguments: tuple[int, int, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ElasticDistributedSampler(range(10), *arguments)


def test_less_than_nothing_cannot_be_consumed() -> None:
    with pytest.raises(ValueError, match="-1 samples cannot have been consumed"):
        ElasticDistributedSampler(range(10), 2, 0).resume(0, -1)


def test_a_dataset_that_changes_its_length_is_told() -> None:
    samples = list(range(10))
    sampler = ElasticDistributedSampler(samples, 2, 0)
    samples += [10, 11]
    with pytest.raises(RuntimeError, match="the dataset now has 12 samples"):
        list(sampler)


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    sampler = ElasticDistributedSampler(range(10))
    assert (sampler.num_replicas, sampler.rank) == (4, 2)


def test_without_an_environment_the_ranks_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="num_replicas is not given, there is no process group, and WORLD_SIZE is not set"):
        ElasticDistributedSampler(range(10))
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK is 'first', which is no whole number"):
        ElasticDistributedSampler(range(10), num_replicas=2)


def test_the_order_is_pinned() -> None:
    """What torch 2.13 gives for the same; without torch, it must stay so."""
    assert dealt(shares(10, 1)) == [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]
    assert shares(10, 3, start_index=4, epoch=1) == [[5, 4], [9, 7], [6, 8]]


def test_torch_is_not_imported_for_it() -> None:
    program = "import sys, rallypoint.data; print(*(one for one in sys.modules if one in ('torch', 'typing', 'dataclasses')))"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    answer = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, env=environment)
    assert (answer.stdout.strip(), answer.stderr) == ("", "")


# --- beside torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.torch
@given(data=st.data(), size=SIZES, replicas=REPLICAS, epoch=EPOCHS, with_torch=st.booleans())
def test_torch_gives_the_same_indices(data: st.DataObject, size: int, replicas: int, epoch: int, with_torch: bool) -> None:
    """With torch's generator and without it. Where torch fails for want of samples to repeat, ours begins again."""
    from torch.distributed.elastic.utils.data import ElasticDistributedSampler as OfTorch

    start = data.draw(st.integers(0, size - 1))
    rank = data.draw(st.integers(0, replicas - 1))
    theirs = OfTorch(range(size), replicas, rank, start)
    ours = ElasticDistributedSampler(range(size), replicas, rank, start)
    for sampler in (ours, theirs):
        sampler.set_epoch(epoch)
    assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, theirs.total_size)
    if 2 * (size - start) >= theirs.total_size:
        with pytest.MonkeyPatch.context() as patch:
            if not with_torch:
                patch.delitem(sys.modules, "torch")
            indices = list(ours)
        assert indices == list(theirs)


@pytest.mark.torch
def test_many_samples_are_shuffled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: F401

    with_torch = shares(200_003, 1, epoch=7)
    monkeypatch.delitem(sys.modules, "torch")
    assert shares(200_003, 1, epoch=7) == with_torch


@pytest.mark.torch
def test_a_data_loader_takes_it() -> None:
    from torch.utils.data import DataLoader

    sampler = ElasticDistributedSampler(range(10), 2, 1)
    loader = DataLoader(list(range(10)), batch_size=2, sampler=sampler)
    assert len(loader) == 3
    assert [int(sample) for batch in loader for sample in batch] == list(sampler)


@pytest.mark.torch
def test_a_process_group_tells_the_ranks() -> None:
    program = """
        import torch.distributed as dist
        from rallypoint.data import ElasticDistributedSampler
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        sampler = ElasticDistributedSampler(range(10))
        print(sampler.num_replicas, sampler.rank)
        dist.destroy_process_group()
    """
    answer = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert answer.stdout.split() == ["1", "0"]
