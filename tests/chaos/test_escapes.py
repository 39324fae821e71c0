"""Ways out of a sandbox, all closed: to files, processes, networks and powers of the machine and of its neighbours."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import owner_name, read_proc_file, spawner, until, visible_pids

import tangram
from tangram.client.tree_archive import unpack_tree
from tangram.errors import FileFailed
from tangram.managers.sandboxes.bwrap.images.store import SANDBOX_UID

Play = Callable[..., Any]
PROJECT = Path(__file__).parents[2]
MIB = 1 << 20

USERS = pytest.mark.parametrize("user", ["agent", "root"])


async def run_probe(box: tangram.Sandbox, code: str, *words: str) -> Any:
    """What a Python program inside says, as JSON: `say(value)`."""
    head = "import ctypes, errno, json, os, socket, stat, sys\ndef say(value): print(json.dumps(value))\n"
    result = await box.exec(["python3", "-c", head + code, *words], timeout_s=50)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# ---- files ---------------------------------------------------------------------------------------------------------


@USERS
def test_files_of_the_machine_are_out_of_reach(play: Play, state: Path, tmp_path: Path, user: str) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the machine's")
    secret.chmod(0o644)
    paths = ["/etc/shadow", "/root/.bashrc", "/root/.pyenv", "/boot", "/var/log", "/sys/kernel", "/run/systemd"]
    paths += [str(PROJECT), str(state), str(secret), sys.prefix]
    ways = ["", "/proc/self/root", "/proc/1/root", "/work/../../..", "/proc/self/cwd/../.."]

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", user=user) as box:
            names = [way + path for way in ways for path in paths]
            visible = await run_probe(box, "say([name for name in sys.argv[1:] if os.path.exists(name)])", *names)
            assert visible == []
            for name in names:
                with pytest.raises(FileFailed):
                    await box.read(name)

    play(story)


SHARED_MEMORY = """
libc = ctypes.CDLL(None, use_errno=True)
say("got" if libc.shmget(4711, 100, int(sys.argv[1], 0)) >= 0 else errno.errorcode[ctypes.get_errno()])
"""


@USERS
def test_what_one_sandbox_changes_no_other_sees(play: Play, user: str) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", user=user) as box, t.sandbox(memory="64MiB") as open_before:
            usr = await box.exec(
                "touch /usr/evil || echo > /usr/bin/sh || rm -f /usr/bin/env || ln -f /usr/bin/env /work/env"
            )
            assert usr.exit_code == 1 and "Read-only file system" in usr.stderr
            (await box.exec("echo evil > /etc/hostname; rm /etc/passwd; mv /etc/ssl /etc/lss; echo x > /evil")).check()
            (await box.exec("echo x > /dev/shm/evil")).check()
            assert await run_probe(box, SHARED_MEMORY, "0o1666") == "got"
            async with t.sandbox(memory="64MiB", user=user) as opened_later:
                for other in (open_before, opened_later):
                    result = await other.exec("cat /etc/hostname; ls /evil /etc/lss /dev/shm/evil; ls -d /etc/passwd")
                    assert result.stdout == "sandbox\n/etc/passwd\n"
                    assert await run_probe(other, SHARED_MEMORY, "0") == "ENOENT"

    play(story)
    assert not os.path.exists("/usr/evil") and not os.path.exists("/evil")


def test_a_sandbox_cannot_change_its_image(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            await box.write("a", b"first")
            image = await box.commit()
        for _ in range(2):
            async with t.sandbox(memory="64MiB", image=image) as box:
                assert await box.read("a") == b"first"
                (await box.exec("echo changed > a; chmod 000 a; ln a b; truncate -s 1G c")).check()
        await t.forget(image)

    play(story)


@pytest.fixture
def root_directory(tmp_path: Path) -> Path:
    """A small root file system in which one program belongs to root and has its bits set."""
    root = tmp_path / "root"
    for name in ("usr/bin", "etc", "tmp"):
        (root / name).mkdir(parents=True)
    for link in ("bin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    for program in ("bash", "id", "cat", "ls"):
        path = shutil.which(program)
        assert path is not None
        shutil.copy(path, root / "usr/bin" / program)
        for word in subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout.split():
            if word.startswith("/"):
                place = root / "usr" / word.removeprefix("/usr").lstrip("/")
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, place)
    (root / "bin" / "sh").symlink_to("bash")
    (root / "usr/bin/id").chmod(0o6755)
    os.mknod(root / "sda", stat.S_IFBLK | 0o666, os.makedev(7, 0))
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    return root


@USERS
def test_setuid_programs_and_devices_of_an_image_have_no_power(play: Play, root_directory: Path, user: str) -> None:
    async def story(t: tangram.Client) -> None:
        image = await t.image(root_directory)
        async with t.sandbox(memory="64MiB", image=image, user=user) as box:
            assert (await box.exec("id -u; id -ru")).stdout == ("61999\n61999\n" if user == "agent" else "0\n0\n")
            result = await box.exec("cat /null; cat /sda")
            assert result.exit_code == 1 and result.stderr.count("Permission denied") == 2
            assert (await box.exec("ls /")).exit_code == 0

    play(story)


def test_programs_that_change_the_user_do_not(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            for command in ("su -c id", "mount -t tmpfs none /work", "passwd -d root", "chsh -s /bin/sh root"):
                result = await box.exec(command, timeout_s=30)
                assert result.exit_code != 0 and "uid=0" not in result.stdout, command
            uids = await run_probe(box, "say([os.getresuid(), os.getresgid(), os.getgroups()])")
            assert uids == [[SANDBOX_UID] * 3, [SANDBOX_UID] * 3, []]
            for call in ("os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.chown('/etc', 0, 0)"):
                result = await box.exec(["python3", "-c", f"import os; {call}"])
                assert "PermissionError" in result.stderr, call

    play(story)


# ---- powers --------------------------------------------------------------------------------------------------------

CALLS = """
libc = ctypes.CDLL(None, use_errno=True)
def attempt(number, *arguments):
    ctypes.set_errno(0)
    done = libc.syscall(ctypes.c_long(number), *[a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments])
    return errno.errorcode[ctypes.get_errno()] if done == -1 else "done"
