r"""Output framing: marks that delimit the output of a command in the streams of a container.

Owns the scripts that run commands in a container, and the parser of their output. An engine reports the end of a
program late if background processes hold its streams, and never reports where its output ends. So a small script runs
the command, and prints a mark before it and a mark with its exit code after it, to both streams. The text between them
is the complete output, and the exit code comes right after its last byte. The marks also contain the CPU time and the
memory peak of the container so far, as seen from inside.

Each mark is one line in one write, so that no other output can appear within it:

    \0begin TOKEN CPU_US PEAK_BYTES
    \0end TOKEN EXIT_CODE CPU_US PEAK_BYTES      an x before the exit code: the shell has ended with the command

A program that prints its own end mark ends its own action early: what it does afterwards counts as a background
process. It gains nothing, and affects no other action.

An image needs only `sh`, and `bash` for sessions.
"""

from __future__ import annotations

import re

from tangram.processes.streams import mark_overlap

BEGIN = b"\0begin "
END = b"\0end "
"""Programs that print text print no NUL."""
REST_BYTES_MAX = 64
"""The length of a mark after the token."""
PREAMBLE_BYTES_MAX = 4096
"""Bytes kept of the output before the begin mark: why the engine could not start the program."""

TOKEN_VARIABLE = "TANGRAM_ACTION"
"""The variable that identifies all processes of an action."""

_BEGIN_REST = re.compile(rb"(\d{1,19}) (\d{1,19})\n")
_END_REST = re.compile(rb"(x?)(\d{1,3}) (\d{1,19}) (\d{1,19})\n")

USAGE_SCRIPT = r"""
__tangram_used() {
  __tangram_cpu=0 __tangram_peak=0
  if read -r __tangram_cpu </sys/fs/cgroup/cpuacct/cpuacct.usage; then
    __tangram_cpu=$((__tangram_cpu / 1000))
  else
    read -r __tangram_key __tangram_cpu </sys/fs/cgroup/cpu.stat
  fi
  read -r __tangram_peak </sys/fs/cgroup/memory/memory.max_usage_in_bytes ||
    read -r __tangram_peak </sys/fs/cgroup/memory.peak
  __tangram_used="${__tangram_cpu:-0} ${__tangram_peak:-0}"
} 2>/dev/null
"""
"""Control groups of version 1, or of version 2. Only with builtins of the shell, because a process would cost more than
it measures."""

RUN_SCRIPT = (
    r"""
exec 3>&2 2>/dev/null
trap : HUP INT QUIT TERM USR1 USR2
t=$1 m=$2 d=$3
shift 3
"""
    + USAGE_SCRIPT
    + r"""
__tangram_used
printf '\000begin %s %s\n' "$t" "$__tangram_used"
printf '\000begin %s %s\n' "$t" "$__tangram_used" >&3
(exec 2>&3 3>&-; cd -- "$d" || exit 126; exec ${m:+taskset "$m"} "$@")
s=$?
__tangram_used
printf '\000end %s %d %s\n' "$t" "$s" "$__tangram_used"
printf '\000end %s %d %s\n' "$t" "$s" "$__tangram_used" >&3
exit "$s"
"""
)
"""Arguments: token, mask of CPUs or nothing, directory, words. The shell's own message about a signal that ended the
command is not output of the command, and is discarded. Because the words are also in its own command line, it ignores
the signals of a `pkill -f` that is meant for them."""

