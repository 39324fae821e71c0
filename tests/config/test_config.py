"""The config: valid files, and the errors of invalid ones."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tools.reference.config_page import example, sentences

from tangram.config import (
    Config,
    DeviceConfig,
    ModelConfig,
    NodeConfig,
    QuotaConfig,
    RateConfig,
    RunLimits,
    ServiceConfig,
    add_error_location,
    admin_token,
    load,
    parse,
    require_files,
)
from tangram.config.loader import CONFIG_BYTES_MAX
from tangram.config.tables import field_types
from tangram.config.validators import is_loopback
from tangram.core.limits import Limits
from tangram.errors import InvalidConfig
from tangram.managers.models import Service
from tangram.managers.models.devices import Cuda, Emulated
from tangram.managers.quotas.manager import Quota, Rate

TOKEN = "0123456789abcdef" * 2


def refusal(text: str) -> str:
    with pytest.raises(InvalidConfig) as caught:
        parse(text, "t.toml")
    return str(caught.value)


def uncommented(text: str) -> str:
    """With every key and table that stands behind a #."""
    return re.sub(r"^#(?=\[|\w+ =)", "", text, flags=re.MULTILINE)


# ---- what a file says ----


def test_an_empty_file_has_the_defaults() -> None:
    config = parse("", "t.toml")
    assert config == Config()
    assert (config.listen_host, config.listen_port, config.service.admin_token_file) == ("127.0.0.1", 7433, "")
    assert (config.service.durability, config.service.drain_s, config.node.cores) == ("process", 30.0, None)
    assert (config.limits.body_bytes_max, config.limits.file_bytes_max) == (64 << 20, 4 << 30)
    assert config.scheduler == Limits()


def test_every_table_is_read() -> None:
    config = parse(
        """
        [service]
        listen = "0.0.0.0:80"
        admin_token_file = "admin"
        drain_s = 5
        [node]
        cores = 2
        memory = "1.5GiB"
        [limits]
        body_bytes_max = 1000
        [scheduler]
        queue_max = 7
        [[quotas]]
        name = "search"
        concurrent = 3
        [[quotas]]
        name = "judge"
        [quotas.tokens]
        units = 90_000
        seconds = 60
        [[services]]
        name = "teacher"
        engine = "module:Engine"
        degrees = [1, 2]
        memory_bytes = "2GB"
        [services.arguments]
        model = "m"
        [[devices]]
        kind = "emulated"
        memory_bytes = "8GiB"
        [[devices]]
        kind = "cuda"
        memory_bytes = "8GiB"
        place = "cuda:0"
        """,
        "t.toml",
    )
    assert config == Config(
        service=ServiceConfig(listen="0.0.0.0:80", admin_token_file="admin", drain_s=5.0),
        node=NodeConfig(cores=2.0, memory=3 << 29),
        limits=RunLimits(body_bytes_max=1000),
        scheduler=Limits(queue_max=7),
        quotas=(
            QuotaConfig(name="search", concurrent=3),
            QuotaConfig(name="judge", tokens=RateConfig(units=90_000, seconds=60.0)),
        ),
        services=(
            ModelConfig(
                name="teacher", engine="module:Engine", degrees=(1, 2), memory_bytes=2 * 10**9, arguments={"model": "m"}
            ),
        ),
        devices=(
            DeviceConfig(kind="emulated", memory_bytes=8 << 30),
            DeviceConfig(kind="cuda", memory_bytes=8 << 30, place="cuda:0"),
        ),
    )
    assert not is_loopback(config.listen_host) and config.service.admin_token_file
    assert type(config.service.drain_s) is type(config.node.cores) is float


@pytest.mark.parametrize(
    ("listen", "host", "port", "public"),
    [
        ("127.0.0.1:7433", "127.0.0.1", 7433, False),
        ("127.8.0.1:0", "127.8.0.1", 0, False),
        ("localhost:1", "localhost", 1, False),
        ("[::1]:65535", "::1", 65535, False),
        ("[::]:80", "::", 80, True),
        ("0.0.0.0:80", "0.0.0.0", 80, True),
        ("10.0.0.7:80", "10.0.0.7", 80, True),
        ("[::ffff:127.0.0.1]:80", "::ffff:7f00:1", 80, True),
        ("tangram.example.org:80", "tangram.example.org", 80, True),
        ("localhost.example.org:80", "localhost.example.org", 80, True),
    ],
)
def test_an_address_is_public_unless_it_is_a_loopback_address(listen: str, host: str, port: int, public: bool) -> None:
    config = Config(service=ServiceConfig(listen=listen, admin_token_file="token"))
    assert (config.listen_host, config.listen_port, not is_loopback(config.listen_host)) == (host, port, public)


