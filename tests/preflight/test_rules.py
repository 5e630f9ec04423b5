"""What makes a machine unfit, and when it is looked at again."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.preflight import rules
from rallypoint.preflight.rules import CHECKS, Finding, Fitness, Gpu, Spec, parse_checks, parse_smi, parse_xids

GIB = 1 << 30


@pytest.mark.parametrize(
    ("piece", "spec"),
    [
        ("memory", Spec("built_in", "memory")),
        ("memory=8G", Spec("built_in", "memory", 8 * GIB)),
        (" gpu=8 ", Spec("built_in", "gpu", 8)),
        ("/opt/check.sh --fast", Spec("command", "/opt/check.sh --fast")),
        ("./check", Spec("command", "./check")),
        ("sh -c 'exit 1'", Spec("command", "sh -c 'exit 1'")),
        ("fabric", Spec("plug_in", "fabric")),
    ],
)
def test_a_check_is_ours_or_a_command_or_a_plug_in(piece: str, spec: Spec) -> None:
    assert parse_checks([piece, ""], ["fabric"]) == (spec,)


@pytest.mark.parametrize(
    ("piece", "told"), [("gpus", "there are memory, disk"), ("fabric=1", "no check"), ("disk=much", "a number")]
)
def test_what_is_no_check_is_refused_with_those_that_are(piece: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_checks([piece], ["fabric"])


def test_every_threshold_can_be_read() -> None:
    assert {name: rules.least_of(Spec("built_in", name)) for name in CHECKS} == {
        "memory": GIB, "disk": GIB, "shm": 256 << 20, "files": 4096, "clock": 0, "gpu": 0, "network": 50_000_000,
    }  # fmt: skip
    assert rules.least_of(Spec("built_in", "disk", 7)) == 7


# --- GPUs, from texts as nvidia-smi and the kernel write them --------------------------------------------------------------

H200 = "0, NVIDIA H200, 0, [N/A]\n"
TWO_A100 = "0, NVIDIA A100-SXM4-80GB, 0, No\n1, NVIDIA A100-SXM4-80GB, 3, No\n"
CONSUMER = "0, NVIDIA GeForce RTX 4090, [N/A], [N/A]\n"
RETIRING = "0, Tesla V100-SXM2-32GB, 0, Yes\n"
REMAPPING = "0, NVIDIA H100 80GB HBM3, 0, [N/A], Yes, No\n1, NVIDIA H100 80GB HBM3, 0, [N/A], No, No\n"
WORN_OUT = "0, NVIDIA A100-SXM4-80GB, 0, [N/A], Yes, Yes\n"
REFUSED = 'Field "index" is not a valid field to query.\n'
LOST = "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU\n"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is"
    " installed and running.\n"
)
KERNEL_LOG = [
    (100.0, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."),
    (5000.0, "NVRM: Xid (PCI:0000:86:00): 31, pid=77, name=python, Ch 00000008, intr 00000000. MMU Fault"),
    (5001.0, "NVRM: Xid (PCI:0000:86:00): 48, pid='<unknown>', name=<unknown>, DBE (double bit error) ECC Error"),
    (5002.0, "NVRM: Xid (PCI:0000:86:00): 48, pid='<unknown>', name=<unknown>, DBE (double bit error) ECC Error"),
    (5003.0, "usb 1-1: new high-speed USB device"),
]


def test_what_nvidia_smi_prints_is_read() -> None:
    """P29"""
    assert parse_smi(H200) == [Gpu("0", "NVIDIA H200")]
    assert parse_smi(TWO_A100)[1] == Gpu("1", "NVIDIA A100-SXM4-80GB", 3)
    assert parse_smi(CONSUMER) == [Gpu("0", "NVIDIA GeForce RTX 4090")]
    assert parse_smi(RETIRING) == [Gpu("0", "Tesla V100-SXM2-32GB", 0, True)]
    assert parse_smi(REMAPPING)[0] == Gpu("0", "NVIDIA H100 80GB HBM3", is_row_pending=True)
    assert parse_smi(WORN_OUT) == [Gpu("0", "NVIDIA A100-SXM4-80GB", 0, False, True, True)]
    assert parse_smi(LOST + NO_DRIVER + "No devices were found\n") == []
    assert parse_smi("0, NVIDIA H200, Yes\n", "index,name,remapped_rows.failure") == [Gpu("0", "NVIDIA H200", is_row_lost=True)]


def test_a_field_that_nvidia_smi_does_not_know_is_left_out() -> None:
    """P29: one whose name or number it does not tell could not be judged at all."""
    refusal = 'Field "{}" is not a valid field to query.\n\n'
    fewer = rules.without_rejected(rules.SMI_FIELDS, refusal.format("remapped_rows.failure"))
    assert fewer == rules.SMI_FIELDS.removesuffix(",remapped_rows.failure")
    assert rules.without_rejected(fewer, refusal.format("remapped_rows.failure")) == ""
    assert rules.without_rejected(fewer, refusal.format("name")) == ""
    assert rules.without_rejected(fewer, LOST) == ""


def test_fatal_errors_of_devices_are_found_in_the_kernels_log() -> None:
    """P29: an MMU fault is the program's; an error of long ago was perhaps repaired."""
    assert parse_xids(KERNEL_LOG, since_s=4000.0) == [("0000:86:00", 48)]
    assert parse_xids(KERNEL_LOG, since_s=0.0) == [("0000:3b:00", 79), ("0000:86:00", 48)]


