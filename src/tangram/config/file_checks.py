"""Checks of the files that a config names.

Also reads the admin's token. Leaves no files behind. Promises that a service whose files passed the checks does not
fail later because one of them is missing, and that no error contains a token or a part of one.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from tangram.config.tables import Config
from tangram.errors import InvalidConfig

TOKEN_LENGTH_MIN, TOKEN_LENGTH_MAX = 32, 512
"""Characters of a token: 128 bits in hexadecimal cannot be guessed; a longer text is not a token."""
READ_BY_OTHERS, WRITTEN_BY_OTHERS = 0o004, 0o022


def require_files(config: Config) -> None:
    """Raises InvalidConfig for the first file that cannot be used. Called before anything starts."""
    service = config.service
    if service.admin_token_file:
        admin_token(config)
    if service.tls_certificate:
        _read_file("service.tls_certificate", service.tls_certificate)
        _require_private("service.tls_key", service.tls_key)
        _read_file("service.tls_key", service.tls_key)
    _require_writable("service.journal", service.journal)
    if service.event_log:
        folder = Path(service.event_log).parent
        if not folder.is_dir() and folder != Path(service.journal).parent:  # the service creates it
            raise InvalidConfig(
                "service.event_log", service.event_log, f"a file in a folder that is there, not {folder}"
            )
        _require_writable("service.event_log", service.event_log)


def _require_writable(key: str, path: str) -> None:
    """Checks that a file can be written, whether it exists or not. Of missing folders the lowest existing parent is
    tried."""
    if os.path.lexists(path) and not (os.path.isfile(path) and os.access(path, os.W_OK)):
        raise InvalidConfig(key, path, "a file that can be written")
    folder = next(each for each in Path(os.path.abspath(path)).parents if os.path.lexists(each))
    try:
        with tempfile.TemporaryFile(dir=folder):  # root may write anywhere except where files cannot exist
            pass
    except OSError as error:
        raise InvalidConfig(key, path, f"a file in a folder that can be written ({_reason(error)})") from error


def admin_token(config: Config) -> str:
    """Returns the token in the file, without its newline. Empty if the config names no file."""
    key, path = "service.admin_token_file", config.service.admin_token_file
    if not path:
        return ""
    _require_private(key, path)
    token = _read_file(key, path).strip()
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


def _require_private(key: str, path: str) -> None:
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


def _read_file(key: str, path: str) -> bytes:
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