@pytest.mark.parametrize(
    "listen",
    [
        *("", ":80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:8o", "127.0.0.1:٣"),
        *("::1:80", "[::1]", "[127.0.0.1]:80", "127.1:80", "1.2.3.4.5:80", "a b:80", "http://a:80", "-a:80"),
        *("a..b:80", "a\n:80"),
    ],
)
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidConfig, match=r"^listen: expected an address such as"):
        ServiceConfig(listen=listen, admin_token_file="token")


# ---- what fits what managers take ----


def test_records_hold_what_managers_take_with_the_same_defaults() -> None:
    model, service = ModelConfig(name="a", engine="m:E"), Service(name="a", engine="m:E")
    assert msgspec.structs.asdict(model) == msgspec.structs.asdict(service)
    assert set(QuotaConfig.__struct_fields__) == set(Quota.__struct_fields__)
    assert RateConfig.__struct_fields__ == Rate.__struct_fields__
    fields = set(Emulated.__struct_fields__) | set(Cuda.__struct_fields__) | {"kind"}
    assert set(DeviceConfig.__struct_fields__) == fields
    assert DeviceConfig(kind="emulated", memory_bytes=1).bandwidth == Emulated(memory_bytes=1).bandwidth


@pytest.mark.parametrize("name", ["cpu", "gpu", "memory", "a/b", "a@b", "", "a\nb"])
def test_a_name_that_a_quota_cannot_have_is_refused_by_both(name: str) -> None:
    with pytest.raises(InvalidConfig):
        Quota(name, concurrent=1)
    with pytest.raises(InvalidConfig):
        QuotaConfig(name=name, concurrent=1)


# ---- what is not known ----


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "\n[service]\ndrian_s = 3",
            "t.toml:3: service: expected a key that there is (did you mean drain_s?), got 'drian_s'",
        ),
        ("[servce]", "t.toml:1: expected a table that there is (did you mean service?), got 'servce'"),
        ("listen = 'a'", "t.toml:1: expected a table that there is (it is a key of [service]), got 'listen'"),
        (
            "[service]\ncores = 1",
            "t.toml:2: service: expected a key that there is (it is a key of [node]), got 'cores'",
        ),
        (
            "[[quotas]]\nname = 'a'\nconcurrent = 1\n[[quotas]]\nname = 'b'\nconcurent = 1",
            "t.toml:6: quotas[1]: expected a key that there is (did you mean concurrent?), got 'concurent'",
        ),
        (
            "[[quotas]]\nname = 'a'\n[quotas.tokens]\nunit = 1",
            "t.toml:4: quotas[0].tokens: expected a key that there is (did you mean units?), got 'unit'",
        ),
        (
            "[[runs]]\nname = 'a'",
            "t.toml:1: expected a table that there is (there are service, node, limits, scheduler, quotas, services,"
            " devices), got 'runs'",
        ),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest(text: str, says: str) -> None:
    assert refusal(text) == says


def test_lines_are_counted_as_editors_do() -> None:
    text = "# a\u2028b\r\n[[services]]\r\nname = 'a'\r\nengine = 'm:E'\r\ndegrees = [\r\n  1,\r\n]\r\nload_s = 1\r\n"
    assert refusal(text).startswith("t.toml:8: services[0]: expected a key that there is (did you mean load_s_max?)")


def test_a_line_is_not_named_where_a_text_could_look_like_one() -> None:
    text = '[[services]]\nname = "a"\nengine = "m:E"\n[services.arguments]\nprompt = """\n[service]\ndrain = 1\n"""\n'
    assert refusal(text + "[service]\ndrain = 1").startswith("t.toml: service: expected a key that there is")


# ---- what is wrong ----