"""
NUMBERS = {  # x86_64, aarch64
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "clone": (56, 220), "clone3": (435, 435), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "open_by_handle_at": (304, 265), "init_module": (175, 105), "reboot": (169, 142),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "fsopen": (430, 430), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "add_key": (248, 217), "syslog": (103, 116), "kexec_load": (246, 104),
    "sethostname": (170, 161), "settimeofday": (164, 170), "swapon": (167, 224), "personality": (135, 92),
    "quotactl": (179, 60), "acct": (163, 89), "prlimit64": (302, 261), "sched_setscheduler": (144, 119),
}  # fmt: skip
REFUSED = {"EPERM", "ENOSYS", "EACCES", "ESRCH"}


def number(name: str) -> int:
    return NUMBERS[name][0 if os.uname().machine == "x86_64" else 1]


@USERS
def test_calls_that_lead_out_of_a_sandbox_are_refused(play: Play, user: str) -> None:
    attempts = {
        "mount of a new file system": ("mount", "b'none', b'/work', b'tmpfs', 0, 0"),
        "mount of proc": ("mount", "b'proc', b'/work', b'proc', 0, 0"),
        "bind mount": ("mount", "b'/', b'/work', 0, 4096, 0"),
        "remount of /usr": ("mount", "0, b'/usr', 0, 32 | 4096, 0"),
        "umount": ("umount2", "b'/usr', 2"),
        "pivot_root": ("pivot_root", "b'/work', b'/work'"),
        "chroot": ("chroot", "b'/work'"),
        **{f"namespace {flag:x}": ("unshare", f"{flag}") for flag in (0x20000, 1 << 25, 1 << 26, 1 << 27, 1 << 28)},
        **{f"namespace {flag:x}": ("unshare", f"{flag}") for flag in (1 << 29, 1 << 30, 0x80)},
        "clone into a user namespace": ("clone", "0x10000000 | 17, 0, 0, 0, 0"),
        "clone3": ("clone3", "0, 0"),
        "setns": ("setns", "os.open('/proc/self/ns/mnt', os.O_RDONLY), 0"),
        "keyctl": ("keyctl", "0, -3, 0"),
        "add_key": ("add_key", "b'user', b'a', b'b', 1, -3"),
        "bpf": ("bpf", "0, 0, 0"),
        "perf_event_open": ("perf_event_open", "0, 0, -1, -1, 0"),
        "open_by_handle_at": (
            "open_by_handle_at",
            "os.open('/', os.O_RDONLY), b'\\x08\\0\\0\\0\\x01\\0\\0\\0' + b'\\0' * 8, 0",
        ),
        "init_module": ("init_module", "b'', 0, b''"),
        "reboot": ("reboot", "0xfee1dead, 672274793, 0, 0"),
        "kexec": ("kexec_load", "0, 0, 0, 0"),
        "userfaultfd": ("userfaultfd", "0"),
        "io_uring": ("io_uring_setup", "1, 0"),
        "fsopen": ("fsopen", "b'tmpfs', 0"),
        "syslog": ("syslog", "3, 0, 0"),
        "sethostname": ("sethostname", "b'evil', 4"),
        "settimeofday": ("settimeofday", "b'\\0' * 16, 0"),
        "swapon": ("swapon", "b'/work', 0"),
        "accounting": ("acct", "b'/work'"),
        "quota": ("quotactl", "0, b'/', 0, 0"),
        "another personality": ("personality", "0x0400000"),
        "a real-time schedule": ("sched_setscheduler", "0, 1, b'\\x01\\0\\0\\0'"),
        "a higher limit of open files": ("prlimit64", "0, 7, b'\\xff\\xff\\xff\\0\\0\\0\\0\\0' * 2, 0"),
    }

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", user=user) as box:
            lines = [f"{name!r}: attempt({number(call)}, {words})" for name, (call, words) in attempts.items()]
            result = await run_probe(box, CALLS + "say({" + ", ".join(lines) + "})")
            assert {name: code for name, code in result.items() if code not in REFUSED} == {}

    play(story)


@USERS
def test_no_device_can_be_made(play: Play, user: str) -> None:
    code = """
