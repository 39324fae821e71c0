"""Traces: recorded files as workloads.

Owns the reading of three kinds of CSV file, distinguished by their header line, in addition to our own recordings:

    tool calls   trajectory,seq,tool,category,think_s,duration_s,cpu_seconds,cpu_cores_max,mem_mb_max
    rewards      task,duration_s                       one run of a task's test suite per line
    requests     day,arrival_s,model,exec_s            one request to a model service per line
    recording    what `tangram sim --record` wrote; `sim/recordings.py` describes its interpretation

Other columns are ignored. A workload larger or smaller than its trace is drawn by whole trajectories, never by actions,
so the actions of a trajectory stay together. Malformed input raises InvalidTrace with file and line.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tangram.core.demand import CPU, GPU, Demand, cores, learned, one_of
from tangram.core.speedup import PowerLaw
from tangram.errors import InvalidConfig, InvalidTrace
from tangram.runtime.trace_recorder import SECONDS_MAX
from tangram.sim.episode import ApiLimit, ApiModel, ServiceModel, SimEpisode, SimStep, SimTurn, Workload
from tangram.sim.recordings import is_recording, load_recording
from tangram.sim.workloads import elastic, options
from tangram.sim.workloads.coding import LIMIT_CORES, REWARD_BUSY, REWARD_CORES_MIN
from tangram.sim.workloads.fit import SECONDS_MIN, random_stream

CODING_COLUMNS = (
    "trajectory",
    "seq",
    "tool",
    "category",
    "think_s",
    "duration_s",
    "cpu_seconds",
    "cpu_cores_max",
    "mem_mb_max",
)
REWARD_COLUMNS = ("task", "duration_s")
REQUEST_COLUMNS = ("day", "arrival_s", "model", "exec_s")

DEFAULT_REWARDS = "reward_tests.csv"
"""The rewards of a coding trace, if a file of this name is in the same folder."""

COARSE_S = 1.0
"""CPU was sampled about once a second. The measured use of one shorter call is noise, so short calls share their mean.
"""
BUSY_MIN, BUSY_MAX = 0.01, 12.0
"""Cores: every call uses some, and no recorded one more than twelve."""
MEMORY_STEP = 256
"""MiB: sandbox sizes are multiples of this."""
NAME_LENGTH_MAX = 100
"""Names become parts of ids, whose length is limited."""
DAY_S = 86_400.0


def load(path: str | Path, *, batch: int | None = None, seed: int = 0, **chosen: Any) -> Workload:
    """Return the workload of a trace file of any kind; `chosen` are the options of the loader for its kind."""
    path = Path(path)
    if is_recording(path):
        options.check_options(f"trace {path.name}", load_recording, chosen)
        return _sample_trajectories(load_recording(path), batch, seed)
    header = _header(path)
    for columns, loader in _LOADERS.items():
        if set(columns) <= set(header):
            options.check_options(f"trace {path.name}", loader, chosen)
            return loader(path, batch=batch, seed=seed, **chosen)
    kinds = "; or ".join(",".join(columns) for columns in _LOADERS)
    raise InvalidTrace(f"{path}:1", ",".join(header), f"a header with the columns {kinds}")


def load_all(paths: Sequence[str | Path], *, batch: int | None = None, seed: int = 0, **chosen: Any) -> Workload:
    """Return one workload of all files. With several files, each keeps its runs apart under the name of its file."""
    workloads = [load(path, batch=batch, seed=seed, **chosen) for path in paths]
    if len(workloads) == 1:
        return workloads[0]
    labels = [f"{number}-{workload.name}"[:NAME_LENGTH_MAX] for number, workload in enumerate(workloads)]
    return Workload(
        name="+".join(workload.name for workload in workloads),
        seed=seed,
        episodes=tuple(
            msgspec.structs.replace(
                episode, id=f"{label}/{episode.id}", run=f"{label}/{episode.run}", group=f"{label}/{episode.group}"
            )
            for label, workload in zip(labels, workloads, strict=True)
            for episode in workload.episodes
        ),
        services=tuple({service.name: service for workload in workloads for service in workload.services}.values()),
        apis=_merge_apis(api for workload in workloads for api in workload.apis),
    )


def _merge_apis(apis: Iterable[ApiModel]) -> tuple[ApiModel, ...]:
    """Merge APIs of the same name: union of what the workloads count; the last one sets the limits."""
    limits: dict[str, dict[str, ApiLimit]] = {}
    for api in apis:
        limits.setdefault(api.name, {}).update({limit.pool.kind: limit for limit in api.limits})
    return tuple(ApiModel(name=name, limits=tuple(api_limits.values())) for name, api_limits in limits.items())


def _sample_trajectories(recorded: Workload, batch: int | None, seed: int) -> Workload:
    """Draw `batch` whole trajectories of a recording, each at its recorded start (None: each once)."""
    if batch is None:
        return msgspec.structs.replace(recorded, seed=seed)
    indices = _draw_indices(batch, len(recorded.episodes), seed, "trajectory")
    episodes = tuple(
        msgspec.structs.replace(recorded.episodes[index], id=f"{recorded.episodes[index].run}/{k}")
        for k, index in enumerate(indices)
    )
    return msgspec.structs.replace(recorded, seed=seed, episodes=episodes)


# ---- tool calls -----------------------------------------------------------------------------------------------


class _ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace of tool calls."""

    seq: float
    key: str
    think_s: float
    seconds: float
    cpu_s: float
    cores_max: float
    memory: float