SESSION_SCRIPT = (
    USAGE_SCRIPT
    + r"""
__tangram_exit() {
  __tangram_status=$?
  if [ -n "$__tangram_token" ]; then
    __tangram_used
    printf '\0end %s x%d %s\n' "$__tangram_token" "$__tangram_status" "$__tangram_used"
    printf '\0end %s x%d %s\n' "$__tangram_token" "$__tangram_status" "$__tangram_used" >&2
  fi
}
trap __tangram_exit EXIT
exec 7>&2 8<&0 9>&1 </dev/null
__tangram_token=
while :; do
  while
    __tangram_status=$?
    if [ -n "$__tangram_token" ]; then
      __tangram_used
      printf '\0end %s %d %s\n' "$__tangram_token" "$__tangram_status" "$__tangram_used" >&7
      printf '\0end %s %d %s\n' "$__tangram_token" "$__tangram_status" "$__tangram_used" >&9
      __tangram_token=
    fi
    IFS= read -r -d '' -u 8 TANGRAM_ACTION || exit 0
    IFS= read -r -d '' -u 8 __tangram_setup || exit 0
    IFS= read -r -d '' -u 8 __tangram_command || exit 0
    export TANGRAM_ACTION
    __tangram_token=$TANGRAM_ACTION
    eval "$__tangram_setup"
    __tangram_used
    printf '\0begin %s %s\n' "$__tangram_token" "$__tangram_used" >&7
    printf '\0begin %s %s\n' "$__tangram_token" "$__tangram_used" >&9
  do
    eval "$__tangram_command" 7>&- 8<&- 9>&-
  done
done
"""
)
"""Reads token, set-up and command, each ended by NUL. The command inherits neither the pipe of commands nor the
descriptors of the marks. The end mark is printed where the next command is read, so that a `break` or `continue` in a
command, which affects these loops, reaches it too. For `exit` the trap prints it; if the command replaced the trap, the
engine reports the end, later."""


class FrameParser:
    """One stream of a script: returns what is between the two marks."""

    def __init__(self, token: str) -> None:
        self._begin = BEGIN + token.encode() + b" "
        self._end = END + token.encode() + b" "
        self._pending = b""
        self.preamble = b""
        self.started = False
        self.exit_code: int | None = None
        """Known once the end mark is read."""
        self.shell_ended = False
        self.cpu_us = 0
        """CPU time used between the marks."""
        self.peak_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Returns the new output."""
        if self.exit_code is not None:
            return b""
        data = self._pending + data
        self._pending = b""
        if not self.started:
            at, before, rest = self._find(data, self._begin, _BEGIN_REST)
            self.preamble = (self.preamble + before)[:PREAMBLE_BYTES_MAX]
            if at is None:
                return b""
            self.started = True
            self.cpu_us = int(at[1])
            data = rest
        at, before, _ = self._find(data, self._end, _END_REST)
        if at is not None:
            self.shell_ended = bool(at[1])
            self.exit_code = int(at[2])
            self.cpu_us = max(0, int(at[3]) - self.cpu_us)
            self.peak_bytes = int(at[4])
        return before

    def _find(self, data: bytes, start: bytes, rest: re.Pattern[bytes]) -> tuple[re.Match[bytes] | None, bytes, bytes]:
        """The mark, and the text before and after it. A partial mark at the end is held back."""
        at = data.find(start)
        while at >= 0:
            after = at + len(start)
            match = rest.match(data, after)
            if match is not None:
                return match, data[:at], data[match.end() :]
            if len(data) - after < REST_BYTES_MAX and b"\n" not in data[after:]:
                self._pending = data[at:]
                return None, data[:at], b""
            at = data.find(start, at + 1)
        keep = mark_overlap(data, start)
        self._pending = data[len(data) - keep :]
        return None, data[: len(data) - keep], b""

    def flush(self) -> bytes:
        """The text that was held back as a possible mark, once the stream has ended."""
        held, self._pending = self._pending, b""
        if self.started:
            return held
        self.preamble = (self.preamble + held)[:PREAMBLE_BYTES_MAX]
        return b""


def run_argv(token: str, mask: str, directory: str, words: tuple[str, ...]) -> list[str]:
    """The command line that runs the words with marks around their output."""
    return ["sh", "-c", RUN_SCRIPT, "tangram", token, mask, directory, *words]


def session_argv() -> list[str]:
    return ["bash", "--noprofile", "--norc", "-c", SESSION_SCRIPT, "tangram"]


def session_message(token: str, setup: str, command: str) -> bytes:
    return b"".join(part.encode() + b"\0" for part in (token, setup, command))
