"""Every format that outlives a process or leaves the program, written by the code that writes it.

Each function returns its files by path below tests/golden. Clocks and ids are fixed; `STATE` stands for the directory
that absolute paths of a format begin with.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import msgspec
from prometheus_client import ProcessCollector
from tests.golden.records import ACTION, ENDPOINT, FUNCTION, OUTCOME, SPEC, example, shape

from tangram.clock import SimClock
from tangram.core.limits import Limits
from tangram.core.messages import Effect, Event, Pool, Window, cpu_node
from tangram.core.trace import EVENTS
from tangram.errors import InvalidAction
from tangram.managers.functions.work import Call, Post, encode_failure, encode_value
from tangram.managers.models import messages as device_messages
from tangram.managers.sandboxes.bwrap.images import base_layers
from tangram.managers.sandboxes.bwrap.images.store import ImageStore, StoredImage
from tangram.managers.sandboxes.bwrap.owner import SandboxOwner
from tangram.managers.sandboxes.bwrap.owner import SandboxRecord as SandboxRecord
from tangram.managers.sandboxes.bwrap.spawner.client import Greeting
from tangram.managers.sandboxes.cgroups import groups
from tangram.managers.work import Close, Exec, ExecResult, Open
from tangram.rl.buffer.records import BufferState, WaitingGroup
from tangram.rl.config.rollout_settings import RewardSettings, TaskSettings
from tangram.rl.config.training_settings import TeacherSettings, TrainSettings
from tangram.rl.environments.lookup_judge import JudgeSettings
from tangram.rl.inference.engines import messages as engine_messages
from tangram.rl.inference.engines.protocol import EngineStatistics
from tangram.rl.inference.router_records import EngineLost
from tangram.rl.runs.checkpoints import RunState, write_state
from tangram.rl.runs.metrics_lines import (
    AnyMetricsLine,
    Evaluated,
    Noticed,
    RunBegan,
    RunEnded,
    Trained,
    WarmStartChecked,
)
from tangram.rl.runs.metrics_log import MetricsLog
from tangram.rl.runs.run_folder import OWNER, TENSORBOARD, open_run
from tangram.rl.runs.sample_log import SampleLog
from tangram.rl.runs.trajectory_log import GroupClosing, StatisticsRecord, TrajectoryLog, engine_event
from tangram.rl.train import trainer_messages
from tangram.rl.trajectories.trajectory import Ending, Group, GroupTicket, Span, Stage, Trajectory, Turn
from tangram.runtime.error_records import error_record_of
from tangram.runtime.orchestrator import SettledAction
from tangram.runtime.trace_recorder import record_trace
from tangram.runtime.wire import AnyWork, Caps, ErrorResponse, Submission
from tangram.server.actions.tenant_images import NOTE_KEY_PREFIX
from tangram.server.http.auth import RunRecord as RunRecord
from tangram.server.http.auth import hash_token
from tangram.server.http.openapi import openapi_document
from tangram.server.http.routes import ROUTES
from tangram.server.journal.adapter import encode
from tangram.server.journal.journal import Journal
from tangram.server.observe.metrics import FAMILIES

STATE = "/STATE"
BEGAN_AT = 1_790_000_000.0
TOKEN = "tgr_golden"
Files = dict[str, bytes]


def pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def in_folder(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


# ---- the service ----------------------------------------------------------------------------------------------------

JOURNAL = "journal.sql"
RUN_RECORD = RunRecord(weight=2.0, caps=example(Caps), made_at=BEGAN_AT)
SETTLED = SettledAction(
    outcome=OUTCOME,
    executed=ExecResult(exit_code=1, stdout=b"out", stderr=b"err", stdout_bytes=3, stderr_bytes=3, out_of_memory=True,
                      cpus=2, session_ended=True),
    answer=b"",
    fault=error_record_of(InvalidAction("cwd", "x", "y")),
)  # fmt: skip
WORKS: dict[str, AnyWork] = {
    "run-a:queued": Exec(command="make test", cwd="src", env={"A": "b"}, session="shell"),
    "run-a:called": Call(function=FUNCTION, arguments=b"pickled arguments"),
    "run-a:running": Open(spec=SPEC),
    "run-a:settled": Post(endpoint=ENDPOINT, body=b"[1]", key="key-1"),
    "run-a:fetched": Close(),
}


def journal() -> Files:
    """The database as SQL: pages differ between releases of SQLite, statements do not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        asyncio.run(_write_journal(path))
        return {JOURNAL: dump(path)}