def load_coding(
    path: str | Path,
    *,
    batch: int | None = None,
    seed: int = 0,
    run: str = "coding",
    group: int = 8,
    memory: int | None = None,
    rewards: str | Path | None = DEFAULT_REWARDS,
    reward_cores_max: int = 16,
    reward_exponent: float = 0.75,
) -> Workload:
    """Draw `batch` whole trajectories from the trace (None: each once, in file order).

    `memory` is in MiB per sandbox; None: the recorded peak, rounded up. `rewards` is a file of final rewards, where
    siblings share a task; None: no rewards. The default is the one in the folder of the trace, if any.
    """
    path = Path(path)
    _check_coding_options(run, group, memory, reward_cores_max, reward_exponent)
    trajectories = list(_read_calls(path).values())
    recorded = [_turns(calls) for calls in trajectories]
    memories = [_memory_steps(calls) if memory is None else memory for calls in trajectories]
    indices = list(range(len(recorded))) if batch is None else _draw_indices(batch, len(recorded), seed, "trajectory")
    endings = _reward_turns(_rewards_path(path, rewards), len(indices), seed, group, reward_cores_max, reward_exponent)
    episodes = tuple(
        SimEpisode(
            id=f"{run}/{k}",
            run=run,
            task="coding",
            group=f"{run}/g{k // group}",
            memory=memories[index],
            turns=(*recorded[index], *ending),
        )
        for k, (index, ending) in enumerate(zip(indices, endings, strict=True))
    )
    return Workload(name=path.stem, seed=seed, episodes=episodes)


def _check_coding_options(
    run: str, group: int, memory: int | None, reward_cores_max: int, reward_exponent: float
) -> None:
    options.check_name("run", run)
    options.check_integer("group", group)
    if memory is not None:
        options.check_integer("memory", memory, least=0)
    options.check_integer("reward_cores_max", reward_cores_max)
    options.check_number("reward_exponent", reward_exponent, most=1.0)


def _read_calls(path: Path) -> dict[str, list[_ToolCall]]:
    """Return the calls of each trajectory, in order."""
    calls_by_trajectory: dict[str, list[_ToolCall]] = {}
    class_by_call: dict[tuple[str, float], str] = {}
    """Line of each call of a trajectory."""
    for line in _lines(path, CODING_COLUMNS):
        tool, category = line.name("tool"), line.name("category")
        call = _ToolCall(
            seq=line.number("seq"),
            key=f"bash:{category}" if tool.lower() == "bash" else tool.lower(),
            think_s=line.number("think_s"),
            seconds=max(SECONDS_MIN, line.number("duration_s")),
            cpu_s=line.number("cpu_seconds"),
            cores_max=line.number("cpu_cores_max"),
            memory=line.number("mem_mb_max"),
        )
        trajectory = line.name("trajectory")
        if class_by_call.setdefault((trajectory, call.seq), line.where) != line.where:
            first = class_by_call[trajectory, call.seq]
            raise InvalidTrace(f"{line.where} seq", line.cells["seq"], f"each number once in {trajectory}; see {first}")
        calls_by_trajectory.setdefault(trajectory, []).append(call)
    return {name: sorted(calls, key=lambda call: call.seq) for name, calls in calls_by_trajectory.items()}


def _turns(calls: list[_ToolCall]) -> tuple[SimTurn, ...]:
    demand = Demand({CPU: learned(LIMIT_CORES)})
    short = [call for call in calls if call.seconds < COARSE_S]
    short_use = sum(call.cpu_s for call in short) / sum(call.seconds for call in short) if short else 0.0
    turns = []
    for call in calls:
        if call.seconds < COARSE_S:
            busy = _clamp(short_use, BUSY_MAX)
        else:
            busy = _clamp(call.cpu_s / call.seconds, call.cores_max or BUSY_MAX)
        step = SimStep(kind="exec", key=call.key, demand=demand, work_s=call.seconds, busy=busy)
        turns.append(SimTurn(think_s=call.think_s, steps=(step,)))
    return tuple(turns)


