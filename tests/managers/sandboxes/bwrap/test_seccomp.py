"""The filter of system calls: what it refuses, seen for real, and what still works under it.

Refused calls are made with arguments that no kernel takes (-1 everywhere), so that nothing happens even where the
filter fails. What this machine cannot do for real (another architecture) is tried on an interpreter of the filter.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tangram.errors import ManagerError
from tangram.managers.sandboxes.bwrap.seccomp import (
    AARCH64,
    ALLOW,
    CHECKED,
    I386,
    KILL,
    NEWEST_SYSCALL,
    NO_SUCH_CALL,
    NO_SUCH_FAMILY,
    NOT_PERMITTED,
    REFUSED,
    UNKNOWN,
    VERDICTS,
    X86_64,
    filter_program,
)

MACHINE = os.uname().machine
COLUMNS = {X86_64: 0, I386: 1, AARCH64: 2}
NATIVE = 0 if MACHINE == "x86_64" else 2
ALL_ONES = [-1] * 6

UNDER_FILTER = """
import ctypes, json, mmap, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)

def install(code):
    body = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(body)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no_new_privs"
    assert libc.prctl(22, 2, head, 0, 0) == 0, os.strerror(ctypes.get_errno())

def native(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(word) for word in arguments))
    return ctypes.get_errno() if result == -1 else 0

# eax, ebx, ecx, edx from the arguments of a C function, then int 0x80.
CODE = bytes.fromhex("53 89f8 89f3 87ca cd80 5b c3")

def i386(number, *arguments):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(CODE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    words = (list(arguments) + [0, 0, 0])[:3]
    result = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int] * 4)(at)(number, *words)
    return -result if -4096 < result < 0 else 0

code = bytes.fromhex(sys.argv[1])
if sys.argv[2] == "exec":
    install(code)
    os.execvp(sys.argv[3], sys.argv[3:])
way = {"native": native, "i386": i386}[sys.argv[2]]
calls = json.loads(sys.stdin.read())
if code:
    install(code)
print(json.dumps([way(*call) for call in calls]))
"""


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", UNDER_FILTER, *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def errnos(calls: list[list[int]], *, way: str = "native", code: bytes | None = None) -> list[int]:
    """What each call says under the filter; 0: it succeeded."""
    code = filter_program() if code is None else code
    done = run(code.hex(), way, stdin=json.dumps(calls))
    assert done.returncode == 0, done.stderr
    codes: list[int] = json.loads(done.stdout)
    return codes


def numbers(names: dict[str, tuple[int, int, int]], column: int = NATIVE) -> dict[str, int]:
    return {name: found[column] for name, found in names.items() if found[column] >= 0}


# ---- for real -----------------------------------------------------------------------------------------------------


def test_refused_calls_are_not_permitted() -> None:
    calls = numbers(REFUSED)
    codes = errnos([[number, *ALL_ONES] for number in calls.values()])
    assert dict(zip(calls, codes, strict=True)) == dict.fromkeys(calls, errno.EPERM)


POWERS = {
    "dac_read_search": 2,
    "module": 16,
    "rawio": 17,
    "chroot": 18,
    "pacct": 20,
    "admin": 21,
    "boot": 22,
    "time": 25,
}
"""The capabilities that the kernel checks in refused calls, by their bits."""


def all_powerful() -> bool:
    """Whether EPERM can come from our filter alone."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["CapEff"], 16)
    return all(held >> bit & 1 for bit in POWERS.values()) and status["Seccomp"].strip() == "0"


@pytest.mark.skipif(not all_powerful(), reason="without all privileges the kernel itself says EPERM")
def test_without_the_filter_the_same_calls_fail_for_other_reasons() -> None:
    calls = numbers(REFUSED)
    codes = dict(zip(calls, errnos([[number, *ALL_ONES] for number in calls.values()], code=b""), strict=True))
    assert [name for name, code in codes.items() if code == errno.EPERM] == []