async def _write_journal(path: Path) -> None:
    async with Journal(path, clock=SimClock()) as kept:
        for id, work in WORKS.items():
            action = msgspec.structs.replace(ACTION, id=id)
            await kept.record_submission(id, action.run, encode(action), encode(work))
        for id in ("run-a:running", "run-a:settled"):
            await kept.record_start(id, 2)
        for id in ("run-a:settled", "run-a:fetched"):
            settled = msgspec.structs.replace(SETTLED, outcome=msgspec.structs.replace(OUTCOME, action=id))
            await kept.record_settled(id, encode(settled))
        kept.record_fetched("run-a:fetched")
        await kept.record_sandbox_opened("run-a:box", "run-a", "local", encode(SPEC))
        await kept.record_run("run-a", hash_token(TOKEN), msgspec.msgpack.encode(RUN_RECORD))
        await kept.record_run_ending("run-b", msgspec.msgpack.encode(RUN_RECORD))
        await kept.put_note(f"{NOTE_KEY_PREFIX}run-a:fixed", b"run-a:fixed")
        await kept.flush()


def dump(path: Path) -> bytes:
    with contextlib.closing(sqlite3.connect(path)) as db:
        pragmas = [
            f"PRAGMA {name} = {db.execute(f'PRAGMA {name}').fetchone()[0]};"
            for name in ("auto_vacuum", "application_id", "user_version")
        ]
        return "\n".join([*pragmas, *db.iterdump(), ""]).encode()


def restored(path: Path, dumped: bytes) -> None:
    """The database of a dump."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(dumped.decode())


TRACE = "trace.jsonl"
POOLS = (
    *cpu_node("local", 4, 8.0, numa_nodes=2),
    Pool(kind="search", total=10, window=Window(seconds=1.0, bucket=True)),
)


def messages_of(union: Any) -> list[Any]:
    return [example(kind) for kind in get_args(union)]


def trace() -> Files:
    """Every event once; the first is answered by every effect."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with record_trace(
            path, policy="adaptive", pools=POOLS, limits=Limits(queue_max=1000), note="golden"
        ) as observe:
            assert observe is not None
            for number, event in enumerate(EVENTS):
                observe(0.5 * number, example(event), [] if number else messages_of(Effect))
        return {TRACE: path.read_bytes()}


def http() -> Files:
    """A request and a response of each route, and what the OpenAPI document calls them."""
    formats = {}
    for route in ROUTES:
        if route.request_type is Submission:
            request: Any = [
                msgspec.structs.replace(example(Submission), work=example(work)) for work in get_args(AnyWork)
            ]
        else:
            request = example(route.request_type) if _is_record(route.request_type) else _raw(route.request_type)
        formats[route.operation_id] = {
            "route": f"{route.method} {route.path}",
            "query": [query.name for query in route.query],
            "status": [route.status, *route.other_statuses],
            "request": request,
            "response": example(route.response_type) if _is_record(route.response_type) else _raw(route.response_type),
        }
    described = msgspec.json.decode(openapi_document())
    return {
        "http.json": pretty(formats),
        "http-shapes.json": pretty(
            {
                "problem": shape(ErrorResponse),
                **{
                    route.operation_id: {"request": shape(route.request_type), "response": shape(route.response_type)}
                    for route in ROUTES
                },
            }
        ),
        "openapi-names.json": pretty(
            {
                "operations": sorted(op["operationId"] for each in described["paths"].values() for op in each.values()),
                "schemas": sorted(described["components"]["schemas"]),
            }
        ),
    }


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _raw(kind: Any) -> str | None:
    return {bytes: "bytes", str: "text", None: None}[kind]


def metrics() -> Files:
    """Names and labels of metrics, with the values of the label `event`."""
    families = {family.name: [family.kind, *family.labels] for family in FAMILIES}
    for metric in sorted(ProcessCollector(registry=None).collect(), key=lambda metric: metric.name):
        families[f"{metric.name}_total" if metric.type == "counter" else metric.name] = [metric.type]
    return {"metrics.json": pretty({"families": families, "events": [kind.__struct_config__.tag for kind in EVENTS]})}


# ---- sandboxes and images -------------------------------------------------------------------------------------------

