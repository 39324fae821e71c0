"""Published weights: a version is there whole or not at all, and a model has all of one version, whatever happens."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tangram.errors import InvalidInput, ManagerError
from tangram.rl.inference.engines.protocol import PolicyWeights

torch = pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")

from tangram.rl.model.transformer import Transformer, small_config  # noqa: E402
from tangram.rl.model.weight_store import prune_versions, publish, pull, versions  # noqa: E402

CONFIG = small_config(50, layers=2)
BUCKET_BYTES = 60_000
"""Several tensors in some buckets, and one that is larger in another."""
DEADLINE_S = 60.0


def model(seed: int = 1, dtype: Any = torch.float32) -> Transformer:
    return Transformer.new(CONFIG, seed, dtype)


def same(one: Transformer, other: Transformer) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def published(tmp_path: Path) -> PolicyWeights:
    return publish(model(1), CONFIG, tmp_path, 3, bucket_bytes=BUCKET_BYTES)


# ---- there and back ----


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("bucket_bytes", [1, BUCKET_BYTES, 1 << 30])
def test_what_is_published_is_pulled_to_the_last_bit(tmp_path: Path, dtype: str, bucket_bytes: int) -> None:
    first = model(1, getattr(torch, dtype))
    weights = publish(first, CONFIG, tmp_path, 7, bucket_bytes=bucket_bytes)
    assert same(pull(weights), first)
    assert pull(weights).config == CONFIG
    count = len(list(Path(weights.folder).glob("*.bucket")))
    assert count == {1: len(first.state_dict()), 1 << 30: 1}.get(bucket_bytes, count)
    assert bucket_bytes != BUCKET_BYTES or 1 < count < len(first.state_dict())


def test_a_state_that_is_not_contiguous_is_published_as_it_reads(tmp_path: Path) -> None:
    first = model(1)
    state = {
        name: tensor.T.contiguous().T if tensor.dim() == 2 else tensor for name, tensor in first.state_dict().items()
    }
    assert not state["embedding"].is_contiguous()
    assert same(pull(publish(state, CONFIG, tmp_path, 1)), first)


def test_a_model_is_updated_where_it_stands(published: PolicyWeights) -> None:
    serving = model(2)
    addresses = [weight.data_ptr() for weight in serving.parameters()]
    assert pull(published, serving) is serving
    assert same(serving, model(1))
    assert [weight.data_ptr() for weight in serving.parameters()] == addresses


def test_a_model_of_another_dtype_keeps_it(published: PolicyWeights) -> None:
    assert same(pull(published, model(2, torch.float64)), model(1).double())


def test_a_model_that_was_pulled_in_inference_mode_can_be_trained(published: PolicyWeights) -> None:
    with torch.inference_mode():
        pulled = pull(published)
        pull(published, pulled)
    pulled(torch.tensor([[1, 2, 3]])).sum().backward()
    assert pulled.embedding.grad is not None


def test_pulled_weights_do_not_change_with_the_files(published: PolicyWeights) -> None:
    pulled = pull(published)
    for path in Path(published.folder).glob("*.bucket"):
        path.write_bytes(bytes(path.stat().st_size))
    assert same(pulled, model(1))


# ---- versions ----


def test_versions_are_announced_in_order_and_old_ones_are_deleted(tmp_path: Path) -> None:
    assert versions(tmp_path / "nothing") == []
    for version in (2, 10, 9, 100_000_000):
        publish(model(version), CONFIG, tmp_path, version)
    assert [each.version for each in versions(tmp_path)] == [2, 9, 10, 100_000_000]
    assert [each.version for each in prune_versions(tmp_path)] == [2, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000010", "100000000"]
    assert same(pull(versions(tmp_path)[0]), model(10))
    assert prune_versions(tmp_path, keep=5) == []
    assert [each.version for each in prune_versions(tmp_path, keep=0)] == [10, 100_000_000]
    assert list(tmp_path.iterdir()) == []


def test_a_version_is_published_once(tmp_path: Path, published: PolicyWeights) -> None:
    with pytest.raises(ManagerError, match="00000003 exists already"):
        publish(model(2), CONFIG, tmp_path, 3)
    assert same(pull(published), model(1))
    assert os.listdir(tmp_path) == ["00000003"]


def test_a_file_that_is_not_a_version_is_neither_listed_nor_removed(tmp_path: Path, published: PolicyWeights) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "00000001").mkdir()
    (tmp_path / "00000002").touch()
    assert versions(tmp_path) == [published]
    prune_versions(tmp_path, keep=0)
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002", "notes"]


# ---- damage ----


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("bucket", [0, 1, -1])
@pytest.mark.parametrize("how", [flip, cut, lengthen, empty, Path.unlink], ids=lambda how: how.__name__)
def test_a_damaged_bucket_is_named_and_the_old_weights_stay(
    published: PolicyWeights, how: Callable[[Path], None], bucket: int
) -> None:
    path = sorted(Path(published.folder).glob("*.bucket"))[bucket]
    how(path)
    serving = model(2)
    with pytest.raises(ManagerError) as caught:
        pull(published, serving)
    assert str(path) in str(caught.value)
    assert same(serving, model(2))


def changed(manifest: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return manifest | {"tensors": [manifest["tensors"][0] | fields, *manifest["tensors"][1:]]}


@pytest.mark.parametrize(
    "lie",
    [
        lambda said: {},
        lambda said: said | {"version": 4},
        lambda said: said | {"tensors": []},
        lambda said: said | {"tensors": said["tensors"][1:]},
        lambda said: said | {"tensors": [*said["tensors"], said["tensors"][0] | {"name": "other"}]},
        lambda said: said | {"buckets": said["buckets"][:1]},
        lambda said: changed(said, shape=[50, 65]),
        lambda said: changed(said, shape=[1 << 40, 1 << 40]),
        lambda said: changed(said, dtype="int64"),
        lambda said: changed(said, dtype="float64"),
        lambda said: changed(said, bucket=-1),
        lambda said: changed(said, bucket=99),
        lambda said: changed(said, offset=-64),
        lambda said: changed(said, offset=3),
        lambda said: changed(said, offset=1 << 40),
        lambda said: said | {"config": said["config"] | {"layers": 1 << 40}},
        lambda said: said | {"config": said["config"] | {"heads": 0}},
        lambda said: said | {"config": said["config"] | {"rope_theta": 5.0}},
        lambda said: said | {"config": said["config"] | {"vocabulary": 1 << 40}},
    ],
)
def test_a_manifest_that_lies_is_named_and_the_old_weights_stay(
    published: PolicyWeights, lie: Callable[[dict[str, Any]], Any]
) -> None:
    path = Path(published.folder) / "manifest.json"
    path.write_text(json.dumps(lie(json.loads(path.read_text()))))
    serving = model(2)
    with pytest.raises(ManagerError, match=r"manifest\.json"):
        pull(published, serving)
    assert same(serving, model(2))


def test_missing_weights_are_reported(tmp_path: Path, published: PolicyWeights) -> None:
    prune_versions(tmp_path, keep=0)
    with pytest.raises(ManagerError, match=r"00000003/manifest\.json: No such file"):
        pull(published)


def test_a_model_of_other_sizes_is_not_touched(published: PolicyWeights) -> None:
    other = msgspec.structs.replace(CONFIG, inner=64)
    serving = Transformer.new(other, 2)
    with pytest.raises(ManagerError, match=r"manifest\.json: expected .*inner=64"):
        pull(published, serving)
    assert same(serving, Transformer.new(other, 2))


@pytest.mark.parametrize(
    "state",
    [
        {},
        {**Transformer.new(CONFIG, 1).state_dict(), "other": torch.zeros(1)},
        {**Transformer.new(CONFIG, 1).state_dict(), "norm": torch.zeros(1)},
        {**Transformer.new(CONFIG, 1).state_dict(), "norm": torch.zeros(64, dtype=torch.int64)},
    ],
    ids=["empty", "too many", "shape", "dtype"],
)
def test_what_is_not_the_state_of_the_model_is_not_published(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        publish(state, CONFIG, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


# ---- the publisher fails ----


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path: Path, published: PolicyWeights) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ManagerError, match="00000004 cannot be written: File too large"):
            publish(model(1), CONFIG, tmp_path, 4, bucket_bytes=BUCKET_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["00000003"]


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ManagerError, match="cannot be written"):
        publish(model(1), CONFIG, tmp_path / "file" / "folder", 1)


PUBLISHER = """
import sys
from tangram.rl.model.transformer import Transformer, small_config
from tangram.rl.model.weight_store import prune_versions, publish
config = small_config(50)
for version in range(1000000):
    publish(Transformer.new(config, version), config, sys.argv[1], version, bucket_bytes=20_000)
    print(version, flush=True)
    prune_versions(sys.argv[1], keep=5)
"""


def test_a_pull_during_a_publish_that_is_killed_gets_complete_versions_only(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    errors: list[str] = []
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        publisher = subprocess.Popen([sys.executable, "-c", PUBLISHER, folder], stdout=subprocess.PIPE)
        try:
            assert publisher.stdout is not None and publisher.stdout.readline() == b"0\n"
            serving, deadline = Transformer(CONFIG), time.monotonic() + DEADLINE_S
            before = -1
            while before < 8:  # the publisher is then killed wherever it is
                assert time.monotonic() < deadline and publisher.poll() is None
                newest = versions(folder)[-1]
                if newest.version == before:
                    continue
                try:
                    pull(newest, serving)
                    before = newest.version
                except ManagerError as error:  # more were published meanwhile, so that it was forgotten
                    errors.append(str(error))
                assert before < 0 or same(serving, model(before))
        finally:
            publisher.send_signal(signal.SIGKILL)
            publisher.communicate()
        for each in versions(folder):
            assert same(pull(each), model(each.version))
        publish(model(1), CONFIG, folder, 2_000_000)  # the next one removes what was left half-written
        assert not [name for name in os.listdir(folder) if not name.isdecimal()]
    assert all("No such file" in error for error in errors), errors