@pytest.mark.parametrize(
    ("table", "line", "message"),
    [
        ("service", "drain_s = -1", "service.drain_s: expected a finite number of seconds, at least 0, got -1"),
        ("service", "drain_s = true", "service.drain_s: expected a finite number of seconds"),
        ("service", "drain_s = inf", "service.drain_s: expected a finite number of seconds"),
        ("service", "results_keep_s = nan", "service.results_keep_s: expected a positive, finite number"),
        ("service", "results_keep_s = 0", "service.results_keep_s: expected a positive, finite number"),
        ("service", "results_keep_s = 1" + "0" * 400, "service.results_keep_s: expected a positive, finite number"),
        ("service", "durability = 'disk'", 'service.durability: expected one of "process", "power", got \'disk\''),
        ("service", "policy = 'adaptve'", "(did you mean adaptive?), got 'adaptve'"),
        ("service", "policy = 5", "service.policy: expected one of fcfs"),
        ("service", "journal = ''", "service.journal: expected a path, not empty, got ''"),
        ("service", 'event_log = "a\\u0000b"', "service.event_log: expected a path"),
        ("service", "open_on_loopback = 1", "service.open_on_loopback: expected true or false, got 1"),
        ("service", "listen = 7433", "service.listen: expected an address such as"),
        ("node", "cores = 0", "node.cores: expected a number of cores above 0"),
        ("node", "memory = '4 XB'", "node.memory: expected a size such as"),
        ("node", "backend = 'podman'", 'node.backend: expected one of "sandbox", "process", "docker", "fake"'),
        ("node", "warm = 1.5", "node.warm: expected a whole number, at least 0, got 1.5"),
        ("node", "warm = 1\nbackend = 'process'", "node.warm: expected 0: only"),
        ("node", "name = 'a@b'", "node.name: expected 1 to 200 printable characters without '@' and '/', got 'a@b'"),
        ("limits", "body_bytes_max = 0", "limits.body_bytes_max: expected a size"),
        ("limits", "sandboxes_max = 0", "limits.sandboxes_max: expected a whole number, at least 1, got 0"),
        ("limits", "requests_per_s = 0", "limits.requests_per_s: expected a positive, finite number"),
        ("limits", "waiting_max = 1" + "0" * 30, "limits.waiting_max: expected a whole number, at most"),
        ("limits", "connections_max = 2026-01-01", "limits.connections_max: expected a whole number"),
        ("scheduler", "queue_max = 0", "scheduler.queue_max: expected a whole number, at least 1, got 0"),
        ("scheduler", "ageing_s = 'long'", "scheduler.ageing_s: expected a positive, finite number of seconds"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_valid(table: str, line: str, message: str) -> None:
    error = refusal(f"[{table}]\n{line}")
    assert error.startswith(f"t.toml:2: {table}.") and message in error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("service = 5", "service: expected a table, as [service] begins one, got 5"),
        ("[[service]]", "service: expected one table, as [service] begins it"),
        ("[quotas]", "quotas: expected tables that begin with [[quotas]] each"),
        ("quotas = [1]", "quotas[0]: expected a table, as [[quotas]] begins one, got 1"),
        ("[[quotas]]\nconcurrent = 1", "quotas[0]: expected the key name as well, got ['concurrent']"),
        ("[[quotas]]\nname = 'a'", "quotas[0].name: expected at least one of concurrent, requests and tokens"),
        ("[[quotas]]\nname = 'a'\nrequests = 5", "quotas[0].requests: expected a table such as { units = ..., seconds"),
        ("[[quotas]]\nname = 'a'\nrequests = { units = 5 }", "quotas[0].requests: expected the key seconds as well"),
        (
            "[[quotas]]\nname = 'a'\nconcurrent = 1\n" * 2,
            "t.toml:5: quotas[1].name: expected each name once; quotas[0] has it, got 'a'",
        ),
        ("[[services]]\nname = 'a'\nengine = 'm:E'\n" * 2, "t.toml:5: services[1].name: expected each name once"),
        ("[[services]]\nname = 'a'\nengine = 'm'", 'services[0].engine: expected "module:name" of an engine, got'),
        (
            "[[services]]\nname = 'a'\nengine = 'm:E'\ndegrees = [1, 3]",
            "services[0].degrees: expected increasing powers",
        ),
        (
            "[[services]]\nname = 'a'\nengine = 'm:E'\ndegrees = [2, 1]",
            "services[0].degrees: expected increasing powers",
        ),
        (
            "[[services]]\nname = 'a'\nengine = 'm:E'\ndegrees = [[1]]",
            "services[0].degrees: expected increasing powers",
        ),
        ("[[devices]]\nkind = 'tpu'\nmemory_bytes = 1", 'devices[0].kind: expected one of "emulated", "cuda"'),
        ("[[devices]]\nkind = 'cuda'\nmemory_bytes = 1", "devices[0].place: expected the place"),
        ("[[devices]]\nkind = 'emulated'\nmemory_bytes = 1\nplace = 'cuda:0'", "devices[0].place: expected nothing"),
        (
            "[[devices]]\nkind = 'cuda'\nmemory_bytes = 1\nplace = 'cuda:0'\nbandwidth = 5",
            "devices[0].bandwidth: expected nothing",
        ),
    ],
)
def test_a_table_that_is_not_as_it_should_be_is_named(text: str, says: str) -> None:
    assert says in refusal(text)


# ---- access ------------


def test_a_public_address_without_a_token_is_refused() -> None:
    assert "service.admin_token_file: expected the path" in refusal("[service]\nlisten = '0.0.0.0:80'")
    assert "others than this machine" in refusal("[service]\nlisten = 'example.org:80'\nopen_on_loopback = true")


def test_changing_the_address_of_a_config_does_not_open_it_to_all() -> None:
    with pytest.raises(InvalidConfig, match="admin_token_file"):
        msgspec.structs.replace(ServiceConfig(), listen="0.0.0.0:80")


def test_a_service_without_any_access_is_refused() -> None:
    assert "open_on_loopback = false requires one" in refusal("[service]\nopen_on_loopback = false")
    config = parse("[service]\nopen_on_loopback = false\nadmin_token_file = 'a'", "t.toml")
    assert config.service.admin_token_file == "a"


@pytest.mark.parametrize(("given", "missing"), [("tls_key", "tls_certificate"), ("tls_certificate", "tls_key")])
def test_half_of_tls_is_refused(given: str, missing: str) -> None:
    assert f"service.{missing}: expected a path, as {given} has one" in refusal(f"[service]\n{given} = 'a'")


# ---- files ----


def test_paths_are_relative_to_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/t.toml").write_text(
        "[service]\nadmin_token_file = '../admin'\nevent_log = '/log'\n[node]\nstate='s'"
    )
    monkeypatch.chdir(tmp_path)
    for path in (Path("etc/t.toml"), tmp_path / "etc/t.toml"):
        config = load(path)
        assert config.service.journal == str(tmp_path / "etc/journal.db")
        assert config.service.admin_token_file == str(tmp_path / "admin")
        assert (config.service.event_log, config.service.tls_key) == ("/log", "")
        assert config.node.state == str(tmp_path / "etc/s")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "expected a config file that can be read, got 'No such file or directory'"),
        (b"a = 1\n\xff", "{}:2: expected text in UTF-8, got b'\\xff'"),
        (b"[service]\nlisten 5\n", "{}:2: expected TOML (Expected '=' after a key in a key/value pair (at line 2, "),
        (b"[service]\nlisten = [5\n", "{}:2: expected TOML (Unclosed array (at end of document)), got 'listen = [5'"),
        (b"[service]\ndrain_s = 1\ndrain_s = 2\n", "{}:3: expected TOML (Cannot overwrite a value"),
        (b"x = " + b"[" * 5000, "{}: expected tables and keys"),
        (b"x = " + b"9" * 5000, "{}: expected numbers that can be read"),
        (b"#" * (CONFIG_BYTES_MAX + 1), "{}: expected at most 1048576 bytes, got 'more'"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "t.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidConfig) as caught:
        load(path)
    assert says.format(path) in str(caught.value) and str(path) in str(caught.value)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero"), tmp_path / "a\0b"):
        with pytest.raises(InvalidConfig):
            load(path)


def with_token(path: Path, content: bytes, mode: int = 0o600) -> Config:
    path.write_bytes(content)
    path.chmod(mode)
    return Config(service=ServiceConfig(admin_token_file=str(path)))


def test_the_token_of_the_admin_is_the_line_of_its_file(tmp_path: Path) -> None:
    assert admin_token(with_token(tmp_path / "token", f"{TOKEN}\n".encode())) == TOKEN
    assert admin_token(with_token(tmp_path / "token", TOKEN.encode(), 0o440)) == TOKEN
    assert admin_token(Config()) == ""


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602])
def test_a_token_that_other_users_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    config = with_token(tmp_path / "token", TOKEN.encode(), mode)
    with pytest.raises(InvalidConfig, match=rf"service.admin_token_file: expected .* has mode {mode:o}: chmod 600"):
        require_files(config)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"secret\n", TOKEN.encode() + b" " + TOKEN.encode(), b"\xff" * 40, TOKEN.encode() * 20]
)
def test_what_is_no_token_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidConfig, match=r"service.admin_token_file: expected a file") as caught:
        require_files(with_token(tmp_path / "token", content))
    assert TOKEN not in str(caught.value) and "secret" not in str(caught.value)


