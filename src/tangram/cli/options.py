"""Options that several verbs share, and how they are parsed.

Owns the parsing of lists, sizes and `key=value`. Raises InvalidConfig with the option, the value and what is valid.
Imports the simulator only when it is needed, so that `--help` stays fast.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tangram.errors import InvalidConfig

if TYPE_CHECKING:
    from tangram.sim.compare import Source
    from tangram.sim.episode import Workload
    from tangram.sim.size import Size

EXIT_META = "tangram.exit_code"
"""The key of `ctx.meta` with the exit code of a verb that fails after it has started its work."""
BATCHES = {"coding": 128, "search": 64, "teachers": 1024, "mixed": 384, "elastic": 1000}
"""Trajectories when --batch is not given: a comparison over five seeds then takes seconds."""
UNITS = 32
"""The arrival rate of independent rewards fits this number of cores, unless --option units is given."""
SEEDS = 5
"""Three suffice for means; with five, the interval of Student's t is half as wide."""

WorkloadName = Annotated[
    str | None,
    typer.Argument(
        metavar="WORKLOAD",
        help="coding, search, teachers, mixed or elastic. Default, without --trace: coding.",
    ),
]
Traces = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Play a recording instead: a CSV trace, or a file that --record wrote. Several may be given.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="N",
        help="Number of trajectories; a trace is sampled by whole trajectories. Default: "
        + ", ".join(f"{count} for {name}" for name, count in BATCHES.items())
        + "; each trajectory of a trace once.",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes", metavar="N", help="Machines that share the cores evenly. Default: 1; for a recording, its own."
    ),
]
Memory = Annotated[
    float | None,
    typer.Option("--memory-per-core", metavar="GIB", help="Memory of a node per core. Default: 9.4."),
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices",
        metavar="N",
        help="GPUs, on separate machines of eight. Default: four per model service, or the nearest number that it"
        " supports; for a recording, its own.",
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        "--seeds",
        metavar="N|LIST",
        help=f"Number of seeds, counted from 0, or a list such as 4,7 (a single seed: 7,). Default: {SEEDS}; 1 for a"
        " trace without --batch.",
    ),
]
KnowledgeOf = Annotated[
    str,
    typer.Option(
        "--knowledge",
        metavar="WHAT",
        help="What the scheduler knows beforehand: learned (nothing), hints (durations) or perfect.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the workload or trace, such as load=0.9."),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write the report as a single HTML file. Creates its folder."),
]
Perfetto = Annotated[
    Path | None,
    typer.Option(
        "--perfetto",
        metavar="FILE",
        help="Write the timeline as a Chrome trace (JSON) to open in https://ui.perfetto.dev. Creates its folder.",
    ),
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON and nothing else on stdout.")]
WorkerCount = Annotated[
    int | None, typer.Option("--workers", metavar="N", help="Processes that share the work. Default: one per core.")
]


# ---- groups of options ------------------------------------------------------------------------------------------


def option_group(**readers: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare options that several verbs share: each named parameter of the verb becomes the options of its reader.

        @option_group(target=parse_target)
        def status(target: ServiceTarget, as_json: Json = False) -> None:

    The command has the options of `parse_target`; the verb gets what `parse_target` returns for them.
    """

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
            reader = readers.get(name)
            declared = [parameter] if reader is None else inspect.signature(reader, eval_str=True).parameters.values()
            parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in declared]

        def command(**values: Any) -> Any:
            read = {}
            for name, reader in readers.items():
                read[name] = reader(**{option: values.pop(option) for option in inspect.signature(reader).parameters})
            return verb(**values, **read)

        command.__name__, command.__doc__, command.__module__ = verb.__name__, verb.__doc__, verb.__module__
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


# ---- reading --------------------------------------------------------------------------------------------------


class WorkloadRequest(NamedTuple):
    """The workload of a verb, and the pools for it."""

    source: Source
    seeds: tuple[int, ...]
    first: Workload
    """The workload under the first seed."""
    sizes: list[Size]
    """A size for each number of cores."""


def workload_request(
    workload: str | None,
    traces: list[Path] | None,
    batch: int | None,
    chosen: list[str] | None,
    seeds: str | None,
    cores: str | None,
    nodes: int | None,
    memory: float | None,
    devices: int | None,
) -> WorkloadRequest:
    """Read the options that `sim` and `plan` share."""
    from tangram.sim.compare import build_workload

    source = _source(workload, traces, batch, chosen)
    numbers = _parse_seeds(seeds, source)
    first = build_workload(source, numbers[0])
    return WorkloadRequest(source, numbers, first, _sizes(source, first, cores, nodes, memory, devices))


def _source(workload: str | None, traces: list[Path] | None, batch: int | None, chosen: list[str] | None) -> Source:
    from tangram.sim.compare import Source
    from tangram.sim.workloads import WORKLOADS, options

    if batch is not None:
        options.check_integer("batch", batch)
    read = tuple(parse_key_values(chosen).items())
    if traces:
        if workload is not None:
            raise InvalidConfig("workload", workload, "either a workload or --trace")
        return Source(traces=tuple(map(str, traces)), batch=batch, options=read)
    name = "coding" if workload is None else workload
    options.check_choice("workload", name, WORKLOADS)
    return Source(workload=name, batch=BATCHES[name] if batch is None else batch, options=read)


def parse_key_values(chosen: list[str] | None) -> dict[str, Any]:
    """Parse the values of `--option KEY=VALUE`."""
    read = [_parse_option(text) for text in chosen or ()]
    if len(dict(read)) < len(read):
        raise InvalidConfig("option", " ".join(chosen or ()), "each key once")
    return dict(read)


def _parse_option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidConfig("option", text, "KEY=VALUE")
    return key.replace("-", "_"), _parse_value(value)


def _parse_value(text: str) -> Any:
    """Parses a number, true, false, none or a list of these with commas; returns other text unchanged."""
    if "," in text:
        return tuple(_parse_value(part) for part in text.split(",") if part)
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parse_names(option: str, text: str) -> tuple[str, ...]:
    """Parses names with commas between them, each once."""
    values = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not values:
        raise InvalidConfig(option, text, f"names with commas between them; without --{option}: the defaults")
    return values


def parse_integers(option: str, text: str, least: int = 0) -> tuple[int, ...]:
    """Parses whole numbers with commas between them, each once."""
    try:
        values = tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        values = ()
    if not values or min(values) < least:
        raise InvalidConfig(option, text, f"whole numbers, at least {least}, with commas between them")
    return values


def _parse_seeds(text: str | None, source: Source) -> tuple[int, ...]:
    """Parse seeds: `3` is 0, 1, 2; a comma makes it a list. Default: one for a trace played as recorded, else five."""
    if text is None:
        return (0,) if source.traces and source.batch is None else tuple(range(SEEDS))
    if "," in text:
        return parse_integers("seeds", text)
    return tuple(range(parse_integers("seeds", text, least=1)[0]))


def _sizes(
    source: Source,
    first: Workload,
    cores: str | None,
    nodes: int | None,
    memory: float | None,
    devices: int | None,
) -> list[Size]:
    """Returns a size for each given number of cores. Defaults are as recorded, or fit the workload."""
    import msgspec

    usual = _usual_size(source, first)
    _require_used("cores", cores, usual.cores, first)
    _require_used("devices", devices, usual.devices, first)
    sizes: dict[str, Any] = {"nodes": nodes, "memory_per_core_gib": memory, "devices": devices}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    counts = (usual.cores,) if cores is None else parse_integers("cores", cores, least=1)
    if nodes is None:
        return [
            msgspec.structs.replace(usual, cores=count, nodes=max(1, min(usual.nodes, count)), **sizes)
            for count in counts
        ]
    return [msgspec.structs.replace(usual, cores=count, **sizes) for count in counts]


def _usual_size(source: Source, first: Workload) -> Size:
    import msgspec

    from tangram.sim.recordings import recorded_size
    from tangram.sim.size import default_size

    if recording := recording_of(source):
        return recorded_size(recording)
    usual = default_size(first)
    if usual.cores and not any(episode.memory for episode in first.episodes):
        return msgspec.structs.replace(usual, cores=dict(source.options).get("units", UNITS))
    return usual


def recording_of(source: Source) -> str:
    """Returns the single recording that is played, which contains its policy and pools; "" otherwise."""
    from tangram.sim.recordings import is_recording

    return source.traces[0] if len(source.traces) == 1 and is_recording(source.traces[0]) else ""


def _require_used(option: str, value: object, usual: int, first: Workload) -> None:
    if value is not None and not usual:
        raise InvalidConfig(option, value, f"no such option, as {first.name} uses no {option}")


def check_workers(count: int | None) -> int | None:
    if count is not None and count < 1:
        raise InvalidConfig("workers", count, "a whole number, at least 1")
    return count


@contextmanager
def config_errors_in(config: Path) -> Iterator[None]:
    """Raise errors of settings with the name of their file."""
    try:
        yield
    except InvalidConfig as error:
        raise InvalidConfig(f"{config}: {error.field}", error.value, error.expected) from error


def check_output_files(**paths: Path | None) -> None:
    """Raises InvalidConfig before the work if a file cannot be written. Creates the folders."""
    from tangram.files.atomic_file import check_writable

    requested = {option: path for option, path in paths.items() if path is not None}
    for option, path in requested.items():
        check_writable(option, path)
    if len({path.resolve() for path in requested.values()}) < len(requested):
        raise InvalidConfig(" and ".join(requested), str(path), "a file of its own for each")


# ---- the command that reproduces a result ---------------------------------------------------------------------


def reproduce_command(verb: str, source: Source, size: Size, seeds: tuple[int, ...], options: dict[str, object]) -> str:
    """Returns the command with every default filled in, so that it stays reproducible if a default changes."""
    options = options | {
        "nodes": size.nodes if size.nodes > 1 else None,
        "memory-per-core": size.memory_per_core_gib if size.cores else None,
        "seeds": _seeds_text(seeds),
    }
    words = ["tangram", verb]
    words += [source.workload] if source.workload else [w for path in source.traces for w in ("--trace", path)]
    if source.batch is not None:
        words += ["--batch", str(source.batch)]
    for key, value in source.options:
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += ["--option", f"{key}={shown}"]
    for name, value in options.items():
        if value not in (None, "", 0):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _seeds_text(seeds: tuple[int, ...]) -> str:
    """Seeds in the form of --seeds."""
    return str(len(seeds)) if seeds == tuple(range(len(seeds))) else ",".join(map(str, seeds)) + ","
