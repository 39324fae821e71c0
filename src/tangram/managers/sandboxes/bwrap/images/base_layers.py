"""Base layers: small layers that are generated rather than unpacked.

Owns the layer around the machine's own /usr for the image `host`, and the top layer that each image needs for a
sandbox. Never copies files that an unprivileged user of this machine may not read, or files known to contain secrets.
Promises that equal layers have equal digests."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tangram.errors import ManagerError
from tangram.managers.work import WORKSPACE

ETC = Path("/etc")
LINKS_INTO_USR = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")

FROM_ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone", "locale.alias"),
    *("ssl", "ca-certificates", "ca-certificates.conf", "pki/ca-trust", "pki/java", "pki/tls/certs", "crypto-policies"),
    *(
        "os-release",
        "debian_version",
        "lsb-release",
        "mtab",
        "mime.types",
        "magic",
        "magic.mime",
        "inputrc",
        "terminfo",
    ),
    *("host.conf", "gai.conf", "services", "protocols", "rpc", "ethertypes", "networks", "netconfig", "shells"),
    *(
        "python3*",
        "perl",
        "java*",
        "R",
        "maven/m2.conf",
        "maven/logging",
        "fonts",
        "texmf",
        "ImageMagick-*",
        "ghostscript",
        "glvnd",
        "groff",
    ),
)
"""Files of /etc that programs in /usr read. Excludes settings of package managers, shells and version control: they may
contain passwords in addresses, and the environment of this machine does not apply to a sandbox."""
SECRET_NAMES = ("private", "Renviron.site", "Rprofile.site")
SECRET_SUFFIXES = (".key", "-key.pem")
"""Names and suffixes of files that are excluded even if all users may read them."""
FILE_BYTES_MAX = 16 << 20
"""Size limit of one file of /etc."""

HOSTS = b"127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n"
NSSWITCH = b"passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n"


class Node(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a layer: a directory, unless it has a content or a target."""

    path: str
    mode: int = 0o755
    content: bytes | None = None
    target: str | None = None


class ImageContents(msgspec.Struct, frozen=True):
    """What an image contains, as layers.py reports it."""

    has_bash: bool
    kinds: dict[str, str]
    texts: dict[str, str | None]


# ---- contents -------------------------------------------------------------------------------------------------------


def host_base_layer(user: int, etc: Path = ETC) -> list[Node]:
    """The layer around the machine's own /usr, which the sandbox binds."""
    if not os.path.islink("/bin") or not os.path.exists("/usr/bin/sh"):
        raise ManagerError(
            "image 'host' needs a machine whose /bin is a link into /usr; add a tar or a directory as an image",
            retry=False,
        )
    links = [
        Node(name, 0o777, target=f"usr/{name}")
        for name in LINKS_INTO_USR
        if os.path.islink(f"/{name}") and os.readlink(f"/{name}").lstrip("/") == f"usr/{name}"
    ]
    nodes = [
        Node("usr"),
        *_mount_points(),
        Node("etc"),
        *_home(),
        *_var_tmp(),
        Node("etc/passwd", 0o644, _ROOT + _passwd_line(user) + _NOBODY),
        Node("etc/group", 0o644, _ROOT_GROUP + _group_line(user) + b"nogroup:x:65534:\n"),
        Node("etc/hosts", 0o644, HOSTS),
        Node("etc/hostname", 0o644, b"sandbox\n"),
        Node("etc/nsswitch.conf", 0o644, NSSWITCH),
        *_resolver(etc),
    ]
    return [*links, *nodes, *_from_etc(etc)]


def path_prefixes(path: str) -> list[str]:
    """An absolute path and the directories above it, from the top."""
    parts = path.strip("/").split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1) if parts[0]]


def image_base_layer(contents: ImageContents, user: int, cwd: str) -> list[Node]:
    """The layer on top of an image: the places where a sandbox mounts and writes, where its commands start, its user,
    and network configuration. Nothing is put below a link, because the link would be hidden by it."""
    nodes = [*_mount_points(), *_homes(contents), *_etc(contents, user)]
    prefixes = path_prefixes(cwd)
    if prefixes and not contents.kinds[prefixes[-1]] and "other" not in map(contents.kinds.get, prefixes):
        existing = {node.path for node in nodes}
        nodes += [Node(path) for path in prefixes if path not in existing]
    return nodes


def _homes(contents: ImageContents) -> list[Node]:
    nodes: list[Node] = []
    if contents.kinds["home"] != "other":
        nodes += _home()
    if contents.kinds["var"] != "other":
        nodes += _var_tmp()
    return nodes