found = {}
for kind, major, minor in ((stat.S_IFBLK, 254, 0), (stat.S_IFBLK, 8, 0), (stat.S_IFCHR, 1, 1), (stat.S_IFCHR, 10, 200)):
    try:
        os.mknod("/work/device", kind | 0o666, os.makedev(major, minor)); found[major, minor] = "made"
    except OSError as error:
        pass
say([str(key) for key in found])
"""

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", user=user) as box:
            assert await run_probe(box, code) == []
            assert (await box.exec("ls /dev/mem /dev/kmsg /dev/kvm /dev/fuse /dev/vda /dev/net")).stdout == ""

    play(story)


def test_a_program_has_no_capability_and_can_get_none(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            status = (await box.exec("cat /proc/self/status")).stdout
            lines = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("Cap", "NoNew", "Sec")))
            for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                assert int(lines[kind], 16) == 0, kind
            assert lines["NoNewPrivs"] == "1" and lines["Seccomp"] == "2"

    play(story)


def test_root_inside_has_only_what_reaches_its_own_files_and_processes(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", user="root") as box:
            server = await box.start("sleep 4711", cpus=0.1)
            await until(lambda: visible_pids("4711"), "it runs")
            (outside,) = visible_pids("4711")
            uids = next(line for line in read_proc_file(outside, "status").splitlines() if line.startswith("Uid:"))
            assert uids.split()[1:] == [str(SANDBOX_UID)] * 4, "no user outside"
            await server.stop()
            status = (await box.exec("id -u; cat /proc/self/uid_map; grep CapEff /proc/self/status")).stdout.split()
            assert status[:4] == ["0", "0", str(SANDBOX_UID), "1"]
            powers = int(status[-1], 16)
            for name, bit in {
                "sys_admin": 21,
                "net_admin": 12,
                "sys_ptrace": 19,
                "sys_module": 16,
                "dac_read_search": 2,
            }.items():
                assert not powers & 1 << bit, name
            (await box.exec("chown 0:0 /etc/hostname && touch /root/a && mkdir /new")).check()

    play(story)


@USERS
def test_the_kernel_cannot_be_talked_to(play: Play, user: str) -> None:
    files = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/drop_caches"]
    files += ["/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/proc/sys/fs/binfmt_misc/register"]
    files += ["/sys/kernel/uevent_helper", "/sys/fs/cgroup/release_agent", "/proc/kcore", "/proc/kmem", "/dev/mem"]

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", user=user) as box:
            code = """
