"""What deploy/ holds fits together: the unit, the config and the image."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tangram.config import load, parse
from tangram.config.validators import is_loopback
from tangram.managers.sandboxes.cgroups.hierarchies import OWNER_LEAF

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
GUIDES = DEPLOY.parent / "docs" / "guides"
NEWER_THAN_DEBIAN_12 = "DelegateSubgroup"
"""systemd 252, which has no such key, says so and goes on."""


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "tangram.service", encoding="utf-8")
    return parser


def test_the_unit_lets_sandboxes_outlive_the_service(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert (service["KillMode"], service["Delegate"], service["OOMPolicy"]) == ("process", "yes", "continue")
    assert service["TasksMax"] == "infinity"
    assert service["DelegateSubgroup"] == OWNER_LEAF, "the group that Tangram would step down into itself"


def test_nothing_in_the_unit_makes_a_mount_namespace(unit: configparser.ConfigParser) -> None:
    makes_one = re.compile(r"Protect|Private|ReadWrite|ReadOnly|Inaccessible|Bind|Root|TemporaryFileSystem|MountFlags")
    assert [key for key in unit["Service"] if makes_one.match(key)] == []


def test_the_unit_waits_longer_than_the_service_drains(unit: configparser.ConfigParser) -> None:
    config = load(DEPLOY / "tangram.toml")
    assert float(unit["Service"]["TimeoutStopSec"]) > config.service.drain_s


def test_the_unit_makes_the_folders_that_the_config_names(unit: configparser.ConfigParser) -> None:
    config = load(DEPLOY / "tangram.toml")
    made = {f"/var/lib/{name}" for name in unit["Service"]["StateDirectory"].split()}
    assert {config.node.state, str(Path(config.service.journal).parent)} <= made


def test_the_unit_starts_what_the_guide_installs(unit: configparser.ConfigParser) -> None:
    start = unit["Service"]["ExecStart"]
    assert start == "/usr/bin/env tangram serve --config /etc/tangram/tangram.toml"
    guide = (GUIDES / "deploy-with-systemd.md").read_text()
    (path,) = re.findall(r"^PATH=([^:]+):", unit["Service"]["Environment"])
    assert f"python3 -m venv {Path(path).parent}" in guide and "/etc/tangram/tangram.toml" in guide


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing")
    shutil.copy(DEPLOY / "tangram.service", tmp_path)
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "tangram.service")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    warnings = [line for line in checked.stderr.splitlines() if "tangram.service" in line]
    assert [line for line in warnings if NEWER_THAN_DEBIAN_12 not in line] == []
    assert checked.returncode == 0, checked.stderr


def test_the_config_is_one_for_a_team() -> None:
    config = load(DEPLOY / "tangram.toml")
    assert not is_loopback(config.listen_host)
    assert config.service.admin_token_file == str(DEPLOY / "admin-token")
    assert config.service.tls_certificate and config.service.tls_key


def test_what_the_config_offers_behind_a_mark_is_valid_too() -> None:
    text = (DEPLOY / "tangram.toml").read_text()
    whole = parse(re.sub(r"^#(?=\[|\w+ =)", "", text, flags=re.MULTILINE), "tangram.toml")
    assert (len(whole.quotas), len(whole.services), whole.node.cores) == (1, 1, 30.0)
    assert whole.service.event_log


def test_the_image_copies_what_is_there_and_names_no_registry() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, flags=re.MULTILINE):
        for name in line.split()[:-1]:
            assert (DEPLOY.parent / name).exists(), name
    images = re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE)
    assert images and not any("/" in image for image in images)
    assert 'ENTRYPOINT ["tangram", "serve"]' in text, "without a shell, which would be a second process of its group"
