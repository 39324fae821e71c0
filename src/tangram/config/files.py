"""The files that a config names.

Owns their checks, and the reading of the admin's token. Never writes. Promises that a service whose files were required
does not fail for want of one of them later on, and that no error holds a token or a part of one.
"""

from __future__ import annotations

import os
import stat
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
    if service.event_log:
        folder = Path(service.event_log).parent
        if not folder.is_dir():
            raise InvalidConfig(
                "service.event_log", service.event_log, f"a file in a folder that is there, not {folder}"
            )
        if Path(service.event_log).is_dir():
            raise InvalidConfig("service.event_log", service.event_log, "a file, not a directory")


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