@pytest.mark.parametrize(
    ("devices", "smi", "xids", "least", "state", "what"),
    [
        (1, (0, H200), [], 0, "ok", "1 device: NVIDIA H200"),
        (0, (0, CONSUMER), [], 1, "ok", "1 device: NVIDIA GeForce RTX 4090"),
        (2, (0, H200), [], 0, "bad", "1 of 2 devices answers"),
        (1, (0, H200), [], 8, "bad", "1 of 8 devices answers"),
        (2, (0, TWO_A100), [], 0, "bad", "memory errors on device 1 (NVIDIA A100-SXM4-80GB): 3 that could not be corrected"),
        (1, (0, RETIRING), [], 0, "bad", "memory errors on device 0 (Tesla V100-SXM2-32GB): 0 that could not be corrected"),
        (2, (0, REMAPPING), [], 0, "bad", "memory that a reset would repair on device 0 (NVIDIA H100 80GB HBM3)"),
        (1, (0, WORN_OUT), [], 0, "bad", "memory that cannot be repaired any more on device 0 (NVIDIA A100-SXM4-80GB)"),
        (1, (2, REFUSED), [], 0, "unknown", f"nvidia-smi cannot be asked: {REFUSED.strip()}"),
        (1, (15, LOST), [], 0, "bad", LOST.strip()),
        (0, (9, NO_DRIVER), [], 0, "bad", NO_DRIVER.strip()),
        (0, (6, "No devices were found\n"), [], 0, "bad", "No devices were found"),
        (8, (None, ""), [], 0, "bad", "nvidia-smi did not answer within 30 s"),
        (1, (0, H200), [("0000:3b:00", 79)], 0, "bad", "the kernel has reported XID 79 on 0000:3b:00"),
        (8, None, [], 8, "unknown", "8 devices, but no nvidia-smi to ask them"),
        (0, None, [], 0, "bad", "no NVIDIA device is visible"),
    ],
)
def test_which_devices_make_a_machine_unfit(devices: int, smi: Any, xids: Any, least: int, state: str, what: str) -> None:
    """P29"""
    found = rules.judge_gpus(devices, smi, xids, least)
    assert (found.state, found.what) == (state, what)
    assert bool(found.advice) == (state == "bad")


