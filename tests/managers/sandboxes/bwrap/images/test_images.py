"""Images: archives of every format become layers that an overlay mounts, and hostile ones touch nothing else."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tangram.errors import AdmissionRefused, InvalidAction, InvalidConfig, ManagerError
from tangram.files.tree_removal import remove_tree
from tangram.managers.sandboxes.bwrap.images import base_layers, layer_worker
from tangram.managers.sandboxes.bwrap.images.archives import ARCHITECTURES
from tangram.managers.sandboxes.bwrap.images.layers import OPAQUE_XATTR
from tangram.managers.sandboxes.bwrap.images.store import LAYERS_MAX, SANDBOX_UID, ImageStore, StoredImage

if os.geteuid() != 0 and os.environ.get("CI") != "true":
    pytest.skip("layers belong to another user: needs root", allow_module_level=True)

T = TypeVar("T")
ARCHITECTURE = ARCHITECTURES[platform.machine()]
DEADLINE_S = 60.0


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store", free_bytes_min=0)


# ---- making archives ------------------------------------------------------------------------------------------------

Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **fields: Any) -> Member:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.size = len(content)
    entry.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for field, value in fields.items():
        setattr(entry, field, value)
    return entry, content


def file(name: str, content: bytes = b"", **fields: Any) -> Member:
    return member(name, tarfile.REGTYPE, content, **fields)


def folder(name: str, **fields: Any) -> Member:
    return member(name, tarfile.DIRTYPE, **fields)


def symlink(name: str, target: str) -> Member:
    return member(name, tarfile.SYMTYPE, linkname=target)


def hard_link(name: str, target: str) -> Member:
    return member(name, tarfile.LNKTYPE, linkname=target)


def tar_of(*members: Member) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry, content in members:
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def gzipped(content: bytes) -> bytes:
    """The same bytes at any time: a gzip header else holds the second in which it was written."""
    return gzip.compress(content, mtime=0)


def config_of(layers: list[bytes], **fields: Any) -> bytes:
    runs = {"Env": ["PATH=/opt/bin:/bin", "A=b=c"], "WorkingDir": "/app"}
    diff_ids = [f"sha256:{sha256(layer)}" for layer in layers]
    config = {"architecture": ARCHITECTURE, "os": "linux", "config": runs, "rootfs": {"diff_ids": diff_ids}}
    return json.dumps(config | fields).encode()


def saved(layers: list[bytes], **fields: Any) -> dict[str, bytes]:
    """The files of an old `docker save`."""
    config = config_of(layers, **fields)
    files = {f"{number}/layer.tar": layer for number, layer in enumerate(layers)}
    manifest = [{"Config": f"{sha256(config)}.json", "RepoTags": ["tools:1"], "Layers": list(files)}]
    return {f"{sha256(config)}.json": config, **files, "manifest.json": json.dumps(manifest).encode()}


def layout(layers: list[bytes], *, pack: Callable[[bytes], bytes] = bytes, **fields: Any) -> dict[str, bytes]:
    """The files of an OCI layout."""
    files: dict[str, bytes] = {}

    def blob(content: bytes) -> str:
        files[f"blobs/sha256/{sha256(content)}"] = content
        return f"sha256:{sha256(content)}"

    config = {"digest": blob(config_of(layers, **fields)), "mediaType": "application/vnd.oci.image.config.v1+json"}
    manifest = {"config": config, "layers": [{"digest": blob(pack(layer))} for layer in layers]}
    media_type = "application/vnd.oci.image.manifest.v1+json"
    descriptor = {
        "digest": blob(json.dumps(manifest).encode()),
        "mediaType": media_type,
        "annotations": {"org.opencontainers.image.ref.name": "tools:1"},
    }
    files["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [descriptor]}).encode()
    return files


def archive(path: Path, files: dict[str, bytes]) -> Path:
    path.write_bytes(tar_of(*(file(name, content) for name, content in files.items())))
    return path


def directory(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


FORMATS: dict[str, Callable[[Path, list[bytes]], Path]] = {
    "docker save": lambda path, layers: archive(path, saved(layers)),
    "docker save, new": lambda path, layers: archive(path, layout(layers) | saved(layers)),
    "OCI tar": lambda path, layers: archive(path, layout(layers)),
    "OCI tar, gzipped layers": lambda path, layers: archive(path, layout(layers, pack=gzipped)),
    "OCI directory": lambda path, layers: directory(path, layout(layers, pack=gzipped)),
}


# ---- looking at what came of them -----------------------------------------------------------------------------------


def mounted(image: StoredImage, command: str) -> str:
    """The output of a command in the root of a sandbox: the overlay of an image, in a mount namespace of its own."""
    script = """
        set -e
        at=$(mktemp -d); trap 'cd /; umount -R $at; rmdir $at' EXIT
        mount -t tmpfs tmpfs $at; mkdir $at/upper $at/work $at/root
        mount -t overlay overlay -o "lowerdir=$1,upperdir=$at/upper,workdir=$at/work" $at/root
        if [ "$2" = True ]; then mount --bind /usr $at/root/usr; fi
        cd $at/root; eval "$3"
    """
    words = ["unshare", "-m", "sh", "-c", script, "sh", ":".join(image.layers), str(image.binds_usr), command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_of(image: StoredImage) -> dict[str, str]:
    """Content by name of the regular files of an image, without those of the layer that fits it."""
    lines = mounted(image, r"find . -path ./etc -prune -o -type f -printf '%P=' -exec cat {} \; -printf '\n'")
    return dict(line.split("=", 1) for line in lines.splitlines())


def parts_of(store: ImageStore) -> list[Path]:
    return [path for path in store.root.rglob("*") if ".part-" in path.name]


def layers_of(store: ImageStore) -> set[str]:
    return {path.name for path in (store.root / "layers").iterdir()}


# ---- the image of the machine ---------------------------------------------------------------------------------------


def test_the_image_of_the_machine_runs_its_programs(store: ImageStore) -> None:
    host = store.get("host")
    assert (host.binds_usr, host.cwd, host.env) == (True, "/work", {})
    assert mounted(host, f"chroot . {host.shell} -c 'id -un; id -un {SANDBOX_UID}; cat /etc/hostname'").split() == [
        "root",
        "agent",
        "sandbox",
    ]
    assert mounted(host, "stat -c '%a %u' tmp var/tmp work home/agent proc dev").split("\n")[:3] == [
        f"1777 {SANDBOX_UID}",
        f"1777 {SANDBOX_UID}",
        f"755 {SANDBOX_UID}",
    ]
    assert "ld.so.cache" in os.listdir(f"{host.layers[0]}/etc")


def test_the_image_of_the_machine_is_made_once(store: ImageStore) -> None:
    host = store.get("host")
    made = os.stat(host.layers[0])
    again = ImageStore(store.root).get("host")
    assert again == host
    assert os.stat(host.layers[0]).st_ctime_ns == made.st_ctime_ns


def test_the_image_of_the_machine_holds_no_secrets(store: ImageStore, tmp_path: Path) -> None:
    names = [
        str(path.relative_to(store.get("host").layers[0])) for path in Path(store.get("host").layers[0]).rglob("*")
    ]
    assert not [name for name in names if "shadow" in name or "private" in name or "/ssh" in name]

    etc, outside = tmp_path / "etc", tmp_path / "closed"
    directory(etc, {"ssl/private/a.pem": b"x", "ssl/b.key": b"x", "ssl/c.pem": b"x", "ssl/d.pem": b"x", "shadow": b"x"})
    directory(outside, {"e.pem": b"x"})
    outside.chmod(0o700)
    (etc / "ssl/c.pem").chmod(0o640)
    (etc / "ssl/e.pem").symlink_to(outside / "e.pem")
    (etc / "ssl/f.pem").symlink_to("/usr/share/f.pem")
    # What leads to the directory of the test is closed to others, too: it is opened for the length of the look.
    closed = [parent for parent in etc.parents if not parent.stat().st_mode & 0o001]
    for parent in closed:
        parent.chmod(parent.stat().st_mode | 0o001)
    try:
        nodes = base_layers.host_base_layer(SANDBOX_UID, etc=etc)
    finally:
        for parent in closed:
            parent.chmod(parent.stat().st_mode & ~0o001)
    assert [node.path for node in nodes if node.path.startswith("etc/ssl/")] == ["etc/ssl/d.pem", "etc/ssl/f.pem"]


def test_an_unknown_image_is_refused_with_the_known_names(store: ImageStore, tmp_path: Path) -> None:
    run(store.add_tar(archive(tmp_path / "a.tar", saved([tar_of(file("a"))]))))
    with pytest.raises(InvalidAction) as refused:
        store.get("tools:2")
    assert refused.value.field == "sandbox.image"
    assert "one of 'host', 'tools:1'; did you mean 'tools:1'?" in str(refused.value)


# ---- archives -------------------------------------------------------------------------------------------------------

LOWER = tar_of(
    folder("app"),
    file("app/kept", b"lower"),
    file("app/removed", b"lower"),
    file("app/changed", b"lower"),
    folder("hidden"),
    file("hidden/old", b"lower"),
    folder("again"),
    file("again/old", b"lower"),
    folder("gone"),
    file("gone/old", b"lower"),
)
UPPER = tar_of(
    file("app/changed", b"upper"),
    file("app/.wh.removed"),
    folder("hidden"),
    file("hidden/new", b"upper"),
    file("hidden/.wh..wh..opq"),
    file(".wh.gone"),
    file(".wh.again"),
    folder("again"),
    file("again/new", b"upper"),
    file(".wh..wh.plnk"),
)
BOTH = {"app/kept": "lower", "app/changed": "upper", "hidden/new": "upper", "again/new": "upper"}


@pytest.mark.parametrize("form", FORMATS)
def test_archives_of_every_format_become_the_same_image(form: str, store: ImageStore, tmp_path: Path) -> None:
    image = run(store.add_tar(FORMATS[form](tmp_path / "image", [LOWER, UPPER])))
    assert image == store.get("tools:1")
    assert image.env == {"PATH": "/opt/bin:/bin", "A": "b=c"}
    assert (image.cwd, image.shell, image.binds_usr) == ("/app", "/bin/sh", False)
    assert files_of(image) == BOTH
    assert [os.path.basename(layer) for layer in image.layers[1:]] == [sha256(UPPER)[:32], sha256(LOWER)[:32]]
    assert not parts_of(store)


def test_a_working_directory_that_no_layer_has_is_made_unless_it_lies_below_a_link(
    store: ImageStore, tmp_path: Path
) -> None:
    for cwd, made in (
        ("/usr/src/deep", True),
        ("/link/deep", False),
        ("/app", False),
        ("/work", True),
        ("/home/agent/x", True),
    ):
        layer = tar_of(folder("app"), folder("usr"), symlink("link", "app"))
        config = {"config": {"WorkingDir": cwd}}
        image = run(store.add_tar(archive(tmp_path / "image", saved([layer], **config)), name="made:1"))
        assert image.cwd == cwd
        assert (Path(image.layers[0]) / cwd.lstrip("/")).is_dir() is made


def test_a_gzipped_archive_is_read_like_a_plain_one(store: ImageStore, tmp_path: Path) -> None:
    path = archive(tmp_path / "image.tar", saved([LOWER, UPPER]))
    packed = tmp_path / "image.tar.gz"
    packed.write_bytes(gzipped(path.read_bytes()))
    assert files_of(run(store.add_tar(packed))) == BOTH
    assert not parts_of(store)


def test_whiteouts_are_those_of_overlays(store: ImageStore, tmp_path: Path) -> None:
    image = run(store.add_tar(archive(tmp_path / "image", saved([LOWER, UPPER]))))
    upper = Path(image.layers[1])
    status = (upper / "app/removed").stat()
    assert stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
    assert status.st_uid == SANDBOX_UID
    assert os.getxattr(upper / "hidden", OPAQUE_XATTR) == b"y"
    assert not list(upper.rglob(".wh.*"))


def test_a_whiteout_that_is_a_device_of_a_tar_is_kept(store: ImageStore, tmp_path: Path) -> None:
    upper = tar_of(member("app/removed", tarfile.CHRTYPE, devmajor=0, devminor=0))
    image = run(store.add_tar(archive(tmp_path / "image", saved([LOWER, upper]))))
    assert "app/removed" not in files_of(image)


def test_equal_layers_that_an_archive_links_to_are_resolved(store: ImageStore, tmp_path: Path) -> None:
    files = saved([LOWER, UPPER, LOWER])
    members = [file(name, content) for name, content in files.items() if name != "2/layer.tar"]
    (tmp_path / "image").write_bytes(tar_of(*members, symlink("2/layer.tar", "../0/layer.tar")))
    image = run(store.add_tar(tmp_path / "image"))
    assert len(image.layers) == 3, "a layer that comes twice is mounted once, at its upper place"
    assert files_of(image)["app/changed"] == "lower"


def test_files_belong_to_the_user_of_sandboxes_and_carry_no_privilege(store: ImageStore, tmp_path: Path) -> None:
    layer = tar_of(
        folder(".", mode=0o700, uid=0),
        folder("sticky", mode=0o3777),
        folder("closed", mode=0o555, mtime=1_000_000),
        file("closed/tool", b"x", mode=0o6755, uid=0, gid=0, mtime=1_234_567),
        symlink("link", "/closed/tool"),
        member("disk", tarfile.BLKTYPE, devmajor=8, devminor=0),
        member("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("pipe", tarfile.FIFOTYPE),
    )
    image = run(store.add_tar(archive(tmp_path / "image", saved([layer]))))
    root = Path(image.layers[1])
    assert {path.lstat().st_uid for path in [root, *root.rglob("*")]} == {SANDBOX_UID}
    assert {path.lstat().st_gid for path in [root, *root.rglob("*")]} == {SANDBOX_UID}
    assert sorted(os.listdir(root)) == ["closed", "link", "sticky"]
    assert stat.S_IMODE((root / "closed/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "sticky").stat().st_mode) == 0o1777
    assert stat.S_IMODE((root / "closed").stat().st_mode) == 0o555
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    assert (root / "closed/tool").stat().st_mtime == 1_234_567
    assert (root / "closed").stat().st_mtime == 1_000_000


def test_hard_links_and_sparse_files_of_a_layer_work(store: ImageStore, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with open(sparse, "wb") as out:
        out.seek(1 << 20)
        out.write(b"end")
    subprocess.run(["tar", "-C", tmp_path, "-S", "-cf", tmp_path / "layer.tar", "sparse"], check=True)
    with tarfile.open(tmp_path / "layer.tar", "a") as tar:
        for entry, content in (file("a/first", b"same"), hard_link("b/second", "a/first")):
            tar.addfile(entry, io.BytesIO(content))
    layer = (tmp_path / "layer.tar").read_bytes()
    assert len(layer) < 1 << 20
    root = Path(run(store.add_tar(archive(tmp_path / "image", saved([layer])))).layers[1])
    assert (root / "b/second").samefile(root / "a/first")
    assert (root / "sparse").read_bytes() == sparse.read_bytes()


def test_the_shell_is_looked_up_inside_the_image(store: ImageStore, tmp_path: Path) -> None:
    links = tar_of(symlink("bin", "usr/bin"))
    shell = tar_of(file("usr/bin/bash", b"#!", mode=0o755))
    assert run(store.add_tar(archive(tmp_path / "a", saved([links, shell])), name="a")).shell == "/bin/bash"
    without_bash = tar_of(file("usr/bin/.wh.bash"))
    assert run(store.add_tar(archive(tmp_path / "b", saved([links, shell, without_bash])), name="b")).shell == "/bin/sh"
    outside = tar_of(symlink("bin/bash", "/usr/bin/bash"))
    assert run(store.add_tar(archive(tmp_path / "c", saved([outside])), name="c")).shell == "/bin/sh"


def test_a_second_time_does_no_work(store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "image", saved([LOWER, UPPER]))
    image = run(store.add_tar(path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert run(ImageStore(store.root).add_tar(path)) == image
    os.utime(path, (1, 1))
    with pytest.raises(ManagerError, match="could not be started"):
        run(store.add_tar(path))
    assert not parts_of(store)


def test_layers_are_shared_between_images(store: ImageStore, tmp_path: Path) -> None:
    one = run(store.add_tar(archive(tmp_path / "a", saved([LOWER])), name="one"))
    before = os.stat(one.layers[-1]).st_ctime_ns
    two = run(store.add_tar(archive(tmp_path / "b", layout([LOWER, UPPER], pack=gzipped)), name="two"))
    assert one.layers[-1] == two.layers[-1]
    assert os.stat(one.layers[-1]).st_ctime_ns == before


def test_two_callers_that_add_an_image_at_once_get_the_same(store: ImageStore, tmp_path: Path) -> None:
    path = archive(tmp_path / "image", saved([LOWER, UPPER]))

    async def both() -> list[StoredImage]:
        return list(await asyncio.gather(store.add_tar(path), ImageStore(store.root).add_tar(path)))

    first, second = run(both())
    assert first == second
    assert not parts_of(store)


def test_an_image_without_a_tag_is_called_by_its_path(store: ImageStore, tmp_path: Path) -> None:
    files = saved([LOWER])
    files["manifest.json"] = files["manifest.json"].replace(b'["tools:1"]', b"null")
    path = archive(tmp_path / "image", files)
    assert run(store.add_tar(path)) == store.get(str(path))


def test_a_tag_cannot_take_the_name_of_the_machine(store: ImageStore, tmp_path: Path) -> None:
    files = saved([LOWER])
    files["manifest.json"] = files["manifest.json"].replace(b"tools:1", b"host")
    with pytest.raises(InvalidAction, match="not 'host'"):
        run(store.add_tar(archive(tmp_path / "image", files)))


def of_several(other: str) -> dict[str, bytes]:
    """An image for this machine and one for another, below an index of their own, as build tools write them."""
    files: dict[str, bytes] = {}
    entries = []
    for architecture, layer in ((other, UPPER), (ARCHITECTURE, LOWER)):
        each = layout([layer], architecture=architecture)
        files |= each
        descriptor = json.loads(each["index.json"])["manifests"][0]
        entries.append(descriptor | {"platform": {"os": "linux", "architecture": architecture}})
    if other == ARCHITECTURE:
        entries.pop()
    inner = json.dumps({"manifests": entries}).encode()
    files[f"blobs/sha256/{sha256(inner)}"] = inner
    media_type = "application/vnd.oci.image.index.v1+json"
    outer = {"digest": f"sha256:{sha256(inner)}", "mediaType": media_type}
    return files | {"index.json": json.dumps({"manifests": [outer]}).encode()}


def test_the_manifest_of_this_machine_is_picked(store: ImageStore, tmp_path: Path) -> None:
    image = run(store.add_tar(archive(tmp_path / "image", of_several("vax"))))
    assert os.path.basename(image.layers[-1]) == sha256(LOWER)[:32]


def test_an_image_for_another_machine_is_refused(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=f"it is for linux/vax; this machine is linux/{ARCHITECTURE}"):
        run(store.add_tar(archive(tmp_path / "image", layout([LOWER], architecture="vax"))))
    files = of_several("vax")
    inner = json.loads(files["index.json"])["manifests"][0]["digest"].removeprefix("sha256:")
    only = json.dumps({"manifests": json.loads(files[f"blobs/sha256/{inner}"])["manifests"][:1]}).encode()
    files["index.json"] = only
    with pytest.raises(InvalidConfig, match=f"one image for linux/{ARCHITECTURE}, and holds: linux/vax"):
        run(store.add_tar(archive(tmp_path / "other", files)))


# ---- archives that are refused --------------------------------------------------------------------------------------


def changed(files: dict[str, bytes], name: str, content: bytes) -> dict[str, bytes]:
    assert name in files
    return files | {name: content}


GZIPPED = gzipped(LOWER)
LAYOUT = layout([LOWER])
MANIFEST = json.loads(LAYOUT["index.json"])["manifests"][0]["digest"].replace("sha256:", "blobs/sha256/")
WRONG = {
    "a layer that is not that of its digest": (
        changed(LAYOUT, f"blobs/sha256/{sha256(LOWER)}", tar_of(file("other"))),
        "the digest of its bytes should be",
    ),
    "a saved layer that is not that of the config": (
        changed(saved([LOWER]), "0/layer.tar", UPPER),
        "digest of its tar",
    ),
    "a manifest that is not that of its digest": (changed(LAYOUT, MANIFEST, LAYOUT[MANIFEST] + b" "), "the digest of"),
    "a config that is not that of its name": (
        {name: content + b" " * name.endswith(".json") for name, content in saved([LOWER]).items()},
        "the digest of",
    ),
    "a layer that ends early": (
        changed(layout([LOWER], pack=gzipped), f"blobs/sha256/{sha256(GZIPPED)}", GZIPPED[:-20]),
        "expected an image that can be unpacked",
    ),
    "zstd": (layout([LOWER], pack=lambda layer: b"\x28\xb5\x2f\xfd" + layer), "compressed with zstd; only gzip"),
    "a layer that is missing": (
        {name: content for name, content in LAYOUT.items() if sha256(LOWER) not in name},
        "is not in it",
    ),
    "no image at all": ({"a": b"b"}, "neither an index.json nor a manifest.json"),
    "no JSON": (changed(saved([LOWER]), "manifest.json", b"{"), "cannot be understood"),
    "JSON that is too deep": (changed(saved([LOWER]), "manifest.json", b"[" * 100_000), "cannot be understood"),
    "a digest that is a path": (
        changed(LAYOUT, "index.json", b'{"manifests": [{"digest": "sha256:../../../etc/passwd"}]}'),
        "is not a SHA-256 digest",
    ),
    "an environment that no program can have": (saved([LOWER], config={"Env": ["A=\0"]}), "its config is not usable"),
    "several images": (
        changed(saved([LOWER]), "manifest.json", b'[{"Config": "a", "Layers": []}, {"Config": "b", "Layers": []}]'),
        "it holds 2 images; save one at a time",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_archive_that_is_wrong_is_refused_and_leaves_nothing(what: str, store: ImageStore, tmp_path: Path) -> None:
    files, reason = WRONG[what]
    with pytest.raises(InvalidConfig, match=reason):
        run(store.add_tar(archive(tmp_path / "image", files)))
    assert store.names() == ["host"]
    assert layers_of(store) == set()


def test_what_is_no_archive_is_refused(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tar " * 1000)
    (tmp_path / "other.tar.xz").write_bytes(b"\xfd7zXZ\0")
    with pytest.raises(InvalidConfig, match="can be unpacked"):
        run(store.add_tar(tmp_path / "text"))
    with pytest.raises(InvalidConfig, match="compressed with xz"):
        run(store.add_tar(tmp_path / "other.tar.xz"))
    with pytest.raises(InvalidConfig, match=r"no index\.json in the directory"):
        run(store.add_tar(tmp_path))
    with pytest.raises(InvalidConfig, match="a path that exists"):
        run(store.add_tar(tmp_path / "missing"))
    assert layers_of(store) == set()


# ---- hostile layers -------------------------------------------------------------------------------------------------


def raw_header(name: str, size: bytes) -> bytes:
    """A header whose size field no writer would write."""
    block = bytearray(tarfile.TarInfo(name).tobuf())
    block[124:136] = size
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def sparse_giant() -> bytes:
    """A file of 4 EiB that consists of a hole and one byte."""
    entry = tarfile.TarInfo("giant")
    entry.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "giant",
        "GNU.sparse.realsize": str(1 << 62),
    }
    content = f"1\n{(1 << 62) - 1}\n1\n".encode().ljust(512, b"\0") + b"x"
    entry.size = len(content)
    return tar_of((entry, content))


def header_bomb() -> bytes:
    """A header of 512 MiB, gzipped. Members of a gzip file may follow one another, so it is quickly written."""
    header = bytearray(raw_header("x", b"\x80" + (1 << 29).to_bytes(11, "big")))
    header[156:157] = tarfile.XHDTYPE
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return gzip.compress(bytes(header)) + gzip.compress(bytes(16 << 20)) * 32


REFUSED = {
    "a name with ..": tar_of(file("../../../../../../canary", b"hostile")),
    "a name with .. in the middle": tar_of(folder("a"), file("a/../../../canary", b"hostile")),
    "a hard link to ..": tar_of(hard_link("stolen", "../../../../../../etc/passwd")),
    "a hard link to an absolute path": tar_of(hard_link("stolen", "/etc/passwd")),
    "a hard link through a link": tar_of(symlink("out", "/etc"), hard_link("stolen", "out/passwd")),
    "a hard link to a directory": tar_of(folder("a"), hard_link("b", "a")),
    "a hard link to what is not there": tar_of(hard_link("b", "a")),
    "a whiteout of ..": tar_of(file("a/.wh..."), file("a/b")),
    "a whiteout of nothing": tar_of(file("a/.wh.")),
    "a file as a directory": tar_of(file("a"), file("a/b")),
    "a directory that becomes a file": tar_of(file("a/b"), file("a")),
    "a name that is too long": tar_of(file("x" * 300)),
    "a path that is too long": tar_of(file("x/" * 3000 + "y")),
    "a name with NUL": tar_of(file("x", pax_headers={"path": "a\0b"})),
    "links in a circle": tar_of(symlink("a", "b"), symlink("b", "a"), file("a/c")),
    "a negative size": raw_header("a", b"\xff" * 12) + bytes(1024),
    "a map of holes that is nonsense": tar_of(
        file("a", b"z" * 512, pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})
    ),
    "no tar": b"no tar " * 1000,
    "nothing": b"",
}


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file beside the store that a hostile layer aims at. The real /etc/passwd is watched as well."""
    path = tmp_path / "canary"
    path.write_text("untouched")
    watched = os.stat("/etc/passwd")
    yield path
    assert path.read_text() == "untouched"
    assert path.stat().st_nlink == 1
    after = os.stat("/etc/passwd")
    assert (after.st_nlink, after.st_uid, after.st_mode, after.st_ino) == (
        watched.st_nlink,
        watched.st_uid,
        watched.st_mode,
        watched.st_ino,
    )
    assert sorted(os.listdir(tmp_path)) == ["canary", "image", "store"]


