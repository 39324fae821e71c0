"""`tangram run`: one command as an action, in a sandbox of its own.

Owns the translation of a command line into an action, and of its result into an exit code. The output of the command
is streamed; a slow reader slows the command down.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tangram.cli import options, show
from tangram.errors import ActionFailed, AdmissionRefused, FileFailed, InvalidConfig, ManagerError, TangramError

if TYPE_CHECKING:
    from tangram.client.client import Client
    from tangram.client.result import Result
    from tangram.core.sizes import Cpus

CONTEXT = {"allow_interspersed_args": False}
"""Options after the command belong to the command."""

EXIT_TIMED_OUT, EXIT_TANGRAM_FAILED, EXIT_CANCELLED = 124, 125, 130
"""The exit codes of `timeout` and `docker run`. Any other is that of the command."""
STDIN_BYTES_MAX = 256 << 20
"""Standard input is read to its end before the command starts."""
CAPTURE_BYTES = 4096
"""Bytes of forwarded output that are kept: they contain the reason why a command could not be started."""
PATH_STARTS, TAR_ENDS = ("/", "./", "../"), (".tar", ".tar.gz", ".tgz")
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
SIGNALS = (signal.SIGINT, signal.SIGTERM)

EXAMPLES = """[bold]Examples[/bold]

tangram run -- python3 -c 'print(6 * 7)'

tangram run "nproc && whoami"  [dim]# a single argument with spaces runs in a shell[/dim]

tangram run --cpus 1-4 --timeout 60 --upload project -- make -C project -j{cpus}

tangram run --image python.tar --user root --json -- pip list

tangram run --download result.csv:out -- sort -o result.csv /etc/passwd
"""


class RunOptions(NamedTuple):
    """The parsed command line."""

    command: str | list[str]
    backend: str
    image: str
    sandbox: dict[str, Any]
    """Arguments of `Client.sandbox`."""
    action: dict[str, Any]
    """Arguments of `Sandbox.exec`."""
    uploads: list[Path]
    downloads: list[tuple[str, Path]]
    as_json: bool


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="CMD",
            help="The command. Several words are executed without a shell; a single one with spaces runs in a shell."
            " {cpus} is replaced with the number of granted cores.",
        ),
    ],
    cpus: Annotated[
        str | None,
        typer.Option(
            "--cpus",
            metavar="N|A-B",
            help="Number of cores, or minimum and maximum. Default: learned from measured use.",
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory of the sandbox, including the files that it writes.")
    ] = "1GiB",
    disk: Annotated[str, typer.Option("--disk", metavar="SIZE", help="Limit of the files that it writes.")] = "512MiB",
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="Time limit, from the start of the command. Default: none."),
    ] = None,
    image: Annotated[
        str,
        typer.Option(
            "--image",
            metavar="IMAGE",
            help="A root directory, a tar archive in `docker save` or OCI format, or the name of an image; host is"
            " the /usr of this machine.",
        ),
    ] = "host",
    network: Annotated[
        bool, typer.Option("--network", metavar="", help="Use the network of this machine. Default: no network.")
    ] = False,
    user: Annotated[
        str,
        typer.Option(
            "--user", metavar="agent|root", help="The user of the command; root has privileges only inside the sandbox."
        ),
    ] = "agent",
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="KEY=VALUE", help="An environment variable. Several may be given."),
    ] = None,
    cwd: Annotated[
        str, typer.Option("--cwd", metavar="DIR", help="The working directory. Default: /work, the workspace.")
    ] = "",
    stdin: Annotated[
        bool, typer.Option("--stdin", metavar="", help="Pass standard input to the command, unless it is a terminal.")
    ] = False,
    upload: Annotated[
        list[Path] | None,
        typer.Option(
            "--upload",
            metavar="PATH",
            help="Copy a file or directory into the workspace before the command. Several may be given.",
        ),
    ] = None,
    download: Annotated[
        list[str] | None,
        typer.Option(
            "--download",
            metavar="PATH:DIR",
            help="Copy a file or directory of the sandbox to a local directory afterwards. Several may be given.",
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", metavar="NAME", help="sandbox, docker, or process, which isolates nothing.")
    ] = "sandbox",
    key: Annotated[
        str,
        typer.Option(
            "--key", metavar="WORD", help="The key of the action in the trace: one name for commands that behave alike."
        ),
    ] = "",
    summary: Annotated[
        bool,
        typer.Option(
            "--summary", "--verbose", metavar="", help="Print a one-line summary on stderr. Default on a terminal."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Run one command as an action, in a fresh sandbox that is deleted afterwards.

    Options come before the command. Its output is streamed. Ctrl-C ends it and deletes the sandbox.

    Exits with the exit code of the command, 124 after a timeout, 125 if Tangram refuses or loses the action, and 130
    after Ctrl-C.
    """
    run_options = RunOptions(
        command=command[0] if len(command) == 1 and re.search(r"\s", command[0].strip()) else command,
        backend=backend,
        image=_image(image),
        sandbox=dict(memory=memory, disk=disk, network=network, user=user),
        action=dict(
            cpus=_cpus(cpus), timeout_s=timeout, cwd=cwd, key=key, env=_environment(env or []), stdin=_stdin(stdin)
        ),
        uploads=_uploads(upload or []),
        downloads=[_download(each) for each in download or []],
        as_json=as_json,
    )
    result, code = _execute(run_options)
    if result is not None:
        _print_result(result, run_options, summary=summary or (sys.stderr.isatty() and not as_json))
    raise typer.Exit(code)