IMAGE = StoredImage(
    name="run-a:fixed", layers=(f"{STATE}/images/layers/{'a' * 32}", f"{STATE}/images/layers/{'b' * 32}"),
    binds_usr=True, shell="/bin/bash", env={"LANG": "C"}, cwd="/src",
)  # fmt: skip
SANDBOX = SandboxRecord(name="run-a:box", box="7", init=4242, spec=SPEC, image=IMAGE)


@contextlib.contextmanager
def state_directory(image: StoredImage = IMAGE) -> Iterator[tuple[Path, StoredImage]]:
    """An empty one that has the layers of an image, and the image with its layers there."""
    with tempfile.TemporaryDirectory() as folder:
        layers = tuple(layer.replace(STATE, folder) for layer in image.layers)
        for layer in layers:
            Path(layer).mkdir(parents=True)
        yield Path(folder), msgspec.structs.replace(image, layers=layers)


def state() -> Files:
    """The state directory of a manager with a named owner: its layout, a sandbox, and the index of images."""
    with state_directory() as (folder, image):
        owner = _owner(folder)
        owner.records.write(SANDBOX)
        owner.tie_image("run-a:fixed")
        store = ImageStore(folder / "images")
        store.register(image)
        store.tag("codefix-1", image)
        shutil.rmtree(folder / "images" / "locks")
        written = in_folder(folder)
        layout = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        owner.release()
        here = str(folder).encode()
    files = {
        f"state/{name}": content.replace(here, STATE.encode())
        for name, content in written.items()
        if content and not name.endswith("lock")
    }
    layer = base_layers.digest(
        [base_layers.Node("etc"), base_layers.Node("etc/name", 0o644, b"box"), base_layers.Node("a", target="b")]
    )
    names = {"layout": [name for name in layout if "images/images/" not in name], "layer": layer}
    return files | {"state.json": pretty(names | {"greeting of the spawner": shape(Greeting)})}


def _owner(folder: Path) -> SandboxOwner:
    with (
        mock.patch.object(secrets, "token_hex", lambda count: "0" * 2 * count),
        mock.patch.object(groups, "create_owner_cgroup", return_value=None),
    ):
        return SandboxOwner(folder, "golden")


# ---- training -------------------------------------------------------------------------------------------------------

SETTINGS = TrainSettings(
    run="golden",
    tasks=(
        TaskSettings(name="lake", environment="frozenlake", options={"size": 4}),
        TaskSettings(name="code", reward=RewardSettings(kind="function", function="scores:score")),
        TaskSettings(name="taught", environment="chain", reward=RewardSettings(kind="teacher", service="expert")),
    ),
    teachers=(TeacherSettings(name="expert", checkpoint="teachers/expert"),),
)
STEP = 40
TURN = Turn(
    observation="look", observation_tokens=(1, 2), action="go", tokens=(3, 4), logprobs=(-0.5, -0.25),
    versions=(39, 40), candidate_token_ids=((3, 5), (4,)), truncated=True,
    engine="engine-0", prefilled=2, prefill_s=0.5, decode_s=0.25,
)  # fmt: skip
TRAJECTORY = Trajectory(
    id="lake/7/0.0", task="lake", group="lake/7", member=0, attempt=0, seed=11, turns=(TURN,), observation="over",
    ending=Ending.FINISHED, cause="won", reward=1.0, teacher_logprobs=(-0.125, -0.0625), metrics={"moves": 3.0},
    spans=(
        Span(stage=Stage.GENERATE, began_s=0.0, ended_s=1.0, waiting_s=0.5, waited_for="engine-0"),
        Span(stage=Stage.STEP, began_s=1.0, ended_s=2.0, attempt=1, failed="it hung"),
    ),
    began_s=0.0, ended_s=2.5,
)  # fmt: skip
FAILED = Trajectory(
    id="lake/7/1.0", task="lake", group="lake/7", member=1, attempt=0, seed=11, turns=(), ending=Ending.ENV_FAILED,
    cause="it crashed",
)  # fmt: skip
GROUP = Group(
    id="lake/7", task="lake", seed=11, members=(TRAJECTORY,), left_out=(FAILED,), wanted=2, cause="a member was lost"
)
RUN_STATE = RunState(
    version=STEP, step=STEP, ticket_next=9,
    buffer=BufferState(
        version=STEP, waiting=(WaitingGroup(group=GROUP, version=39, since_s=1.0),),
        in_flight=(GroupTicket(task="lake", number=8, seed=12, series="eval-", size=4, temperature=0.5),),
        trained=((0, 5),), dropped=((6, 6),), dropped_by_cause={"stale": 1}, trajectories_discarded=2,
        tokens_discarded=64, bytes_mean=512.0, puts=7,
    ),
    at_s=99.5, warm=example(WarmStartChecked), evaluations=3, random=b"state of chance", note="golden",
)  # fmt: skip
LINES: tuple[AnyMetricsLine, ...] = (
    msgspec.structs.replace(example(RunBegan), began_at=BEGAN_AT, step=0, resumed_from="", settings={"seed": 7}),
    example(WarmStartChecked), example(Trained), example(Evaluated),
    msgspec.structs.replace(example(Noticed), step=None), example(RunEnded),
)  # fmt: skip


