"""The protocol between a spawner and its owner, and the socket for the next owner.

Messages are packets (processes/packets.py). A request of the owner has an `id`, the kind `do`, and these fields:

    begin        filter (system calls, in hexadecimal), groups (of the owner), outlives   -> pid
    open         box, groups, prepare (mount steps), init, argv, env, uid, rlimits        -> init (its process id)
    close        box                                                                      -> reply without fields
    copy         box, source, target                                                      -> reply without fields
    exec, file   box, groups, reports_pid; for the shell of a named owner's session also session and held, the number
                 of its streams among the descriptors. A second line holds the command, which the spawner passes to a
                 runner unread                                                            -> pid if reports_pid; `exit`
    abandon      request: the `id` of an exec or file whose caller no longer waits        -> reply without fields
    drain        box; the descriptors are streams to read and discard                     -> no reply
    end_session  box, session: the caller was notified of the end of its shell            -> no reply

The spawner sends replies, with the `id` of the request and `error` if it failed; `exit` with the `id` of a program or
file work that has ended, and its `code`, its result `ok`, or `error` and `errno`; `gone` with the name of a sandbox
that has ended, and its `code`; and to the next owner first a greeting: protocol, number (of the last request), boxes.

Standard library only.
"""

from __future__ import annotations

PROTOCOL = 3
"""Version of the messages. Increase it whenever a message of an earlier owner could be misinterpreted."""
FDS_MAX = 8
"""Descriptors in one request."""
SOCKET_NAME = "socket"
"""The socket on which a spawner without an owner listens, in the directory of the owner."""