opened = []
for name in sys.argv[1:]:
    try:
        os.close(os.open(name, os.O_WRONLY)); opened.append(name)
    except OSError:
        pass
say([opened, os.listdir("/sys")])
"""
            assert await run_probe(box, code, *files) == [[], []]
            result = await box.exec("cat /proc/kcore /proc/kmsg /proc/1/stack /proc/keys | head -c 10")
            assert result.stdout == ""

    play(story)


def test_no_program_can_inject_input_into_a_terminal(play: Play) -> None:
    code = """
import fcntl, termios
main, side = os.openpty()
try:
    fcntl.ioctl(side, termios.TIOCSTI, b"x")
    say("typed")
except OSError as error:
    say(errno.errorcode[error.errno])
"""

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            assert await run_probe(box, code) == "EPERM"
            assert (await box.exec("cat < /dev/tty")).exit_code != 0

    play(story)


# ---- what a program is given ---------------------------------------------------------------------------------------


@USERS
def test_a_program_is_given_its_three_streams_and_nothing_else(play: Play, user: str) -> None:
    code = "say([fd for fd in range(1000) if os.path.exists(f'/proc/self/fd/{fd}')])"

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", user=user) as box:
            for _ in range(3):
                assert await run_probe(box, code) == [0, 1, 2]
            assert (await box.exec("ls /proc/self/fd", stdin="x")).stdout.split() == ["0", "1", "2", "3"]
            async with box.session() as session:
                for _ in range(2):
                    listing = await session.exec("ls /proc/self/fd")
                    assert listing.stdout.split() == ["0", "1", "2", "3"], "3 is the listing itself"

    play(story)


def test_nothing_of_the_owners_environment_comes_in(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", env={"GIVEN": "1"}) as box:
            names = (await box.exec("env")).stdout
            assert "GIVEN=1" in names and "SECRET" not in names and "hunter2" not in names
            everywhere = await box.exec("cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")
            assert "hunter2" not in everywhere.stdout
            await box.exec("ln -s /proc/self/environ innocent.txt")
            for path in ("/proc/self/environ", "innocent.txt"):
                with contextlib.suppress(FileFailed):
                    assert b"hunter2" not in await box.read(path)
        assert "hunter2" not in read_proc_file(spawner(), "environ"), (
            "the process that forks into sandboxes does not need it"
        )

    play(story)


def test_a_program_cannot_read_the_owner_of_its_sandbox(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            assert owner_name(state) not in (await box.exec("cat /proc/self/cgroup")).stdout
            assert (await box.exec("hostname; id -un")).stdout == "sandbox\nagent\n"

    play(story)


# ---- processes -----------------------------------------------------------------------------------------------------


@USERS
def test_processes_of_the_machine_and_of_other_sandboxes_are_invisible_and_out_of_reach(play: Play, user: str) -> None:
    code = """
own = {int(name) for name in os.listdir("/proc") if name.isdigit()}
hit = []
for pid in [*range(1, 70000), *map(int, sys.argv[1:])]:
    if pid in own:
        continue
    for reach in (lambda: os.kill(pid, 9), lambda: os.kill(-pid, 9), lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)):
        try:
            reach(); hit.append(pid)
        except OSError as error:
            if error.errno != errno.ESRCH: hit.append((pid, error.errno))