@pytest.mark.parametrize("what", REFUSED)
def test_a_hostile_layer_is_refused_and_leaves_nothing(
    what: str, store: ImageStore, tmp_path: Path, canary: Path
) -> None:
    with pytest.raises(InvalidConfig, match="an image that can be unpacked"):
        run(store.add_tar(archive(tmp_path / "image", layout([REFUSED[what]]))))
    assert layers_of(store) == set()


def test_a_header_that_would_take_all_memory_is_refused(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_worker, "MEMORY_BYTES_MAX", 1 << 28)
    with pytest.raises(InvalidConfig, match="reading it takes more than"):
        run(store.add_tar(archive(tmp_path / "image", layout([LOWER], pack=lambda layer: header_bomb()))))
    assert layers_of(store) == set()


def test_names_and_links_that_lead_out_stay_inside(store: ImageStore, tmp_path: Path, canary: Path) -> None:
    layer = tar_of(
        file(str(canary), b"hostile"),
        symlink("out", str(tmp_path)),
        file("out/below", b"hostile"),
        symlink("up", "../../../../../../.."),
        file("up/top", b"hostile"),
        symlink("direct", str(canary)),
        file("direct", b"hostile"),
        symlink("first", str(canary)),
        hard_link("second", "first"),
        file("second", b"hostile"),
        symlink("dangling", "made/on/demand"),
        file("dangling/file", b"hostile"),
        folder("out", mode=0o777),
    )
    root = Path(run(store.add_tar(archive(tmp_path / "image", saved([layer])))).layers[1])
    below = tmp_path.relative_to("/")
    assert (root / below / "canary").read_bytes() == b"hostile"
    assert (root / below / "below").read_bytes() == b"hostile"
    assert (root / "top").read_bytes() == b"hostile"
    assert not (root / "direct").is_symlink() and not (root / "second").is_symlink()
    assert (root / "first").is_symlink()
    assert (root / "made/on/demand/file").read_bytes() == b"hostile"
    assert (root / "out").is_dir() and not (root / "out").is_symlink()