def training() -> Files:
    """The folder of a run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        asyncio.run(_write_run(path))
        shutil.rmtree(path / TENSORBOARD, ignore_errors=True)
        (path / OWNER).unlink()
        return {f"run/{name}": content for name, content in in_folder(path).items()}


async def _write_run(path: Path) -> None:
    with open_run(path, SETTINGS, resume=False, modules=("environments",)) as run:
        with MetricsLog(path, resume=False) as log:
            for line in LINES:
                log.append(line)
        async with run.checkpoint(STEP) as unfinished:
            (unfinished / "words.json").write_bytes(msgspec.json.encode(("go", "look")))
            write_state(unfinished, RUN_STATE)
        with SampleLog(run.samples, STEP) as samples:
            samples.append(GROUP)
            samples.append_lost("lake/8", "stale")


def rollout() -> Files:
    """The log of a rollout, which timelines are made of."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollout.jsonl"
        with TrajectoryLog(
            path, settings=SETTINGS, words=("go", "look"), modules=("environments",), note="golden", began_at=BEGAN_AT
        ) as log:
            for record in (TRAJECTORY, FAILED, GroupClosing.of(GROUP, at_s=3.0)):
                log.append(record)
            log.append(engine_event(example(EngineLost)))
            log.append(
                StatisticsRecord(at_s=4.0, engines=(example(EngineStatistics),), values={"buffered": float("inf")})
            )
        return {"rollout.jsonl": path.read_bytes()}


def models() -> Files:
    """Names of tensors and keys of files that are kept: published weights, checkpoints, the cached judge."""
    from tangram.rl.model.judge import NameJudge
    from tangram.rl.model.model_folder import parts_by_name, to_huggingface_config
    from tangram.rl.model.transformer import RopeScaling, Transformer, TransformerConfig
    from tangram.rl.model.weight_store import Manifest

    config = TransformerConfig(
        vocabulary=8, width=8, layers=1, heads=2, kv_heads=1, head_width=4, inner=16, qkv_bias=True, output_bias=True,
        rope_stretched=RopeScaling(factor=8.0, low=1.0, high=4.0, context=64),
    )  # fmt: skip
    judge = JudgeSettings(groups=(("a", "b"), ("c",)), layers=1, width=8, heads=2)
    document = {
        "tensors": list(Transformer(config).state_dict()),
        "tensors of checkpoints": [part.name for parts in parts_by_name(config).values() for part in parts],
        "config.json": to_huggingface_config(config, "float32"),
        "manifest.json": shape(Manifest),
        "judge": {"file": judge.digest, "tensors": list(NameJudge(judge).state_dict())},
    }
    return {"models.json": pretty(document)}


# ---- messages between processes -------------------------------------------------------------------------------------


def messages() -> Files:
    """Tags and fields of what processes of one version send each other."""
    return {
        "messages/scheduler.json": pretty({"events": shape(Event), "effects": shape(Effect)}),
        "messages/devices.json": pretty(
            {"requests": shape(device_messages.AnyDeviceRequest), "replies": shape(device_messages.AnyDeviceReply)}
        ),
        "messages/engines.json": pretty(
            {"commands": shape(engine_messages.AnyEngineCommand), "answers": shape(engine_messages.AnyEngineReply)}
        ),
        "messages/trainer.json": pretty(
            {"commands": shape(trainer_messages.AnyTrainerCommand), "answers": shape(trainer_messages.AnyTrainerReply)}
        ),
        "messages/answers.json": pretty(
            {"returned": encode_value(b"\x01").hex(), "failed": encode_failure("raised", "no", "at").hex()}
        ),
    }


FORMATS: tuple[Callable[[], Files], ...] = (
    journal, trace, http, metrics, state, training, rollout, models, messages
)  # fmt: skip
