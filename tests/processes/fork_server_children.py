"""What is born in tests of the nursery. Importing it takes a mark, so that it can be told who imported."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

IMPORTED_BY = os.getpid()


def main(fd: int) -> None:
    """Does what it is told, word by word."""
    line = socket.socket(fileno=fd)
    while word := line.recv(1000).decode():
        if word == "who":
            said = {
                "pid": os.getpid(), "session": os.getsid(0), "parent": os.getppid(), "by": IMPORTED_BY,
                "cwd": os.getcwd(), "env": dict(os.environ), "path": sys.path,
                "fds": sorted(os.listdir("/proc/self/fd")),
            }  # fmt: skip
            line.send(json.dumps(said).encode())
        elif word == "speak":
            print("on stdout", flush=True)
            print("on stderr", file=sys.stderr)
            line.send(b"{}")
        elif word == "raise":
            raise ValueError("it went wrong")
        elif word == "exit like killed":
            os._exit(137)
        elif word == "exit":
            sys.exit(7)
        elif word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "leave a daemon" and os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                line.send(json.dumps(os.getpid()).encode())
                signal.pause()
            os._exit(0)
