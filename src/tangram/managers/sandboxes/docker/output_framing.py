r"""Marks: how the begin and the end of a command are told in the middle of its output.

Owns the scripts that run commands in a container, and the reading of what they print. An engine tells late that a
program has ended when something that it left behind holds its streams open, and never tells where its output ends. So
a small script runs it and prints, to both streams, a mark before it and a mark with its exit code after it. What stands
between them is the output of the command, whole, and the exit code comes with its last byte. Beside it stand the CPU
and the peak of memory that the container has used so far, as seen from inside.

Each mark is one line, written at once, so that nothing else can stand in the middle of it:

    \0begin TOKEN CPU_US PEAK_BYTES
    \0end TOKEN EXIT_CODE CPU_US PEAK_BYTES      the exit code with an x before it: the shell has ended with it

A program that prints the mark of its own end ends its own action early: what goes on of it is then what the action has
left running, as of any action. It gains nothing, but what it says is believed of nothing else.

Only `sh` is needed in an image, for sessions `bash`.
"""

from __future__ import annotations

import re

BEGIN = b"\0begin "
END = b"\0end "
"""Programs that print text print no NUL."""
REST_BYTES_MAX = 64
"""Of a mark, after the token."""
STRAY_BYTES_MAX = 4096
"""Kept of what comes before the begin: why the engine could not start the program."""

TOKEN = "TANGRAM_ACTION"
"""The variable by which all processes of an action are known, wherever they went."""

_BEGIN_REST = re.compile(rb"(\d{1,19}) (\d{1,19})\n")
_END_REST = re.compile(rb"(x?)(\d{1,3}) (\d{1,19}) (\d{1,19})\n")

USED = r"""
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
"""Control groups of version 1, or of version 2. Without a process of its own, which would cost more than it tells."""

RUN_SCRIPT = (
    r"""
exec 3>&2 2>/dev/null
trap : HUP INT QUIT TERM USR1 USR2
t=$1 m=$2 d=$3
shift 3
"""
    + USED
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
"""Arguments: token, mask of cores or nothing, directory, words. What the shell itself has to say about a signal that
ended the command is not output of the command and goes nowhere. Since the words stand in its own command line too, it
outlives a `pkill -f` that means something else."""

SESSION_SCRIPT = (
    USED
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
"""Reads token, set-up and command, each ended by NUL. The command has neither the channel that commands come from nor
those that the marks go to. Its end is told where the next command is asked for: a command that says `break` or
`continue` means these loops, and gets there all the same. One that says `exit` is told by the trap, unless it set its
own; then the engine tells it, later."""


class Marked:
    """One stream of a script: what stands between the two marks is passed on."""

    def __init__(self, token: str) -> None:
        self._begin = BEGIN + token.encode() + b" "
        self._end = END + token.encode() + b" "
        self._held = b""
        self.stray = b""
        self.begun = False
        self.exit_code: int | None = None
        """Known from the end on."""
        self.shell_ended = False
        self.cpu_us = 0
        """Used between the marks."""
        self.peak_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Of all that came so far, the part that is output and was not passed on yet."""
        if self.exit_code is not None:
            return b""
        data = self._held + data
        self._held = b""
        if not self.begun:
            found, before, rest = self._find(data, self._begin, _BEGIN_REST)
            self.stray = (self.stray + before)[:STRAY_BYTES_MAX]
            if found is None:
                return b""
            self.begun = True
            self.cpu_us = int(found[1])
            data = rest
        found, before, _ = self._find(data, self._end, _END_REST)
        if found is not None:
            self.shell_ended = bool(found[1])
            self.exit_code = int(found[2])
            self.cpu_us = max(0, int(found[3]) - self.cpu_us)
            self.peak_bytes = int(found[4])
        return before

    def _find(self, data: bytes, start: bytes, rest: re.Pattern[bytes]) -> tuple[re.Match[bytes] | None, bytes, bytes]:
        """The mark, and what stands before and after it. What may be the beginning of one is held back."""
        at = data.find(start)
        while at >= 0:
            after = at + len(start)
            found = rest.match(data, after)
            if found is not None:
                return found, data[:at], data[found.end() :]
            if len(data) - after < REST_BYTES_MAX and b"\n" not in data[after:]:
                self._held = data[at:]
                return None, data[:at], b""
            at = data.find(start, at + 1)
        keep = _overlap(data, start)
        self._held = data[len(data) - keep :]
        return None, data[: len(data) - keep], b""

    def rest(self) -> bytes:
        """What was held back because a mark might have begun there, once nothing more comes."""
        held, self._held = self._held, b""
        if self.begun:
            return held
        self.stray = (self.stray + held)[:STRAY_BYTES_MAX]
        return b""


def _overlap(data: bytes, mark: bytes) -> int:
    """How many bytes at the end of the data may be the beginning of the mark."""
    for size in range(min(len(mark) - 1, len(data)), 0, -1):
        if mark.startswith(data[-size:]):
            return size
    return 0


def run_words(token: str, mask: str, directory: str, words: tuple[str, ...]) -> list[str]:
    """The command line that runs the words with marks around their output."""
    return ["sh", "-c", RUN_SCRIPT, "tangram", token, mask, directory, *words]


def session_words() -> list[str]:
    return ["bash", "--noprofile", "--norc", "-c", SESSION_SCRIPT, "tangram"]


def session_message(token: str, setup: str, command: str) -> bytes:
    return b"".join(part.encode() + b"\0" for part in (token, setup, command))
