"""Reaching a service: what is said to people when it does not answer as was meant.

Owns these sentences, which the SDK and the verbs of the command line share. Asks nobody anything.
"""

from __future__ import annotations

import os


def no_service(url: str, why: str) -> str:
    return f"there is no service at {url} ({why}): start one with `tangram serve`, or say where it is"


def reason(error: OSError) -> str:
    """Why nobody could be connected to."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)


def unknown_token(url: str) -> str:
    return f"{url} does not know this token: it was revoked, or is that of another service"


def wants_token(url: str, how: str) -> str:
    return f"{url} wants a token: {how}"


def without_tls(url: str) -> str:
    return f"{url} does not speak TLS: its address may begin with http://"


def broken_off(url: str, why: str) -> str:
    hint = "" if url.startswith("https") else "; if it speaks TLS, its address begins with https://"
    return f"{url} broke off its answer ({why}){hint}"