def test_calls_that_programs_can_do_without_are_unknown() -> None:
    calls = [*numbers(UNKNOWN).values(), NEWEST_SYSCALL + 1, 1000, 0x40000000 | 39]
    assert errnos([[number, *ALL_ONES] for number in calls]) == [errno.ENOSYS] * len(calls)


CLONE_FILES, CLONE_NEWTIME = 0x400, 0x80
NAMESPACE_FLAGS = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]


def test_no_namespace_can_be_made() -> None:
    calls = numbers(CHECKED)
    made = [[calls["unshare"], flag] for flag in (*NAMESPACE_FLAGS, CLONE_NEWTIME, CLONE_FILES | 0x10000000)]
    made += [[calls["clone"], flag | signal.SIGCHLD, 0, 0, 0, 0] for flag in NAMESPACE_FLAGS]
    assert errnos(made) == [errno.EPERM] * len(made)
    assert errnos([[calls["unshare"], CLONE_FILES]]) == [0]


@pytest.mark.parametrize(
    ("family", "protocol", "expected"),
    [
        (1, 0, 0),  # AF_UNIX
        (2, 0, 0),  # AF_INET
        (16, 0, 0),  # AF_NETLINK, NETLINK_ROUTE
        (16, 9, errno.EAFNOSUPPORT),  # NETLINK_AUDIT
        (16, 12, errno.EAFNOSUPPORT),  # NETLINK_NETFILTER
        (17, 0, errno.EAFNOSUPPORT),  # AF_PACKET
        (38, 0, errno.EAFNOSUPPORT),  # AF_ALG
        (40, 0, errno.EAFNOSUPPORT),  # AF_VSOCK
        ((1 << 32) | 40, 0, errno.EAFNOSUPPORT),  # ... with bits that the kernel drops
        (16, (1 << 32) | 9, errno.EAFNOSUPPORT),
    ],
)
def test_sockets_are_of_the_usual_families(family: int, protocol: int, expected: int) -> None:
    datagram = 2
    assert errnos([[CHECKED["socket"][NATIVE], family, datagram, protocol]]) == [expected]


def test_no_program_can_inject_input_into_the_terminal_of_another() -> None:
    ioctl, nowhere = CHECKED["ioctl"][NATIVE], -1
    requests = [0x5412, 0x541C, (1 << 32) | 0x5412, 0x5413]
    assert errnos([[ioctl, nowhere, request, 0] for request in requests]) == [errno.EPERM] * 3 + [errno.EBADF]


def test_a_personality_is_the_usual_one_or_that_of_a_debugger() -> None:
    personality = CHECKED["personality"][NATIVE]
    values = [0x0008, 0x400000, 0x80000000, 0x40008, (1 << 32) | 8, 0xFFFFFFFF, 0x40000, 0]
    assert errnos([[personality, value] for value in values]) == [errno.EPERM] * 5 + [0] * 3


def test_a_program_of_another_architecture_is_killed() -> None:
    foreign = "aarch64" if MACHINE == "x86_64" else "x86_64"
    assert run(filter_program(foreign).hex(), "native", stdin="[]").returncode == -signal.SIGSYS


def test_a_64_bit_program_gains_nothing_by_32_bit_calls() -> None:
    getpid = 20
    if MACHINE != "x86_64" or run("", "i386", stdin=json.dumps([[getpid]])).stdout.strip() != "[0]":
        pytest.skip("this kernel has no 32-bit calls")
    refused, unknown = numbers(REFUSED, 1), numbers(UNKNOWN, 1)
    codes = errnos([[number, -1, -1, -1] for number in refused.values()], way="i386")
    assert dict(zip(refused, codes, strict=True)) == dict.fromkeys(refused, errno.EPERM)
    assert errnos([[number, -1, -1, -1] for number in unknown.values()], way="i386") == [errno.ENOSYS] * len(unknown)
    checked = numbers(CHECKED, 1)
    assert errnos(
        [
            [checked["unshare"], 0x10000000],
            [checked["clone"], 0x10000000 | signal.SIGCHLD],
            [checked["personality"], 8],
            [checked["ioctl"], -1, 0x5412],
            [checked["socket"], 40, 2, 0],
            [checked["socketcall"], 1, -1],
            [checked["socketcall"], 8, -1],
            [checked["socket"], 1, 2, 0],
            [getpid],
        ],
        way="i386",
    ) == [errno.EPERM] * 4 + [errno.EAFNOSUPPORT] * 3 + [0, 0]