# ---- reading --------------------------------------------------------------------------------------------------


def _cpus(text: str | None) -> Cpus:
    if text is None:
        return None
    match = re.fullmatch(rf"({_NUMBER})(?:-({_NUMBER}))?", text)
    if match is not None:
        return float(match[1]) if match[2] is None else (float(match[1]), float(match[2]))
    raise InvalidConfig("cpus", text, "a number of cores such as 2 or 0.5, or a minimum and a maximum, such as 1-4")


def _environment(texts: list[str]) -> dict[str, str]:
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidConfig("env", text, "KEY=VALUE")
        variables[name] = value
    return variables


def _stdin(read: bool) -> bytes:
    if not read or sys.stdin is None or sys.stdin.isatty():
        return b""
    content = sys.stdin.buffer.read(STDIN_BYTES_MAX + 1)
    if len(content) > STDIN_BYTES_MAX:
        raise InvalidConfig("stdin", "more", f"at most {STDIN_BYTES_MAX >> 20} MiB; write a file and --upload that")
    return content


def _uploads(paths: list[Path]) -> list[Path]:
    for path in paths:
        _require_path("upload", path, "a file or directory that exists")
    return paths


def _require_path(option: str, path: Path, expected: str) -> None:
    if not path.exists():
        raise InvalidConfig(option, str(path), f"{expected} (no such file or directory)")


def _image(text: str) -> str:
    """Whether a root is a path. Names of images contain slashes too, but do not begin with one or a dot."""
    if text.startswith(PATH_STARTS) or text.endswith(TAR_ENDS):
        _require_path("image", Path(text), "a root directory or tar that exists, or the name of an image")
    return text


def _download(text: str) -> tuple[str, Path]:
    path, colon, target = text.rpartition(":")
    if not path or not colon or not target:
        raise InvalidConfig("download", text, "PATH:DIR, a path in the sandbox and a directory here")
    return path, Path(target)


# ---- execution ------------------------------------------------------------------------------------------------


def _execute(options: RunOptions) -> tuple[Result | None, int]:
    """The result and the exit code; None if a signal ended it."""
    if options.backend == "sandbox" and os.geteuid() != 0:
        reason = "sandboxes need root; use sudo, or --backend process, which isolates nothing"
        return _unstarted_result(options, "refused", reason), EXIT_TANGRAM_FAILED
    try:
        return asyncio.run(_execute_async(options))
    except AdmissionRefused as error:
        return _unstarted_result(options, "refused", error.reason), EXIT_TANGRAM_FAILED
    except (ManagerError, ActionFailed, FileFailed) as error:
        return _unstarted_result(options, "lost", str(error)), EXIT_TANGRAM_FAILED


def _unstarted_result(options: RunOptions, status: str, reason: str) -> Result:
    """The result of an action that was never submitted."""
    from tangram.client.result import result_of
    from tangram.core.action import Outcome, Status

    shown = options.command if isinstance(options.command, str) else " ".join(options.command)
    return result_of(shown, Outcome(action="", status=Status(status), reason=reason), None)


class _SignalHandler:
    """The first signal requests a stop, which waits for the end of the action; further signals are ignored."""

    def __init__(self, stop: asyncio.Future[None]) -> None:
        self.signal = 0
        self._stop = stop

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            if not self.signal:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        self.signal = number
        self._stop.get_loop().call_soon_threadsafe(_request_stop, self._stop)


