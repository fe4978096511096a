"""The filter of a sandbox, run by an interpreter of classic BPF, for both architectures."""

from __future__ import annotations

import errno
import struct

import pytest

from capsule_tasks.system.sandbox import seccomp, syscalls

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
OWN_PID = 4242


def answer(machine: str, number: int, *arguments: int, arch: int = 0, **asked: bool) -> int:
    program = seccomp._program(
        machine,
        asked.get("network", False),
        OWN_PID if asked.get("signals") else None,
        asked.get("truncation", False),
    )
    words = {0: number, 4: arch or MACHINES[machine][0]}
    words |= {16 + 8 * index: value for index, value in enumerate((*arguments, *[0] * 6)[:6])}
    accumulator = position = 0
    while True:
        code, true, false, value = struct.unpack_from("=HBBI", program, 8 * position)
        position += 1
        match code:
            case 0x20:
                accumulator = words[value]
            case 0x54:
                accumulator &= value
            case 0x15:
                position += true if accumulator == value else false
            case 0x35:
                position += true if accumulator >= value else false
            case 0x06:
                return int(value)


@pytest.mark.parametrize("machine", MACHINES)
def test_tables_are_answered_by_the_numbers_of_the_architecture(machine: str) -> None:
    column = MACHINES[machine][1]
    for table, expected in (
        (syscalls.ALWAYS | syscalls.NETWORK, ERRNO | errno.EPERM),
        (syscalls.WITHOUT_EFFECT, ERRNO),
        (syscalls.FOR_ITSELF, ALLOW),
        (syscalls.SIGNALS, ALLOW),
    ):
        for name, numbers in table.items():
            if numbers[column] is not None:
                assert answer(machine, numbers[column]) == expected, name
    for numbers in syscalls.FOR_ITSELF.values():
        assert answer(machine, numbers[column], 1) == ERRNO | errno.EPERM
    for numbers in syscalls.SIGNALS.values():
        assert answer(machine, numbers[column], OWN_PID, signals=True) == ALLOW
        assert answer(machine, numbers[column], 1, signals=True) == ERRNO | errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architecture_is_killed(machine: str) -> None:
    assert answer(machine, 0, arch=3) == KILL


def test_calls_that_only_x86_has_are_no_others_on_aarch64() -> None:
    x86_only = [n for table in (syscalls.ALWAYS, syscalls.WITHOUT_EFFECT) for n in table.values()]
    assert {x86 for x86, arm in x86_only if arm is None} == {
        *(172, 173, 154, 134, 92, 94, 253),
        *(90, 132, 235, 261),
    }
    getpid = 172
    assert answer("aarch64", getpid) == ALLOW


def test_a_file_is_truncated_only_by_opening_it_for_writing() -> None:
    o_trunc, o_wronly = 0x200, 1
    for machine, (_, column) in MACHINES.items():
        openat = syscalls.OPENAT[column]
        assert answer(machine, openat, 0, 0, o_trunc, truncation=True) == ERRNO | errno.EPERM
        assert answer(machine, openat, 0, 0, o_trunc | o_wronly, truncation=True) == ALLOW
    assert answer("x86_64", 2, 0, o_trunc, truncation=True) == ERRNO | errno.EPERM
    assert answer("x86_64", 0x40000002) == ERRNO | errno.EPERM  # the x32 form of `open`