def _clamp(use: float, most: float) -> float:
    return max(BUSY_MIN, min(use, most, BUSY_MAX))


def _memory_steps(calls: list[_ToolCall]) -> int:
    return MEMORY_STEP * max(1, math.ceil(max(call.memory for call in calls) / MEMORY_STEP))


# ---- rewards --------------------------------------------------------------------------------------------------


def load_reward_tests(
    path: str | Path,
    *,
    batch: int | None = None,
    seed: int = 0,
    run: str = "elastic",
    load: float = 0.7,
    units: int = 32,
    exponent: float = 0.75,
) -> Workload:
    """Return the `elastic` workload with recorded durations: independent rewards with Poisson arrivals at that load."""
    path = Path(path)
    rows = [(task, seconds) for task, runs in _read_rewards(path).items() for seconds in runs]
    picked = [rows[index] for index in _draw_indices(len(rows) if batch is None else batch, len(rows), seed, "reward")]
    episodes = elastic.arrivals(
        [seconds for _, seconds in picked],
        [task for task, _ in picked],
        mean_s=sum(seconds for _, seconds in rows) / len(rows),
        seed=seed,
        run=run,
        load=load,
        units=units,
        exponent=exponent,
    )
    return Workload(name=path.stem, seed=seed, episodes=episodes)


def _read_rewards(path: Path) -> dict[str, list[float]]:
    """Return the recorded durations of each task's test suite."""
    seconds_by_task: dict[str, list[float]] = {}
    for line in _lines(path, REWARD_COLUMNS):
        seconds_by_task.setdefault(line.name("task"), []).append(max(SECONDS_MIN, line.number("duration_s")))
    return seconds_by_task


def _rewards_path(coding: Path, rewards: str | Path | None) -> Path | None:
    if rewards != DEFAULT_REWARDS:
        return None if rewards is None else Path(rewards)
    path = coding.with_name(DEFAULT_REWARDS)
    return path if path.exists() else None