def _etc(contents: ImageContents, user: int) -> list[Node]:
    if contents.kinds["etc"] == "other":
        return []
    nodes = [Node("etc")]
    for name, root, line in (
        ("etc/passwd", _ROOT, _passwd_line(user)),
        ("etc/group", _ROOT_GROUP, _group_line(user)),
    ):
        known = (contents.texts[name] or "").encode(errors="surrogateescape") or root
        if not any(line.startswith(b"agent:") for line in known.split(b"\n")):
            nodes.append(Node(name, 0o644, known.rstrip(b"\n") + b"\n" + line))
    if not contents.texts["etc/hosts"]:
        nodes.append(Node("etc/hosts", 0o644, HOSTS))
    if not contents.texts["etc/resolv.conf"]:
        nodes += _resolver(ETC)
    return nodes


_ROOT = b"root:x:0:0:root:/root:/bin/sh\n"
_ROOT_GROUP = b"root:x:0:\n"
_NOBODY = b"nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"


def _passwd_line(user: int) -> bytes:
    return f"agent:x:{user}:{user}:agent:/home/agent:/bin/sh\n".encode()


def _group_line(user: int) -> bytes:
    return f"agent:x:{user}:\n".encode()


def _mount_points() -> list[Node]:
    folders = [Node(name) for name in ("proc", "sys", "dev", "run", WORKSPACE.lstrip("/"))]
    return [*folders, Node("tmp", 0o1777), Node("root", 0o700)]


def _home() -> list[Node]:
    return [Node("home"), Node("home/agent")]


def _var_tmp() -> list[Node]:
    return [Node("var"), Node("var/tmp", 0o1777)]


def _resolver(etc: Path) -> list[Node]:
    """The resolver of the machine, if its network is used. Often a link to a path that a sandbox does not have."""
    content = _public_content(etc / "resolv.conf")
    return [] if content is None else [Node("etc/resolv.conf", 0o644, content)]


def _from_etc(etc: Path) -> Iterator[Node]:
    parents: dict[str, None] = {}
    for pattern in FROM_ETC:
        for path in sorted(etc.glob(pattern)):
            for parent in list(path.relative_to(etc).parents)[-2::-1]:
                if str(parent) not in parents:
                    parents[str(parent)] = None
                    yield Node(f"etc/{parent}")
            yield from _copy(path, f"etc/{path.relative_to(etc)}")


def _copy(path: Path, name: str) -> Iterator[Node]:
    if path.name in SECRET_NAMES or path.name.endswith(SECRET_SUFFIXES):
        return
    try:
        name.encode()
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            yield from _copy_link(path, name)
        elif stat.S_ISDIR(mode) and mode & 0o005 == 0o005:
            yield Node(name)
            for inner in sorted(path.iterdir()):
                yield from _copy(inner, f"{name}/{inner.name}")
        elif stat.S_ISREG(mode):
            content = _public_content(path)
            if content is not None:
                yield Node(name, mode & 0o755, content)
    except (FileNotFoundError, UnicodeEncodeError):
        return  # deleted meanwhile, or a name that no program uses


def _copy_link(path: Path, name: str) -> Iterator[Node]:
    """The link itself if a sandbox has its target, else the file that it leads to."""
    target = os.readlink(path)
    target.encode()
    leads_to = os.path.normpath(path.parent / target)
    if leads_to.startswith(("/usr/", "/proc/", "/etc/")):
        yield Node(name, 0o777, target=target)
    else:
        content = _public_content(path)
        if content is not None:
            yield Node(name, 0o644, content)


def _public_content(path: Path) -> bytes | None:
    """None unless it is a file that all users may read and reach."""
    try:
        real = path.resolve(strict=True)
        if not all(parent.stat().st_mode & 0o001 for parent in real.parents) or not real.is_file():
            return None
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError):
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not status.st_mode & 0o004 or status.st_size > FILE_BYTES_MAX:
            return None
        return file.read(FILE_BYTES_MAX)


# ---- writing --------------------------------------------------------------------------------------------------------


def digest(nodes: list[Node]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(nodes)).hexdigest()


def write(nodes: list[Node], folder: Path, user: int) -> None:
    """Write the entries into an empty directory. Parents come before what is in them."""
    for node in nodes:
        path = folder / node.path
        if node.target is not None:
            os.symlink(node.target, path)
        elif node.content is not None:
            path.write_bytes(node.content)
        else:
            path.mkdir()
        os.lchown(path, user, user)
        if node.target is None:
            os.chmod(path, node.mode)
    os.chmod(folder, 0o755)
    os.chown(folder, user, user)