@pytest.mark.parametrize(
    ("found", "state", "what"),
    [
        (rules.judge_memory(2 * GIB, GIB), "ok", "2.0 GiB available"),
        (rules.judge_memory(GIB // 2, GIB), "bad", "512 MiB available, less than 1.0 GiB"),
        (rules.judge_memory(None, GIB), "unknown", "/proc/meminfo cannot be read"),
        (rules.judge_disks({"/tmp": 2 * GIB, "/job": 3 * GIB}, GIB), "ok", "/tmp: 2.0 GiB free, /job: 3.0 GiB free"),
        (rules.judge_disks({"/tmp": 5, "/job": 3 * GIB}, GIB), "bad", "/tmp has 5 B left, less than 1.0 GiB"),
        (rules.judge_disks({"/job": "Read-only file system"}, GIB), "bad", "/job: Read-only file system"),
        (rules.judge_shm(GIB, 2 * GIB, GIB), "ok", "1.0 GiB of 2.0 GiB free in /dev/shm"),
        (rules.judge_shm(64 << 20, 64 << 20, GIB), "bad", "64.0 MiB of 64.0 MiB free in /dev/shm, less than 1.0 GiB"),
        (rules.judge_shm(None, 0, GIB), "bad", "there is no /dev/shm"),
        (rules.judge_files(1024, 65536, 4096), "ok", "65536 open files (soft limit 1024)"),
        (rules.judge_files(1024, -1, 4096), "ok", "no limit open files (soft limit 1024)"),
        (rules.judge_files(256, 256, 4096), "bad", "256 open files are allowed, fewer than 4096"),
        (rules.judge_clock(True), "ok", "synchronised"),
        (rules.judge_clock(False), "unknown", "nothing on this machine says that its clock is synchronised"),
        (rules.judge_clock(None), "unknown", "the kernel does not tell whether its clock is synchronised"),
        (rules.judge_command("/opt/check.sh -v", 0, ""), "ok", "exit code 0"),
        (rules.judge_command("/opt/check.sh -v", 3, "looking\n\x1b[31mlink down \n\n"), "bad", "?[31mlink down (exit code 3)"),
        (rules.judge_command("/opt/check.sh -v", None, "looking"), "bad", "looking (no answer within 30 s)"),
    ],
)
def test_what_is_found_is_told_with_its_numbers(found: Finding, state: str, what: str) -> None:
    assert (found.state, found.what) == (state, what)
    assert found.advice or state != "bad"


# --- fitness ---------------------------------------------------------------------------------------------------------------

GOOD, BAD, DARK = Finding("disk", "ok", "x"), Finding("gpu", "bad", "lost"), Finding("clock", "unknown", "y")


def test_only_what_is_bad_makes_a_machine_unfit() -> None:
    """P29"""
    assert rules.reason([GOOD, DARK]) == ""
    assert rules.reason([GOOD, BAD, Finding("shm", "bad", "full")]) == "gpu: lost; shm: full"
    assert len(rules.reason([Finding("x", "bad", "long" * 1000)])) == rules.REASON_CHARS_MAX


def test_an_unfit_machine_is_looked_at_again_with_growing_pauses_and_let_in_when_it_passes() -> None:
    """P29"""
    fitness, pauses = Fitness(), []
    assert rules.is_due(fitness, 0.0)
    assert fitness.told == rules.STILL_RUNNING
    now = 0.0
    for _ in range(9):
        fitness = rules.finished(rules.started(fitness), [BAD], now)
        assert fitness.told == "gpu: lost"
        assert not rules.is_due(fitness, now)
        pauses.append((rules.next_look_at(fitness) or 0.0) - now)
        now = rules.next_look_at(fitness) or 0.0
        assert rules.is_due(fitness, now)
        assert rules.started(fitness).told == "gpu: lost"  # while it is looked at again, it is not said to be better
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]
    fitness = rules.finished(rules.started(fitness), [GOOD, DARK], now)
    assert (fitness, fitness.told, rules.next_look_at(fitness)) == (Fitness("fit"), "", None)
    assert not rules.is_due(fitness, 1e9)
    assert rules.is_due(rules.suspected(fitness), now)
    assert rules.suspected(rules.started(Fitness())).phase == "running"