class _LiveOutput:
    """Forwards the output of a program. Requests a stop if it cannot be written."""

    def __init__(self, stop: asyncio.Future[None]) -> None:
        self.error: OSError | None = None
        self._stop = stop
        self._bytes = {"stdout": 0, "stderr": 0}

    def __call__(self, stream: str, data: bytes) -> None:
        self._bytes[stream] += len(data)
        target = sys.stdout if stream == "stdout" else sys.stderr
        if self.error is not None or target is None:  # None: the caller has closed it
            return
        try:
            target.buffer.write(data)
            target.buffer.flush()
        except OSError as error:
            self.error = error
            _request_stop(self._stop)

    def finish(self, result: Result) -> None:
        """The message that was added at the end: why the program did not start."""
        executed = result.executed
        added = executed.stderr_bytes - self._bytes["stderr"]
        if added > 0:
            self("stderr", executed.stderr[-added:])


def _request_stop(stop: asyncio.Future[None]) -> None:
    if not stop.done():
        stop.set_result(None)


async def _execute_async(options: RunOptions) -> tuple[Result | None, int]:
    stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    interruption, live = _SignalHandler(stop), _LiveOutput(stop)
    with interruption.installed():
        from tangram.client.client import connect  # takes a while: a signal meanwhile must not cancel the connecting

        # Connecting and closing are not interrupted: both are short, and only complete ones leave nothing behind.
        async with connect(backend=options.backend) as client:
            doing = asyncio.ensure_future(_execute_in_sandbox(client, options, live))
            stop.add_done_callback(lambda _: doing.cancel())
            await asyncio.wait({doing})
    if live.error is not None:
        raise live.error
    if interruption.signal and (doing.cancelled() or doing.exception() is not None):
        return None, 128 + interruption.signal
    return doing.result()


async def _execute_in_sandbox(client: Client, options: RunOptions, live: _LiveOutput) -> tuple[Result, int]:
    is_path = options.image != "host" and os.path.exists(options.image)  # noqa: ASYNC240 - one look at a local disk
    image = await client.image(options.image) if is_path else options.image
    output: dict[str, Any] = {} if options.as_json else {"capture": CAPTURE_BYTES, "on_output": live}
    async with client.sandbox(image=image, **options.sandbox) as sandbox:
        for path in options.uploads:
            await sandbox.upload(path)
        result = await sandbox.exec(options.command, **options.action, **output)
        if not options.as_json:
            live.finish(result)
        code = _exit_code(result)
        for source, target in options.downloads:
            try:
                await sandbox.download(source, target)
            except TangramError as error:
                typer.echo(f"tangram: not downloaded: {error}", err=True)
                code = code or EXIT_TANGRAM_FAILED
    return result, code


def _exit_code(result: Result) -> int:
    from tangram.core.action import Status

    if result.status is Status.SUCCEEDED:
        assert result.exit_code is not None
        return result.exit_code
    return {Status.TIMED_OUT: EXIT_TIMED_OUT, Status.CANCELLED: EXIT_CANCELLED}.get(result.status, EXIT_TANGRAM_FAILED)


# ---- printing -------------------------------------------------------------------------------------------------


def _print_result(result: Result, options: RunOptions, *, summary: bool) -> None:
    if options.as_json:
        show.print_json(_as_dict(result, options))
    elif result.reason:
        typer.echo(f"tangram: {_status_text(result)}: {result.reason}", err=True)
    if result.out_of_memory and not options.as_json:
        used_up = f"the sandbox has used up its memory of {options.sandbox['memory']}, and a process in it was killed"
        typer.echo(f"tangram: {used_up}; increase --memory", err=True)
    if summary:
        typer.echo(f"tangram: {_summary(result)}", err=True)


def _status_text(result: Result) -> str:
    return result.status.value.replace("_", " ")


def _summary(result: Result) -> str:
    ended = f" with {result.exit_code}" if result.exit_code is not None else ""
    timing, usage = result.timing, result.usage
    return (
        f"{_status_text(result)}{ended}, waited {timing.waiting_s:.2f} s, ran {timing.execution_s:.2f}"
        f" s, cpu {usage.cpu_s:.2f} s, peak memory {usage.memory_peak_bytes / (1 << 20):.1f} MiB"
    )


def _as_dict(result: Result, options: RunOptions) -> dict[str, Any]:
    import msgspec

    executed = result.executed
    return {
        "label": "measured",
        "command": options.command,
        "backend": options.backend,
        "status": result.status.value,
        "reason": result.reason,
        "exit_code": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "stdout_bytes": executed.stdout_bytes,
        "stderr_bytes": executed.stderr_bytes,
        "cpus": result.cpus,
        "out_of_memory": result.out_of_memory,
        "timing": {**msgspec.structs.asdict(result.timing), "act_s": result.timing.act_s},
        "usage": result.usage,
        "attempts": result.attempts,
    }