# ---- ordinary programs under it -----------------------------------------------------------------------------------


def under_filter(*words: str) -> str:
    if shutil.which(words[0]) is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{words[0]} is not installed")
        pytest.skip(f"needs {words[0]}")
    done = run(filter_program().hex(), "exec", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pipelines_of_a_shell_work() -> None:
    script = (
        "seq 1 1000 | sort -rn | tee >(wc -l >&2) | head -3 | paste -sd+ | tr -d '\\n'; (sleep 0 & wait); echo ' ok'"
    )
    assert under_filter("bash", "-c", script) == "1000+999+998 ok\n"


PYTHON = """
import asyncio, ctypes, multiprocessing, os, socket, threading

def square(n):
    return n * n

async def main():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    said, _ = await process.communicate(b"hello")
    server = await asyncio.start_server(lambda r, w: (w.write(b"served"), w.close()), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    got = await reader.read()
    writer.close()
    server.close()
    return said + got

if __name__ == "__main__":
    found = []
    threads = [threading.Thread(target=found.append, args=(n,)) for n in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found += pool.map(square, range(4))
    socket.getaddrinfo("127.0.0.1", 80)
    child = os.fork()
    if child == 0:
        PTRACE_TRACEME = 0
        os._exit(ctypes.CDLL(None).ptrace(PTRACE_TRACEME, 0, 0, 0) & 255)
    traced = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(sorted(found), asyncio.run(main()).decode(), traced)
"""


def test_python_with_threads_processes_and_sockets_works(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PYTHON)
    expected = f"{sorted([*range(8), *(n * n for n in range(4)), *(n * n for n in range(4))])} helloserved 0\n"
    assert under_filter(sys.executable, str(script)) == expected


def test_a_compiler_works_and_so_does_what_it_makes(tmp_path: Path) -> None:
    source, program = tmp_path / "a.c", tmp_path / "a"
    source.write_text('#include <stdio.h>\nint main(void) { puts("compiled"); return 0; }\n')
    under_filter("gcc", "-O1", "-o", str(program), str(source))
    assert under_filter(str(program)) == "compiled\n"


def test_git_works(tmp_path: Path) -> None:
    script = (
        f"cd {tmp_path} && export HOME=$PWD GIT_CONFIG_NOSYSTEM=1 && git init -q . && echo a > f && git add f && "
        "git -c user.name=n -c user.email=e@x commit -qm first && git clone -q . copy && git -C copy log --format=%s"
    )
    shutil.which("git") or under_filter("git")
    assert under_filter("bash", "-c", script) == "first\n"


# ---- on an interpreter --------------------------------------------------------------------------------------------


def verdict(code: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> tuple[int, int]:
    """What the filter returns, and after how many instructions."""
    fields = (*arguments, *[0] * (6 - len(arguments)))
    record = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *fields)
    at, held, steps = 0, 0, 0
    while True:
        operation, then, otherwise, value = struct.unpack_from("=HBBI", code, 8 * at)
        at, steps = at + 1, steps + 1
        if operation == 0x20:
            held = struct.unpack_from("=I", record, value)[0]
        elif operation == 0x06:
            return value, steps
        elif operation == 0x05:
            at += value
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[operation]
            at += then if holds else otherwise


each_way = pytest.mark.parametrize(("machine", "way"), [("x86_64", X86_64), ("x86_64", I386), ("aarch64", AARCH64)])


@each_way
def test_every_number_is_allowed_but_for_the_listed(machine: str, way: int) -> None:
    code, column = filter_program(machine), COLUMNS[way]
    refused, unknown = set(numbers(REFUSED, column).values()), set(numbers(UNKNOWN, column).values())
    checked = numbers(CHECKED, column)
    harmless = {"clone": 0, "unshare": 0, "personality": 0, "ioctl": 0, "socket": 1, "socketpair": 1, "socketcall": 2}
    argument = {number: harmless[name] for name, number in checked.items()}
    for number in (*range(NEWEST_SYSCALL + 200), 0x40000000, 0x40000000 | 41, 0x7FFFFFFF, 0xFFFFFFFF):
        expected = (
            NO_SUCH_CALL
            if number in unknown or number > NEWEST_SYSCALL
            else NOT_PERMITTED
            if number in refused
            else ALLOW
        )
        assert verdict(code, way, number, (argument.get(number, 0),))[0] == VERDICTS[expected], number


@each_way
def test_arguments_decide_alike_on_every_architecture(machine: str, way: int) -> None:
    code, checked = filter_program(machine), numbers(CHECKED, COLUMNS[way])
    for name, arguments, expected in [
        ("clone", (0x10000000,), NOT_PERMITTED),
        ("clone", (0x80,), ALLOW),
        ("unshare", (0x80,), NOT_PERMITTED),
        ("personality", (0x20000,), NOT_PERMITTED),
        ("personality", (0x40000,), ALLOW),
        ("ioctl", (0, 0x5412), NOT_PERMITTED),
        ("ioctl", (0x5412, 0), ALLOW),
        ("socket", (10, 1, 6), ALLOW),
        ("socket", (16, 3, 0), ALLOW),
        ("socket", (16, 3, 15), NO_SUCH_FAMILY),
        ("socket", (30, 1, 0), NO_SUCH_FAMILY),
        ("socketpair", (30, 1, 0), NO_SUCH_FAMILY),
    ]:
        assert verdict(code, way, checked[name], arguments)[0] == VERDICTS[expected], (name, arguments)


def test_other_architectures_are_killed() -> None:
    arm = 0x40000028
    assert verdict(filter_program("aarch64"), arm, 0)[0] == VERDICTS[KILL]
    assert verdict(filter_program("aarch64"), X86_64, 0)[0] == VERDICTS[KILL]
    assert verdict(filter_program("x86_64"), AARCH64, 0)[0] == VERDICTS[KILL]


def test_a_machine_without_a_filter_reports_which_have_one() -> None:
    with pytest.raises(ManagerError, match=r"'riscv64', only for x86_64 or aarch64") as caught:
        filter_program("riscv64")
    assert not caught.value.retry


def test_common_calls_are_decided_after_few_instructions() -> None:
    common = {"read": 0, "write": 1, "close": 3, "mmap": 9, "futex": 202, "openat": 257, "newfstatat": 262, "wait4": 61}
    code = filter_program("x86_64")
    steps = {name: verdict(code, X86_64, number)[1] for name, number in common.items()}
    assert max(steps.values()) <= 12, steps
    every = [verdict(code, X86_64, number)[1] for number in range(NEWEST_SYSCALL + 1)]
    assert sum(every) / len(every) < 10


@each_way
def test_syscall_numbers_are_those_of_libseccomp(machine: str, way: int) -> None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        if os.environ.get("CI") == "true":
            pytest.fail("libseccomp2 is not installed")
        pytest.skip("needs libseccomp2")
    resolve: Any = library.seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    unknown_to_it = -1
    for name, found in {**REFUSED, **UNKNOWN, **CHECKED}.items():
        theirs = resolve(way, name.encode())
        if theirs == unknown_to_it or (way == I386 and name in ("socket", "socketpair")):
            continue  # newer than the library, or a call that it splits in two
        assert max(theirs, -1) == found[COLUMNS[way]], name