say([sorted(own), hit])
"""

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", user=user) as box, t.sandbox(memory="64MiB") as neighbour:
            server = await neighbour.start("sleep 4712", cpus=0.1)
            await until(lambda: visible_pids("4712"), "it runs")
            own, hit = await run_probe(box, code, *map(str, [os.getpid(), spawner(), *visible_pids("4712")]))
            assert hit == [] and len(own) <= 5
            assert visible_pids("4712"), "the neighbour's program lives"
            assert (await server.stop()).status is tangram.Status.CANCELLED

    play(story)


def test_the_first_process_and_the_waiting_runner_cannot_be_traced(play: Play) -> None:
    code = """
import time
deadline = time.monotonic() + 20
others = []
while len(others) < 2 and time.monotonic() < deadline:  # the runner for the next order comes a moment later
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
reached = []
for pid in others:
    for call in (16, 0x4206):
        if attempt(int(sys.argv[1]), call, pid, 0, 0) == "done": reached.append((pid, "ptrace", call))
    for name in ("mem", "environ", "maps", "fd", "root/", "cwd/", "exe", "fdinfo", "io", "ns/mnt", "map_files"):
        try:
            path = f"/proc/{pid}/{name}"
            os.listdir(path) if name in ("fd", "fdinfo", "root/", "cwd/", "map_files") else os.open(path, os.O_RDONLY)
            reached.append((pid, name))
        except OSError:
            pass
    for name in ("mem", "exe", "oom_score_adj", "comm", "clear_refs"):
        try:
            os.open(f"/proc/{pid}/{name}", os.O_RDWR); reached.append((pid, name))
        except OSError:
            pass
say([len(others), reached])
"""

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            others, reached = await run_probe(box, CALLS + code, str(number("ptrace")))
            assert others == 2, "the first process, and the runner that waits for the next order"
            assert reached == []

    play(story)


# ---- networks ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(*sockets: socket.socket) -> Iterator[list[str]]:
    """Sockets that accept; the list says which of them were reached."""
    reached: list[str] = []

    def accept(each: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                each.accept()[0].close()
                reached.append(str(each.family))

    threads = [threading.Thread(target=accept, args=(each,), daemon=True) for each in sockets]
    for each, thread in zip(sockets, threads, strict=True):
        each.listen()
        thread.start()
    try:
        yield reached
    finally:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in threads:
            thread.join(10)


CONNECT = """
said = []
own = [(2, ("127.0.0.1", int(sys.argv[1]))), (1, "\\0" + sys.argv[2])]
for family, address in (*own, (2, ("192.0.2.1", 80)), (2, ("198.51.100.1", 53))):
    with socket.socket(family) as each:
        each.settimeout(3)
        try:
            each.connect(address); said.append("connected")
        except OSError as error:
            said.append(errno.errorcode.get(error.errno, "timeout"))
say([said, [name for _, name in socket.if_nameindex()]])
"""


def test_no_network_is_reached_without_being_allowed(play: Play) -> None:
    tcp, abstract = socket.socket(), socket.socket(socket.AF_UNIX)
    tcp.bind(("127.0.0.1", 0))
    name = f"tangram-test-{os.getpid()}"
    abstract.bind(f"\0{name}")

    async def story(t: tangram.Client) -> None:
        words = (str(tcp.getsockname()[1]), name)
        with listening(tcp, abstract) as reached:
            for user in ("agent", "root"):
                async with t.sandbox(memory="64MiB", user=user) as box:
                    result, interfaces = await run_probe(box, CONNECT, *words)
                    assert result == ["ECONNREFUSED", "ECONNREFUSED", "ENETUNREACH", "ENETUNREACH"]
                    assert interfaces == ["lo"] and reached == []
            async with t.sandbox(memory="64MiB", network=True) as box:
                result, _ = await run_probe(box, CONNECT, *words)
                assert result[0] == "connected", "with a network it is the machine's"

    play(story)


def test_only_plain_sockets_can_be_made(play: Play) -> None:
    code = """
made = []
for family in range(1, 46):
    for kind in (1, 2, 3):
        for protocol in (0, 1, 15):
            try:
                socket.socket(family, kind, protocol).close(); made.append((family, kind, protocol))
            except OSError:
                pass
