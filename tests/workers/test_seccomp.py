"""The system-call filter, decided by a small interpreter of its instructions."""

import errno
import struct

import pytest

from weft.workers.seccomp import filter_program

X86, ARM = 0xC000003E, 0xC00000B7
ALLOWED, KILLED = "allowed", "killed"


def decide(machine: str, table: int, number: int, *arguments: int) -> str | int:
    """Return what happens to a call: an error number, or one of the words above."""
    words = {0: number, 4: table} | {16 + 8 * k: value for k, value in enumerate(arguments)}
    program = list(struct.iter_unpack("=HBBI", filter_program(machine)))
    loaded, at = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == 0x20:
            loaded = words.get(value, 0)
        elif code == 0x06:
            known = {0x7FFF0000: ALLOWED, 0x80000000: KILLED}
            return known[value] if value in known else value & 0xFFFF
        else:
            holds = {0x15: loaded == value, 0x25: loaded > value, 0x45: bool(loaded & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(
    ("call", "numbers", "arguments", "decision"),
    [
        ("read", (0, 63), (), ALLOWED),
        ("mount", (165, 40), (), errno.EPERM),
        ("ptrace", (101, 117), (), errno.EPERM),
        ("memfd_create", (319, 279), (), errno.EPERM),
        ("clone, as fork uses it", (56, 220), (0x1200011,), ALLOWED),
        ("clone with a user namespace", (56, 220), (0x10000011,), errno.EPERM),
        ("clone3", (435, 435), (), errno.ENOSYS),
        ("socket of the machine", (41, 198), (1, 1), ALLOWED),
        ("socket of the network", (41, 198), (2, 1), errno.EAFNOSUPPORT),
        ("socket of the hypervisor", (41, 198), (40, 1), errno.EAFNOSUPPORT),
        ("own limits", (302, 261), (0, 7), ALLOWED),
        ("limits of another process", (302, 261), (1, 7), errno.EPERM),
        ("own priority", (141, 140), (0, 0, 5), ALLOWED),
        ("priority of another process", (141, 140), (0, 1, 5), errno.EPERM),
        ("priority of a user", (141, 140), (2, 0, 5), errno.EPERM),
        ("a call of the future", (500, 500), (), errno.ENOSYS),
        ("a call of the x32 table", (0x40000000, 0x40000000), (), errno.ENOSYS),
    ],
)
def test_the_filter_refuses_what_programs_do_not_need(
    call: str, numbers: tuple[int, int], arguments: tuple[int, ...], decision: str | int
):
    assert decide("x86_64", X86, numbers[0], *arguments) == decision, call
    assert decide("aarch64", ARM, numbers[1], *arguments) == decision, call


def test_a_call_of_another_table_ends_the_program():
    assert decide("x86_64", 0x40000003, 5) == KILLED  # 32-bit x86
    assert decide("aarch64", X86, 0) == KILLED


def test_an_unknown_machine_has_no_filter():
    with pytest.raises(KeyError, match="riscv64"):
        filter_program("riscv64")