def test_times_that_no_file_system_holds_are_dropped(store: ImageStore, tmp_path: Path) -> None:
    layer = tar_of(
        file("a", pax_headers={"mtime": "nan"}),
        file("b", pax_headers={"mtime": "-1e300"}),
        folder("c", pax_headers={"mtime": "1e300"}),
    )
    root = Path(run(store.add_tar(archive(tmp_path / "image", saved([layer])))).layers[1])
    assert [(root / name).stat().st_mtime for name in "abc"] == [0, 0, 0]


def bomb() -> bytes:
    """64 MiB of zeros in a file, in 64 KiB."""
    return gzip.compress(tar_of(file("zeros", bytes(64 << 20))), compresslevel=1)


@pytest.mark.parametrize(
    ("limit", "files"),
    [
        ("bytes_max", lambda: saved([tar_of(file("a", bytes(600_000))), tar_of(file("b", bytes(600_000)))])),
        ("bytes_max", lambda: saved([sparse_giant()])),
        ("bytes_max", lambda: layout([gzip.decompress(bomb())], pack=lambda layer: bomb())),
        ("entries_max", lambda: saved([tar_of(*(file(f"{number}") for number in range(101)))])),
        ("entries_max", lambda: saved([tar_of(*(file(f"{one}{number}") for number in range(60))) for one in "ab"])),
        ("entries_max", lambda: saved([tar_of(*(file(f".wh.{number}") for number in range(101)))])),
        ("entries_max", lambda: saved([tar_of(*(folder("same") for _ in range(101)))])),
        ("entries_max", lambda: saved([tar_of(file("a/" * 101 + "b"))])),
    ],
)
def test_an_image_that_is_too_large_is_refused_by_the_name_of_the_limit(
    limit: str, files: Callable[[], dict[str, bytes]], tmp_path: Path, canary: Path
) -> None:
    store = ImageStore(tmp_path / "store", bytes_max=1_000_000, entries_max=100, free_bytes_min=0)
    with pytest.raises(AdmissionRefused, match=f"exceeds the limit {limit} of the store") as refused:
        run(store.add_tar(archive(tmp_path / "image", files())))
    assert refused.value.limit == limit
    assert store.names() == ["host"]
    assert not parts_of(store)