say(sorted({family for family, _, _ in made})); say
"""

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            assert set(await run_probe(box, code)) <= {
                socket.AF_UNIX,
                socket.AF_INET,
                socket.AF_INET6,
                socket.AF_NETLINK,
            }
            raw = "import socket\ntry: socket.socket(2, 3, 1); say('made')\nexcept PermissionError: say('refused')"
            assert await run_probe(box, raw) == "refused"

    play(story)


# ---- file work -----------------------------------------------------------------------------------------------------


def test_links_are_followed_inside_the_sandbox_alone(play: Play, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("the machine's")

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            links = {"etc": "/etc", "up": "../../../../..", "out": str(outside), "loop": "loop", "root": "/proc/1/root"}
            for name, target in links.items():
                (await box.exec(["ln", "-s", target, name])).check()
            assert await box.read("etc/hostname") == b"sandbox\n"
            assert await box.read("up/etc/hostname") == b"sandbox\n"
            assert await box.read("../../../../../../../etc/hostname") == b"sandbox\n"
            for path in ("out/a", "loop", "root/etc/hostname", "/proc/1/cwd/etc/hostname"):
                with pytest.raises(FileFailed):
                    await box.read(path)
            await box.write("etc/tangram-test-1", b"inside")
            await box.write("../../../../etc/tangram-test-2", b"inside")
            assert (await box.exec("cat /etc/tangram-test-*")).stdout == "insideinside"
            names = {entry.name: entry.kind for entry in await box.list()}
            assert names == dict.fromkeys(links, "link")
            assert "hostname" in [entry.name for entry in await box.list("etc")]
            await box.upload(__file__, "etc")
            assert (await box.exec(f"test -f /etc/{Path(__file__).name}")).exit_code == 0
            with pytest.raises(FileFailed):
                await box.upload(__file__, "out")  # a link to where nothing is
            for name in links:
                await box.delete(name)
            assert (await box.exec("cat /etc/hostname")).stdout == "sandbox\n", (
                "links are deleted, not what they lead to"
            )

    play(story)
    assert (outside / "a").read_text() == "the machine's" and len(list(outside.iterdir())) == 1
    assert not os.path.exists("/etc/tangram-test-1") and not os.path.exists("/etc/tangram-test-2")


def test_what_is_no_file_cannot_be_read(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            (
                await box.exec("mkfifo fifo; mkdir dir; ln -s /dev/zero zero; ln -s fifo link; ln -s nothing dangling")
            ).check()
            (await box.exec(["python3", "-c", "import socket; socket.socket(socket.AF_UNIX).bind('socket')"])).check()
            paths = [
                "fifo",
                "dir",
                "zero",
                "link",
                "dangling",
                "socket",
                "/dev/tty",
                "/dev/full",
                "/dev/stdin",
                "/dev/fd/3",
            ]
            for path in [*paths, "/proc/self/mem", "/proc/kmsg", "/proc/1/mem"]:
                with pytest.raises(FileFailed):
                    await box.read(path)
            for path in ("fifo", "zero", "link", "socket"):
                with pytest.raises(FileFailed):
                    await box.list(path)
            await box.write("fifo", b"now a file")
            assert await box.read("fifo") == b"now a file"
            await box.write("zero", b"now a file")
            assert (await box.exec("head -c 1 /dev/zero | od -An -c")).stdout.strip() == "\\0"

    play(story)


def test_file_work_runs_no_code_of_the_sandbox(play: Play, tmp_path: Path) -> None:
    """Names of users are looked up by libraries that nsswitch.conf names, and a module is imported from where the
    interpreter of this machine has them: inside, both are the sandbox's. Opening one of the pipes blocks."""
    stdlib = os.path.dirname(os.__file__)
    traps = f"""
import contextlib, os
with contextlib.suppress(OSError):  # below /usr nothing can be made, and nothing need be feared
    os.makedirs("{stdlib}")
    for name in {sorted(sys.stdlib_module_names)!r}:
        open(f"{stdlib}/{{name}}.py", "w").write("open('/work/owned', 'w')")
for name in ("nsswitch.conf", "passwd", "group", "ld.so.cache", "ld.so.preload", "localtime", "locale.alias"):
    with contextlib.suppress(OSError):
        os.unlink(f"/etc/{{name}}")
    os.mkfifo(f"/etc/{{name}}")
"""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("x")

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="128MiB", processes=64) as box:
            (await box.exec(["python3", "-c", traps])).check()
            await box.upload(tmp_path / "tree")
            await box.download("tree", tmp_path / "back")
            await box.write("b", b"x", mode=0o755)
            assert [entry.name for entry in await box.list()] == ["b", "tree"]
            with pytest.raises(FileFailed):
                await box.read("missing")
            await box.delete("tree")
            assert [entry.name for entry in await box.list()] == ["b"], "nothing was owned"
        assert (tmp_path / "back" / "tree" / "a").read_text() == "x"

    play(story)


