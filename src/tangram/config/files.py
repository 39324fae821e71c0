"""The files that a config names.

Owns their checks, and the reading of the admin's token. Leaves nothing behind. Promises that a service whose files were
required does not fail for want of one of them later on, and that no error holds a token or a part of one.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from tangram.config.tables import Config
from tangram.errors import InvalidConfig

TOKEN_LENGTH_MIN, TOKEN_LENGTH_MAX = 32, 512
"""In characters: 128 bits in hexadecimal are not guessed; more than the other is not a token."""
READ_BY_OTHERS, WRITTEN_BY_OTHERS = 0o004, 0o022


def require_files(config: Config) -> None:
    """Raises InvalidConfig for the first that cannot be used: to be called before anything starts."""
    service = config.service
    if service.admin_token_file:
        admin_token(config)
    if service.tls_certificate:
        _content("service.tls_certificate", service.tls_certificate)
        _require_secret("service.tls_key", service.tls_key)
        _content("service.tls_key", service.tls_key)
    _require_writable("service.journal", service.journal)
    if service.event_log:
        folder = Path(service.event_log).parent
        if not folder.is_dir() and folder != Path(service.journal).parent:  # which the service makes
            raise InvalidConfig(
                "service.event_log", service.event_log, f"a file in a folder that is there, not {folder}"
            )
        _require_writable("service.event_log", service.event_log)


def _require_writable(key: str, path: str) -> None:
    """Whether the file is there yet or not; of folders that are to be made, the one above them all is tried."""
    if os.path.lexists(path) and not (os.path.isfile(path) and os.access(path, os.W_OK)):
        raise InvalidConfig(key, path, "a file that can be written")
    folder = next(each for each in Path(os.path.abspath(path)).parents if os.path.lexists(each))
    try:
        with tempfile.TemporaryFile(dir=folder):  # root may write anywhere, but for what is no place for files
            pass
    except OSError as error:
        raise InvalidConfig(key, path, f"a file in a folder that can be written ({_reason(error)})") from error


def admin_token(config: Config) -> str:
    """The token that the file holds, without the end of its line; "" if the config names none."""
    key, path = "service.admin_token_file", config.service.admin_token_file
    if not path:
        return ""
    _require_secret(key, path)
    token = _content(key, path).strip()
    try:
        text = token.decode("ascii")
    except UnicodeDecodeError:
        text = ""
    if not TOKEN_LENGTH_MIN <= len(text) <= TOKEN_LENGTH_MAX or not text.isprintable() or " " in text:
        raise InvalidConfig(
            key,
            path,
            f"a file of one line, a token of {TOKEN_LENGTH_MIN} to {TOKEN_LENGTH_MAX} characters without blanks,"
            " as `openssl rand -hex 32` prints one",
        )
    return text


def _require_secret(key: str, path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise InvalidConfig(key, path, f"a file that can be read ({_reason(error)})") from error
    if not stat.S_ISREG(mode):
        raise InvalidConfig(key, path, "a file")
    if mode & (READ_BY_OTHERS | WRITTEN_BY_OTHERS):
        raise InvalidConfig(
            key, path, f"a file that others can neither read nor write, and has mode {mode & 0o777:o}: chmod 600 it"
        )


def _content(key: str, path: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InvalidConfig(key, path, "a file")
        with open(path, "rb") as file:
            content = file.read(1 << 20)
    except (OSError, ValueError) as error:
        raise InvalidConfig(key, path, f"a file that can be read ({_reason(error)})") from error
    if not content:
        raise InvalidConfig(key, path, "a file that is not empty")
    return content


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