def test_a_bomb_around_the_archive_is_refused(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store", bytes_max=1_000_000, free_bytes_min=0)
    (tmp_path / "image").write_bytes(bomb())
    with pytest.raises(AdmissionRefused, match="bytes_max"):
        run(store.add_tar(tmp_path / "image"))
    assert layers_of(store) == set()


def test_the_last_bytes_of_the_disk_stay_free(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store", free_bytes_min=1 << 60)
    with pytest.raises(ManagerError, match="must stay free"):
        run(store.add_tar(archive(tmp_path / "image", saved([LOWER]))))
    assert layers_of(store) == set()


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_cancelling_an_unpack_leaves_nothing(store: ImageStore, tmp_path: Path) -> None:
    # A large member in a file full of holes: reading it takes long enough to be interrupted. It must fit on the disk.
    size = min(4 << 30, shutil.disk_usage(tmp_path).free // 2)
    files = layout([LOWER])
    directory(tmp_path / "image", files)
    blob = tmp_path / "image/blobs/sha256" / sha256(LOWER)
    blob.write_bytes(raw_header("zeros", b"\x80" + size.to_bytes(11, "big")))
    os.truncate(blob, size + (1 << 20))

    def written() -> list[Path]:
        return [path for path in store.root.glob("layers/.part-*/zeros") if path.stat().st_size]

    async def cancelled() -> None:
        adding = asyncio.create_task(store.add_tar(tmp_path / "image"))
        await until(lambda: adding.done() or written())
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding

    run(cancelled())
    assert layers_of(store) == set()
    assert run(_lock_is_free(store, f"layer {sha256(LOWER)}"))


async def _lock_is_free(store: ImageStore, key: str) -> bool:
    async with store.lock(key):
        return True


# ---- directories ----------------------------------------------------------------------------------------------------


def look(root: Path) -> list[tuple[object, ...]]:
    statuses = [(path, path.lstat()) for path in [root, *sorted(root.rglob("*"))]]
    return [
        (str(path), it.st_uid, it.st_gid, it.st_mode, it.st_ino, it.st_mtime_ns, it.st_ctime_ns)
        for path, it in statuses
    ]


def test_a_directory_is_an_image_and_stays_as_it_is(store: ImageStore, tmp_path: Path) -> None:
    passwd = b"root:x:0:0::/root:/bin/sh\nmail:x:8:8::/:/bin/sh"
    root = directory(tmp_path / "root", {"etc/passwd": passwd, "bin/bash": b"#!", "etc/hosts": b"1.2.3.4 a\n"})
    (root / "bin/bash").chmod(0o755)
    (root / "tmp").mkdir(mode=0o700)
    before = look(root)
    image = run(store.add_directory(root))
    assert look(root) == before
    assert image == store.get(str(root)) == run(store.add_directory(root))
    assert (image.layers[-1], image.shell, image.cwd, image.env) == (str(root), "/bin/bash", "/work", {})
    assert mounted(image, "stat -c '%a %u' tmp var/tmp work proc dev").split("\n")[:5] == [
        f"1777 {SANDBOX_UID}",
        f"1777 {SANDBOX_UID}",
        f"755 {SANDBOX_UID}",
        f"755 {SANDBOX_UID}",
        f"755 {SANDBOX_UID}",
    ]
    assert mounted(image, "cat etc/passwd").splitlines() == [
        *passwd.decode().splitlines(),
        f"agent:x:{SANDBOX_UID}:{SANDBOX_UID}:agent:/home/agent:/bin/sh",
    ]
    assert mounted(image, "cat etc/group") == f"root:x:0:\nagent:x:{SANDBOX_UID}:\n"
    assert mounted(image, "cat etc/hosts") == "1.2.3.4 a\n"
    assert look(root) == before


def test_what_fits_a_directory_hides_none_of_its_links(store: ImageStore, tmp_path: Path) -> None:
    root = directory(tmp_path / "root", {"data/etc/passwd": b"agent:x:1:1::/:/bin/sh\n", "data/home/a": b"x"})
    for name in ("etc", "home"):
        (root / name).symlink_to(f"data/{name}")
    (root / "tmp").symlink_to("/nowhere")
    (root / "var").symlink_to(tmp_path)
    image = run(store.add_directory(root))
    assert mounted(image, "readlink etc home var; ls home; stat -c %F tmp").split("\n")[:5] == [
        "data/etc",
        "data/home",
        str(tmp_path),
        "a",
        "directory",
    ]
    assert not (tmp_path / "tmp").exists()


@pytest.mark.parametrize("name", ["a:b", "a,b", "a\\b"])
def test_paths_that_a_mount_misreads_are_refused(name: str, store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InvalidConfig, match="a path without ':'"):
        run(store.add_directory(tmp_path / name))
    with pytest.raises(InvalidConfig, match="a path without ':'"):
        ImageStore(tmp_path / name / "store")


def test_directories_that_cannot_be_images_are_refused(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in (
        (Path("/"), "does not overlap with the store"),
        (tmp_path, "does not overlap with the store"),
        (store.root / "layers", "does not overlap with the store"),
        (tmp_path / "missing", "a path that exists"),
        (tmp_path / "file", "a directory"),
    ):
        with pytest.raises(InvalidConfig, match=reason):
            run(store.add_directory(path))


# ---- commits --------------------------------------------------------------------------------------------------------


def commit(store: ImageStore, name: str, base: StoredImage, **files: str) -> StoredImage:
    part = store.new_layer()
    for each, content in files.items():
        (part / each).write_text(content)
    try:
        return store.seal(part, name=name, base=base)
    finally:
        store.discard(part)


def test_a_sealed_layer_stands_on_its_base(store: ImageStore, tmp_path: Path) -> None:
    base = run(store.add_tar(archive(tmp_path / "image", saved([LOWER]))))
    image = commit(store, "ready", base, new="committed")
    assert image == ImageStore(store.root).get("ready")
    assert image.layers[1:] == base.layers
    assert (image.env, image.cwd, image.shell) == (base.env, base.cwd, base.shell)
    assert files_of(image)["new"] == "committed"
    on_host = commit(store, "on-host", store.get("host"))
    assert on_host.binds_usr
    assert not parts_of(store)


def test_a_layer_in_the_making_belongs_to_the_user_of_sandboxes_and_can_be_discarded(store: ImageStore) -> None:
    part = store.new_layer()
    assert part.stat().st_uid == SANDBOX_UID
    (part / "file").touch()
    store.discard(part)
    assert layers_of(store) == set()
    store.discard(part)


def test_a_name_that_is_given_again_means_the_new_image_and_the_old_one_stays(store: ImageStore) -> None:
    old = commit(store, "ready", store.get("host"), which="old")
    new = commit(store, "ready", store.get("host"), which="new")
    assert store.get("ready") == new
    (aside,) = [name for name in store.names() if name.startswith("ready@")]
    assert store.get(aside).layers == old.layers
    store.forget(aside)
    assert store.names() == ["host", "ready"]
    assert not os.path.exists(old.layers[0])
    assert os.path.isdir(new.layers[0])


@pytest.mark.parametrize("name", ["", "host", "/srv/image", "x" * 513, "a\0b"])
def test_names_that_mean_something_else_are_refused(name: str, store: ImageStore) -> None:
    part = store.new_layer()
    with pytest.raises(InvalidAction):
        store.seal(part, name=name, base=store.get("host"))
    store.discard(part)
    assert store.names() == ["host"]
    assert not parts_of(store)


def test_a_layer_on_a_base_that_was_deleted_is_not_sealed(store: ImageStore) -> None:
    base = commit(store, "base", store.get("host"))
    part = store.new_layer()
    store.forget("base")
    with pytest.raises(ManagerError, match="was deleted meanwhile"):
        store.seal(part, name="ready", base=base)
    assert part.is_dir()
    store.discard(part)
    assert store.names() == ["host"]
    assert [name for name in layers_of(store) if not name.startswith("host-")] == []


def test_forgetting_deletes_what_no_other_image_has(store: ImageStore, tmp_path: Path) -> None:
    base = run(store.add_tar(archive(tmp_path / "image", saved([LOWER, UPPER]))))
    first = commit(store, "first", base)
    second = commit(store, "second", first)
    store.forget("first")
    assert files_of(second) == BOTH
    with pytest.raises(InvalidAction, match="one of"):
        store.get("first")
    store.forget("tools:1")
    assert files_of(second) == BOTH
    store.forget("second")
    assert layers_of(store) == set()
    with pytest.raises(InvalidAction):
        store.forget("second")
    with pytest.raises(InvalidAction, match="always there"):
        store.forget("host")
    assert files_of(run(store.add_tar(tmp_path / "image"))) == BOTH, "it can be added again"


def test_forgetting_a_directory_leaves_it_alone(store: ImageStore, tmp_path: Path) -> None:
    root = directory(tmp_path / "root", {"a": b"x"})
    run(store.add_directory(root))
    store.forget(str(root))
    assert (root / "a").read_bytes() == b"x"
    assert layers_of(store) == set()


def test_an_image_whose_directory_is_gone_is_reported(store: ImageStore, tmp_path: Path) -> None:
    root = directory(tmp_path / "root", {"a": b"x"})
    run(store.add_directory(root))
    shutil.rmtree(root)
    with pytest.raises(ManagerError, match=f"is based on {root}, which was deleted"):
        store.get(str(root))


def test_as_many_layers_as_allowed_can_be_mounted_and_no_more() -> None:
    # A short path, as a machine has it: those of tests leave no room in the options of a mount.
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        store = ImageStore(Path(short))
        image = store.get("host")
        for number in range(LAYERS_MAX - 1):
            image = commit(store, f"{number}", image, **{f"file{number}": f"{number}"})
        assert len(image.layers) == LAYERS_MAX
        assert mounted(image, "ls -d file*").split() == sorted(f"file{number}" for number in range(LAYERS_MAX - 1))
        part = store.new_layer()
        with pytest.raises(AdmissionRefused, match=f"has {LAYERS_MAX + 1} layers; the kernel mounts at most"):
            store.seal(part, name="more", base=image)
        store.discard(part)


def test_an_archive_with_too_many_layers_is_refused(store: ImageStore, tmp_path: Path) -> None:
    layers = [tar_of(file(f"{number}")) for number in range(LAYERS_MAX)]
    for files in (saved(layers), layout(layers)):
        with pytest.raises(AdmissionRefused, match=f"has {LAYERS_MAX} layers") as refused:
            run(store.add_tar(archive(tmp_path / "image", files)))
        assert refused.value.limit == "layers_max"
    assert layers_of(store) == set()


def test_paths_too_long_for_the_options_of_a_mount_are_refused(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / ("x" * 200) / ("y" * 200))

    def pile(image: StoredImage) -> None:
        for number in range(LAYERS_MAX):
            image = commit(store, f"{number}", image)

    with pytest.raises(AdmissionRefused, match="a mount has room for"):
        pile(store.get("host"))
    assert not parts_of(store)


# ---- what was made before -------------------------------------------------------------------------------------------


def test_a_cached_result_is_shared_until_its_layers_are_gone(store: ImageStore) -> None:
    image = commit(store, "ready", store.get("host"))
    assert store.find_by_key("pip install x") is None
    store.tag("pip install x", image)
    other = ImageStore(store.root)
    assert other.find_by_key("pip install x") == image
    assert other.find_by_key("pip install y") is None
    store.forget("ready")
    assert other.find_by_key("pip install x") is None
    assert os.listdir(store.root / "cache") == []


def test_a_damaged_record_is_as_good_as_none(store: ImageStore) -> None:
    store.tag("key", store.get("host"))
    (record,) = (store.root / "cache").iterdir()
    record.write_bytes(record.read_bytes()[:-5])
    assert store.find_by_key("key") is None


HOLDER = """
import asyncio, sys
from pathlib import Path
from tangram.managers.sandboxes.bwrap.images.store import ImageStore

async def hold(store):
    async with store.lock("key"):
        print("held", flush=True)
        sys.stdin.read()

store = ImageStore(Path(sys.argv[1]))
if sys.argv[2] == "lock":
    asyncio.run(hold(store))
else:
    part = store.new_layer()
    (part / "file").touch()
    print(part, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(store: ImageStore) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Another process that shares the store, and holds the given layers until its input ends."""
    started: list[subprocess.Popen[str]] = []

    def start(what: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLDER, str(store.root), what]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_lock_is_held_by_one_process_and_waiting_for_it_does_not_block_the_event_loop(
    store: ImageStore, other: Callable[[str], subprocess.Popen[str]]
) -> None:
    holder = other("lock")
    assert first_line(holder) == "held"

    async def wait() -> list[str]:
        lines: list[str] = []

        async def take() -> None:
            async with store.lock("key"):
                lines.append("key")

        waiting = asyncio.create_task(take())
        async with store.lock("another key"):
            lines.append("another")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert holder.stdin is not None
        holder.stdin.close()
        await waiting
        return lines

    assert run(wait()) == ["another", "key"]


def test_a_lock_is_held_by_one_at_a_time_within_a_process_and_waiting_can_be_cancelled(store: ImageStore) -> None:
    async def work() -> int:
        inside = most = 0

        async def one() -> None:
            nonlocal inside, most
            async with store.lock("key"):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.001)
                inside -= 1

        async with store.lock("key"):
            waiting = asyncio.create_task(one())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await asyncio.gather(*(one() for _ in range(5)))
        return most

    assert run(work()) == 1


def test_sweeping_deletes_what_dead_processes_left_and_nothing_of_the_living(
    store: ImageStore, other: Callable[[str], subprocess.Popen[str]]
) -> None:
    dead, alive = other("part"), other("part")
    left, kept = Path(first_line(dead)), Path(first_line(alive))
    mine = store.new_layer()
    assert store.sweep() == 0
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    (store.root / "images" / ".part-1-x").touch()
    assert store.sweep() == 1
    assert not left.exists()
    assert (kept / "file").exists()
    assert mine.exists()
    assert os.listdir(store.root / "images") == []
    store.discard(mine)


# ---- deleting -------------------------------------------------------------------------------------------------------


def test_trees_of_any_kind_are_deleted_without_following_links(tmp_path: Path) -> None:
    outside = directory(tmp_path / "outside", {"kept": b"x"})
    tree = tmp_path / "tree"
    directory(tree, {"closed/inner/file": b"x", "wide/0": b"x"})
    (tree / "link").symlink_to(outside)
    (tree / "closed/inner/link").symlink_to(outside)
    os.mknod(tree / "whiteout", stat.S_IFCHR, 0)
    os.mkfifo(tree / "closed/pipe")
    for number in range(300):
        (tree / f"wide/folder{number}").mkdir()
    for path in (tree / "closed/inner", tree / "closed"):
        path.chmod(0o555)
    # Deeper than a path can be long, and deeper than recursion goes.
    here = os.open(tree, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deeper", dir_fd=here)
        below = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        remove_tree(tree)
        assert os.listdir(tmp_path) == ["outside"]
    finally:
        subprocess.run(["rm", "-rf", tree], check=True)  # what is this deep, the test runner could not delete
    assert (outside / "kept").read_bytes() == b"x"


def test_a_link_to_a_tree_is_not_taken_for_the_tree(tmp_path: Path) -> None:
    outside = directory(tmp_path / "outside", {"kept": b"x"})
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(OSError, match="link"):
        remove_tree(tmp_path / "link")
    assert (outside / "kept").exists()