def test_every_file_that_is_named_is_required(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    config = Config(service=ServiceConfig(tls_certificate=str(certificate), tls_key=str(key)))
    with pytest.raises(InvalidConfig, match=r"tls_certificate: expected a file that can be read \(No such file"):
        require_files(config)
    certificate.write_text("x")
    with pytest.raises(InvalidConfig, match="tls_key: expected a file that can be read"):
        require_files(config)
    key.write_text("x")
    key.chmod(0o644)
    with pytest.raises(InvalidConfig, match="tls_key: expected a file that others can neither read"):
        require_files(config)
    key.chmod(0o600)
    require_files(config)
    with pytest.raises(InvalidConfig, match="event_log: expected a file in a folder that is there"):
        require_files(Config(service=ServiceConfig(event_log=str(tmp_path / "none/log"))))
    with pytest.raises(InvalidConfig, match="admin_token_file: expected a file"):
        require_files(Config(service=ServiceConfig(admin_token_file=str(tmp_path))))


@pytest.mark.parametrize("journal", ["/proc/x/journal.db", "/proc/journal.db", "{}/file/journal.db", "{}"])
def test_a_journal_that_cannot_be_written_is_refused(tmp_path: Path, journal: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"service.journal: expected a file .*that can be written"):
        require_files(Config(service=ServiceConfig(journal=journal.format(tmp_path))))


def test_requiring_files_makes_none(tmp_path: Path) -> None:
    folder = tmp_path / "to" / "be" / "made"
    config = ServiceConfig(journal=str(folder / "journal.db"), event_log=str(folder / "events.jsonl"))
    require_files(Config(service=config))
    assert list(tmp_path.iterdir()) == []


# ---- what is found later ----


def test_a_later_error_is_reported_with_its_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text("[service]\n# none\nadmin_token_file = 'none'\n[[services]]\nname = 'a'\nengine = 'm:E'\n")

    def message(field: str, overridden: tuple[str, ...] = ()) -> str:
        with pytest.raises(InvalidConfig) as caught, add_error_location(path, overridden):
            raise InvalidConfig(field, "x", "y")
        assert (caught.value.value, caught.value.expected) == ("x", "y")
        return caught.value.field

    with pytest.raises(InvalidConfig) as caught, add_error_location(path):
        require_files(load(path))
    assert str(caught.value).startswith(f"{path}:3: service.admin_token_file: expected a file that can be read")
    assert message("services[0].engine") == f"{path}:6: services[0].engine"
    assert message("services[0].degrees") == f"{path}:4: services[0].degrees", "the table, where the key is not said"
    assert message("node.cores") == f"{path}: node.cores", "no line says it"
    assert message("something else") == "something else", "it is none of the config"
    assert message("service.listen", ("service.listen",)) == "service.listen", "the file does not say it"
    path.unlink()
    assert message("node.cores") == f"{path}: node.cores"


# ---- the reference ----


def test_the_example_lists_the_defaults_and_in_comments_every_key() -> None:
    text = example()
    assert parse(text, "example") == Config()
    whole = parse(uncommented(text), "example")
    assert (len(whole.quotas), len(whole.services), len(whole.devices)) == (1, 1, 1)
    assert (whole.node.cores, whole.node.memory) == (6.0, 24 << 30)
    for record in (whole.service, whole.node, whole.limits, whole.scheduler, *whole.quotas, *whole.services):
        for key in record.__struct_fields__:
            assert re.search(rf"^{key} = ", uncommented(text), flags=re.MULTILINE), key


def records() -> list[Any]:
    return [ServiceConfig, NodeConfig, RunLimits, Limits, QuotaConfig, RateConfig, ModelConfig, DeviceConfig]


@pytest.mark.parametrize("record", records(), ids=lambda record: record.__name__)
def test_every_key_has_a_sentence(record: type[msgspec.Struct]) -> None:
    assert list(sentences(record)) == list(record.__struct_fields__) == list(field_types(record))
    assert all(words.endswith(".") for words in sentences(record).values())
