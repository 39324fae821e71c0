"""`tangram serve --check`, and what a start says of a config that cannot be: the file, the line and the key."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tangram.cli import app
from tangram.config import Config, DeviceConfig, ModelConfig, NodeConfig
from tangram.errors import InvalidConfig
from tangram.server.serve import require_usable, running_server

ENGINE = "tests.managers.models.bytes_engine:BytesEngine"


def check(folder: Path, text: str) -> tuple[int, str]:
    """The exit code and the output, with `t.toml` for the whole path of the config."""
    path = folder / "t.toml"
    path.write_text(text)
    done = CliRunner().invoke(app, ["serve", "--check", "--config", str(path)], catch_exceptions=False)
    return done.exit_code, (done.stdout + done.stderr).replace(str(path), "t.toml")


def started(*words: object) -> subprocess.CompletedProcess[str]:
    """A start that is not expected to last."""
    program = [sys.executable, "-m", "tangram", "serve", *map(str, words)]
    return subprocess.run(program, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[node]\nbackend = 'sandbox'\ncores = 1000", "t.toml:3: node.cores: expected more than 0 and at most"),
        ("[node]\nbackend = 'sandbox'\n\nmemory = '900TiB'", "t.toml:4: node.memory: expected at least 1 and at most"),
        ("[node]\ncores = 0.0001", "t.toml:2: node.cores: expected at least 0.5: fewer cannot open or copy a sandbox"),
        ("[node]\nbackend = 'fake'\nmemory = '1KiB'", "t.toml:3: node.memory: expected at least 4 MiB"),
        ("[service]\n\ntls_key = 'k'\ntls_certificate = 'none'", "t.toml:4: service.tls_certificate: expected a file"),
        ("[service]\nadmin_token_file = 'short'", "t.toml:2: service.admin_token_file: expected a file of one line"),
        ("[service]\nadmin_token_file = 'open'", "t.toml:2: service.admin_token_file: expected a file that others can"),
        ("[service]\njournal = '/proc/x/journal.db'", "t.toml:2: service.journal: expected a file in a folder that"),
        (
            "[node]\nbackend = 'fake'\n[[services]]\nname = 'a'\nengine = 'm:E'",
            "t.toml:3: services: expected at least one [[devices]]: this machine has no CUDA device",
        ),
        (
            "[node]\nbackend = 'fake'\n[[devices]]\nkind = 'emulated'\nmemory_bytes = '1GiB'\n"
            "[[services]]\nname = 'a'\nengine = 'nomod:Eng'",
            't.toml:8: services[0].engine: expected "module:name" that can be imported (ModuleNotFoundError: No module'
            " named 'nomod')",
        ),
        (
            "[node]\nbackend = 'fake'\n[[devices]]\nkind = 'emulated'\nmemory_bytes = '1GiB'\n"
            "[[services]]\nname = 'a'\nengine = 'm:E'\ndegrees = [2]",
            "t.toml:9: services[0].degrees: expected at most 1",
        ),
    ],
)
def test_an_error_is_reported_with_the_file_the_line_and_the_key(
    tmp_path: Path, text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram.server.components.discover", lambda: ())
    (tmp_path / "short").write_text("short")
    (tmp_path / "short").chmod(0o600)
    (tmp_path / "open").write_text("0123456789abcdef" * 4)
    (tmp_path / "open").chmod(0o644)
    code, result = check(tmp_path, text)
    assert code == 2 and says in result


def test_the_start_reports_the_same_errors_as_the_check(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text("[service]\nlisten = '127.0.0.1:0'\n[node]\nbackend = 'sandbox'\ncores = 1000")
    done = started("--config", path)
    assert done.returncode == 2 and f"{path}:5: node.cores: expected more than 0" in done.stderr


def test_errors_in_the_arguments_of_the_command_do_not_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(f"[service]\nadmin_token_file = '{_token(tmp_path)}'\n[node]\nbackend = 'fake'")
    done = started("--config", path, "--listen", "192.0.2.1:80")
    assert done.returncode == 2 and "service.listen: expected an address of this machine" in done.stderr
    assert str(path) not in done.stderr


def _token(folder: Path) -> Path:
    path = folder / "token"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    return path


def test_the_check_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_STATE", str(tmp_path / "state"))
    done = CliRunner().invoke(app, ["serve", "--check"], catch_exceptions=False)
    assert done.exit_code == 0 and "the defaults: valid" in done.stdout
    code, result = check(tmp_path, "[service]\njournal = 'to/be/made/journal.db'\n[node]\nstate = 'state'")
    assert code == 0 and "valid; would listen on 127.0.0.1:7433" in result
    assert [each.name for each in tmp_path.iterdir()] == ["t.toml"]


def test_an_engine_that_can_be_imported_is_right(tmp_path: Path) -> None:
    devices = (DeviceConfig(kind="emulated", memory_bytes=1 << 30),)

    def config(engine: str) -> Config:
        service = ModelConfig(name="a b", engine=engine)
        return Config(node=NodeConfig(backend="fake"), services=(service,), devices=devices)

    require_usable(config(ENGINE))
    with pytest.raises(InvalidConfig, match=r"services\[0\].engine: expected .* has no attribute 'Nothing'"):
        require_usable(config(ENGINE.partition(":")[0] + ":Nothing"))


def test_an_error_of_a_manager_names_its_key(tmp_path: Path) -> None:
    async def main() -> None:
        node = NodeConfig(backend="sandbox", cores=1000.0, state=str(tmp_path / "state"))
        service = Config().service
        config = Config(node=node, service=type(service)(listen="127.0.0.1:0", journal=str(tmp_path / "journal.db")))
        async with running_server(config):
            pass

    with pytest.raises(InvalidConfig, match=r"^node\.cores: expected more than 0"):
        asyncio.run(main())
