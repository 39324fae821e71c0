"""Error messages for a service that does not respond as expected, shared by the SDK and the command line."""

from __future__ import annotations


def no_service(url: str, why: str) -> str:
    return f"no service responds at {url} ({why}): start one with `tangram serve`, or give its address"


def unknown_token(url: str) -> str:
    return f"{url} rejects this token: it was revoked, or belongs to another service"


def token_required(url: str, how: str) -> str:
    return f"{url} requires a token: {how}"


def without_tls(url: str) -> str:
    return f"{url} does not speak TLS: try an address with http://"


def broken_off(url: str, why: str) -> str:
    hint = "" if url.startswith("https") else "; if it speaks TLS, use an address with https://"
    return f"{url} closed the connection during its response ({why}){hint}"