def _reward_turns(
    path: Path | None, count: int, seed: int, group: int, cores_max: int, exponent: float
) -> list[tuple[SimTurn, ...]]:
    """Return the last turn of each of `count` episodes: siblings get different runs of one task's test suite."""
    if path is None:
        return [()] * count
    tasks = list(_read_rewards(path).items())
    demand = Demand({CPU: cores(REWARD_CORES_MIN, cores_max)})
    law = PowerLaw(exponent)
    task_picks = _draw_indices(-(-count // group), len(tasks), seed, "task")
    places = random_stream("trace", seed, "run").random(count).tolist()
    turns: list[tuple[SimTurn, ...]] = []
    for k, place in enumerate(places):
        task, runs = tasks[task_picks[k // group]]
        seconds = runs[int(place * len(runs))]
        step = SimStep(
            kind="reward", key="tests", demand=demand, work_s=seconds, busy=REWARD_BUSY, speedup=law, task=task
        )
        turns.append((SimTurn(think_s=0.0, steps=(step,)),))
    return turns


# ---- requests to model services -------------------------------------------------------------------------------


def load_gpu_requests(
    path: str | Path,
    *,
    batch: int | None = None,
    seed: int = 0,
    run: str = "requests",
    day: int | None = None,
    restore_s: float = 22.0,
    memory_gib: float = 24.0,
    degrees: tuple[int, ...] = (1,),
    exponent: float = 0.0,
) -> Workload:
    """Return one episode per request at its recorded time, the first at 0; nothing is drawn.

    `day` None: all days in a row. `batch`: only the first that many. The trace does not describe the services: pass
    their `restore_s` (22 s is a cold load of a base model), `memory_gib`, `degrees` and speed-up `exponent`.
    """
    path = Path(path)
    options.check_name("run", run)
    for name, value in (("restore_s", restore_s), ("memory_gib", memory_gib)):
        options.check_number(name, value)
    degrees = options.check_degrees(degrees)
    options.check_number("exponent", exponent, most=1.0)
    requests = _read_requests(path, day)
    if batch is not None:
        options.check_integer("batch", batch)
        requests = requests[:batch]
    demand, law, start_s = Demand({GPU: one_of(*degrees)}), PowerLaw(exponent), requests[0][0]
    episodes = []
    for k, (at, model, seconds) in enumerate(requests):
        step = SimStep(kind="teacher", key=model, demand=demand, service=model, work_s=seconds, speedup=law)
        turn = SimTurn(think_s=0.0, steps=(step,))
        episodes.append(SimEpisode(id=f"{run}/{k}", run=run, task="requests", start_s=at - start_s, turns=(turn,)))
    services = tuple(
        ServiceModel(name=model, memory_gib=memory_gib, restore_s=restore_s, degrees=degrees)
        for model in dict.fromkeys(model for _, model, _ in requests)
    )
    return Workload(name=path.stem, seed=seed, episodes=tuple(episodes), services=services)


def _read_requests(path: Path, day: int | None) -> list[tuple[float, str, float]]:
    """Return seconds since the start of day 0, model and execution seconds, in order of arrival.

    A line without model and execution is a request that failed before it reached a model: it used no device and is left
    out. Execution without a model is malformed.
    """
    requests, days = [], set()
    for line in _lines(path, REQUEST_COLUMNS):
        line_day, at, seconds = line.integer("day"), line.number("arrival_s"), line.number("exec_s")
        if not line.cells["model"].strip() and seconds == 0.0:
            continue
        model = line.name("model")
        days.add(line_day)
        if day is None or line_day == day:
            requests.append((line_day * DAY_S + at, model, max(SECONDS_MIN, seconds)))
    if not requests:
        recorded = ", ".join(map(str, sorted(days))) or "none, as no request in it reached a model"
        raise InvalidConfig("day", day, f"a day of {path}: {recorded}")
    return sorted(requests, key=lambda request: request[0])


_LOADERS: dict[tuple[str, ...], Callable[..., Workload]] = {
    CODING_COLUMNS: load_coding,
    REQUEST_COLUMNS: load_gpu_requests,
    REWARD_COLUMNS: load_reward_tests,
}


# ---- lines ----------------------------------------------------------------------------------------------------


class _CsvRow:
    """One line of a CSV file; cells are checked when they are read."""

    def __init__(self, where: str, cells: dict[str, str]) -> None:
        self.where = where
        self.cells = cells

    def number(self, column: str) -> float:
        cell = self.cells[column]
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not 0.0 <= value <= SECONDS_MAX:
            raise InvalidTrace(f"{self.where} {column}", cell, f"a number from 0 to {SECONDS_MAX:g}")
        return value

    def integer(self, column: str) -> int:
        value = self.number(column)
        if value != int(value):
            raise InvalidTrace(f"{self.where} {column}", self.cells[column], "a whole number, at least 0")
        return int(value)

    def name(self, column: str) -> str:
        cell = self.cells[column].strip()
        if not cell or len(cell) > NAME_LENGTH_MAX or not cell.isprintable():
            raise InvalidTrace(f"{self.where} {column}", cell, f"a name of 1 to {NAME_LENGTH_MAX} printable characters")
        return cell


def _draw_indices(count: int, among: int, seed: int, what: str) -> list[int]:
    """`count` draws with replacement; draw k is the same for every count."""
    options.check_integer("batch", count)
    options.check_integer("seed", seed, least=0)
    return [int(place * among) for place in random_stream("trace", seed, what).random(count).tolist()]


def _header(path: Path) -> list[str]:
    return next(_cells(path))[1]


def _lines(path: Path, columns: tuple[str, ...]) -> Iterator[_CsvRow]:
    """Every line below the header; at least one."""
    rows = _cells(path)
    _, header = next(rows)
    twice = [column for column in columns if header.count(column) > 1]
    if twice:
        raise InvalidTrace(f"{path}:1", ",".join(header), f"a header that names the column {twice[0]!r} once")
    for column in columns:
        if column not in header:
            raise InvalidTrace(f"{path}:1", ",".join(header), f"a header with the column {column!r}")
    empty = True
    for number, cells in rows:
        if not cells:
            continue
        if len(cells) != len(header):
            raise InvalidTrace(f"{path}:{number}", ",".join(cells), f"{len(header)} cells, one for each column")
        empty = False
        yield _CsvRow(f"{path}:{number}", dict(zip(header, cells, strict=True)))
    if empty:
        raise InvalidTrace(f"{path}:2", "the end of the file", "at least one line below the header")


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of every line with its number; the first is the header."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if not header:
                raise InvalidTrace(f"{path}:1", "an empty line", "a header that names the columns")
            yield 1, [cell.strip() for cell in header]
            for cells in reader:
                yield reader.line_num, cells
    except OSError as error:
        raise InvalidConfig("trace", str(path), f"a csv file that can be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidTrace(str(path), str(error), "csv text in UTF-8") from error
    except csv.Error as error:
        raise InvalidTrace(f"{path}:{reader.line_num}", str(error), "a line of csv text") from error