# ---- trees that a sandbox made -------------------------------------------------------------------------------------

Member = tuple[str, bytes, str | bytes]


def crafted(*members: Member) -> io.BytesIO:
    """A tar of (name, type, content or where a link leads)."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as writer:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o6777
            if isinstance(content, bytes):
                member.size = len(content)
                writer.addfile(member, io.BytesIO(content))
            else:
                member.linkname = content
                writer.addfile(member)
    tar.seek(0)
    return tar


FILE, DIRECTORY, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE

LINKS_THAT_LEAD_OUT: dict[str, list[Member]] = {
    "at once": [("top/a", LINK, "../.."), ("top/b", LINK, "/etc"), ("top/c", LINK, "../outside/secret")],
    "through a link that leads up": [
        ("top/d/e/up", LINK, "../.."),
        ("top/out", LINK, "d/e/up/../outside"),
        ("top/out/made", LINK, "x"),
    ],
    "by standing where another link leads": [
        ("top/a/b/c/l", LINK, "../../.."),
        ("top/a/b/c/l/x", LINK, "../../../outside"),
        ("top/x/made", LINK, "y"),
    ],
    "by making directories through one": [
        ("top/a/b/c/l", LINK, "../../.."),
        ("top/a/b/c/l/x", LINK, "../../outside"),
        ("top/x/new/made", LINK, "y"),
        ("top/a/b/c/l/x/other/made", LINK, "y"),
    ],
    "as the top itself": [("top", LINK, "../outside"), ("top/made", FILE, b"x")],
    "the top as a link to the machine": [("top", LINK, "/etc")],
    "a file below a link": [("top/l", LINK, "../../outside"), ("top/l/made", FILE, b"x")],
    "a link over a directory": [("top/l/f", FILE, b"x"), ("top/l", LINK, "../../outside"), ("top/l/made", FILE, b"x")],
    "a hard link to the machine": [
        ("top/f", FILE, b"x"),
        ("top/h", HARD, "/etc/shadow"),
        ("top/i", HARD, "../outside/secret"),
    ],
    "in a circle": [("top/f", FILE, b"x"), ("top/a", LINK, "b"), ("top/b", LINK, "a"), ("top/c", LINK, "c/../c")],
    "a hard link to a link": [("top/l", LINK, "../../outside/secret"), ("top/h", HARD, "top/l")],
}


@pytest.mark.parametrize("how", LINKS_THAT_LEAD_OUT)
def test_a_tree_writes_nothing_outside_and_no_link_of_it_leads_there(tmp_path: Path, how: str) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    (outside / "secret").write_text("the machine's")
    before = {path: path.lstat() for path in outside.rglob("*")}
    with contextlib.suppress(FileFailed):
        unpack_tree(crafted(*LINKS_THAT_LEAD_OUT[how]), target)
    assert {path: path.lstat() for path in outside.rglob("*")} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "target"]
    for path in target.rglob("*"):
        real = os.path.realpath(path)  # of a circle: as far as it goes
        assert real.startswith(f"{target.resolve()}/"), f"{path} leads to {real}"
        if path.is_file():
            assert path.read_bytes() != b"the machine's"


@pytest.mark.parametrize(
    "name",
    ["/etc/evil", "../evil", "top/../../evil", "top/./../../evil", "..", ".", "", "top//x/../..", "top" + "/d" * 2000],
)
def test_a_tree_with_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileFailed):
        unpack_tree(crafted(("top/a", FILE, b"x"), (name, FILE, b"x")), tmp_path / "target")
    assert [path.name for path in tmp_path.rglob("*")] == ["target"], "it appears whole or not at all"


def test_a_tree_brings_no_devices_pipes_or_bits(tmp_path: Path) -> None:
    kinds = [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE]
    members: list[Member] = [(f"top/{number}", kind, b"") for number, kind in enumerate(kinds)]
    place = unpack_tree(crafted(("top/f", FILE, b"x"), *members), tmp_path / "target")
    for path in place.rglob("*"):
        assert stat.S_ISREG(path.lstat().st_mode) and not path.lstat().st_mode & 0o7022


def test_a_tree_of_hard_links_does_not_grow_beyond_what_came(tmp_path: Path) -> None:
    """A sandbox may link one file a million times; copies would fill the machine's disk."""
    many: list[Member] = [(f"top/{number}", HARD, "top/big") for number in range(200)]
    tar = crafted(("top/big", FILE, bytes(MIB)), *many)
    with contextlib.suppress(FileFailed):
        unpack_tree(tar, tmp_path / "target")
    used = sum(
        found.st_blocks * 512 for found in {path.stat().st_ino: path.stat() for path in tmp_path.rglob("*")}.values()
    )
    assert used < 20 * MIB


