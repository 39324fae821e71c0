"""Children in tests of the fork server. Importing it records which process imported it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

IMPORTED_BY = os.getpid()


def main(fd: int) -> None:
    """Executes the words it receives, one by one."""
    line = socket.socket(fileno=fd)
    while word := line.recv(1000).decode():
        if word == "who":
            description = {
                "pid": os.getpid(), "session": os.getsid(0), "parent": os.getppid(), "by": IMPORTED_BY,
                "cwd": os.getcwd(), "env": dict(os.environ), "path": sys.path,
                "fds": sorted(os.listdir("/proc/self/fd")),
            }  # fmt: skip
            line.send(json.dumps(description).encode())
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