def test_a_tree_with_holes_does_not_grow_beyond_what_came(tmp_path: Path) -> None:
    member = tarfile.TarInfo("top")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "top"}
    member.pax_headers["GNU.sparse.realsize"] = str(1 << 28)
    map_ = b"1\n0\n1\n".ljust(512, b"\0")
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as writer:
        member.size = len(map_) + 1
        writer.addfile(member, io.BytesIO(map_ + b"x"))
    tar.seek(0)
    with pytest.raises(FileFailed, match="sparse file"):
        unpack_tree(tar, tmp_path / "target")


def test_a_tree_that_is_no_tar_or_is_cut_off_is_refused(tmp_path: Path) -> None:
    whole = crafted(("top/a", FILE, bytes(100_000)), ("top/b", FILE, b"x")).getvalue()
    bomb = io.BytesIO()
    with tarfile.open(fileobj=bomb, mode="w", format=tarfile.PAX_FORMAT) as writer:
        member = tarfile.TarInfo("top")
        member.pax_headers = {"comment": "x" * 100}
        writer.addfile(member)
    cases = [b"", b"x" * 10_000, whole[:60_000], whole[:300], bomb.getvalue()[:700], os.urandom(4096)]
    cases.append(whole[:124] + b"\x80" + b"\xff" * 11 + whole[136:])  # a size of all ones
    for content in cases:
        with pytest.raises(FileFailed):
            unpack_tree(io.BytesIO(content), tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []


def test_a_download_brings_what_a_hostile_sandbox_has_and_nothing_leads_out(play: Play, tmp_path: Path) -> None:
    make = """
mkdir -p tree/sub && cd tree
echo kept > sub/kept; mkfifo fifo; ln -s /etc/passwd absolute; ln -s ../../../etc/passwd up; ln -s sub/kept inside
ln -s sub/../../../tangram-outside tricky; ln sub/kept hard; chmod 6777 sub/kept
python3 - <<'END'
import os, socket
socket.socket(socket.AF_UNIX).bind("socket")
open(b"no-text-\\xff\\xfe", "w").close()
open("line\\nbreak", "w").close()
open("-rf", "w").close()
open("x" * 255, "w").close()
END
"""

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            (await box.exec(make)).check()
            place = await box.download("tree", tmp_path / "target")
            assert (
                (place / "sub/kept").read_text()
                == (place / "inside").read_text()
                == (place / "hard").read_text()
                == "kept\n"
            )
            names = {os.fsencode(path.name) for path in place.iterdir()}
            expected = {b"sub", b"inside", b"hard", b"no-text-\xff\xfe", b"line\nbreak", b"-rf", b"x" * 255}
            assert names == expected
            with pytest.raises(FileFailed, match="exists already"):
                await box.download("tree", tmp_path / "target")

    play(story)
