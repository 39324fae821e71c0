"""Golden files: what earlier versions wrote is read as it was meant, and is written the same today.

tests/golden/README.md says what the files are and when one may change.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from tests.golden import formats
from tests.golden.formats import (
    FORMATS,
    GROUP,
    IMAGE,
    LINES,
    RUN_RECORD,
    RUN_STATE,
    SANDBOX,
    SETTINGS,
    SETTLED,
    STATE,
    STEP,
    TOKEN,
    TRAJECTORY,
    WORKS,
    Files,
    in_folder,
)
from tests.golden.records import ACTION, SPEC, example

from tangram.core.messages import Effect, Event
from tangram.core.trace import EVENTS
from tangram.managers.functions.work import Failure, decode_result
from tangram.managers.sandboxes.bwrap.images.store import ImageStore
from tangram.managers.sandboxes.bwrap.owner import SandboxRecords
from tangram.managers.work import SandboxSpec
from tangram.rl.observe.timeline import timeline_of_log
from tangram.rl.runs.checkpoints import read_checkpoint
from tangram.rl.runs.metrics_log import read_metrics
from tangram.rl.runs.run_folder import open_run, read_modules, read_settings
from tangram.rl.runs.sample_log import GroupLost, GroupPut
from tangram.rl.runs.trajectory_log import EngineEvent, GroupClosing, StatisticsRecord, read
from tangram.rl.trajectories.training_batch import strip_for_training
from tangram.runtime.trace_recorder import open_trace
from tangram.runtime.wire import AnyWork, Submission
from tangram.server.actions.tenant_images import TenantImages
from tangram.server.http.auth import RunRecord as RunRecord
from tangram.server.http.auth import RunRegistry
from tangram.server.http.routes import ROUTES
from tangram.server.journal.adapter import decode_action, decode_settled, decode_work
from tangram.server.journal.journal import Journal
from tangram.server.journal.store import JournalPhase, RecoveredState

GOLDEN = Path(__file__).parent / "golden"
PATHS = (
    "tangram.managers.models.torch_engine:TorchEngine",
    "tangram.managers.models.transformers_engine:RewardModel",
    "tangram.managers.models.transformers_engine:Teacher",
    "tangram.managers.models.transformers_engine:Judge",
    "tangram.managers.models.server_engine:ServerEngine",
)
"""What `services.engine` of a config names, as docs/reference/config.md lists it."""


# ---- written as before ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", FORMATS, ids=lambda each: each.__name__)
def test_what_is_written_today_equals_the_golden_file(written: Callable[[], Files]) -> None:
    for name, content in written().items():
        assert (GOLDEN / name).is_file(), f"{name} is new: python -m tests.golden.write"
        assert content == (GOLDEN / name).read_bytes(), f"{name}: see tests/golden/README.md"


def test_every_golden_file_is_written_by_a_format() -> None:
    written = {name for each in FORMATS for name in each()}
    there = {name for name in in_folder(GOLDEN) if not name.endswith((".py", ".pyc", "README.md"))}
    assert there == written


def test_golden_files_name_no_place_of_a_machine() -> None:
    for name, content in in_folder(GOLDEN).items():
        if not name.endswith((".py", ".pyc")):
            for place in (b"/tmp", b"/home", b"/root", b"/work/main", b"://docker", b"://ghcr"):
                assert place not in content, name


# ---- read as it was meant -------------------------------------------------------------------------------------------


def recovered(folder: Path) -> RecoveredState:
    path = folder / "journal.sqlite"
    formats.restored(path, (GOLDEN / formats.JOURNAL).read_bytes())

    async def found() -> RecoveredState:
        async with Journal(path) as journal:
            return journal.recovered

    return asyncio.run(found())


def test_the_journal_gives_back_actions_in_every_phase(tmp_path: Path) -> None:
    action_by_id = {known.id: known for known in recovered(tmp_path).actions}
    assert {id: known.phase for id, known in action_by_id.items()} == {
        "run-a:queued": JournalPhase.QUEUED,
        "run-a:called": JournalPhase.QUEUED,
        "run-a:running": JournalPhase.RUNNING,
        "run-a:settled": JournalPhase.SETTLED,
        "run-a:fetched": JournalPhase.SETTLED,
    }
    for id in ("run-a:queued", "run-a:called", "run-a:running"):
        assert decode_action(action_by_id[id].action) == msgspec.structs.replace(ACTION, id=id)
        assert decode_work(action_by_id[id].work) == WORKS[id]
    assert action_by_id["run-a:running"].attempt == 2
    assert not action_by_id["run-a:settled"].fetched
    assert action_by_id["run-a:fetched"].fetched
    result = action_by_id["run-a:settled"].result
    assert result is not None
    outcome = msgspec.structs.replace(SETTLED.outcome, action="run-a:settled")
    assert decode_settled(result) == msgspec.structs.replace(SETTLED, outcome=outcome)


def test_the_journal_gives_back_sandboxes_tokens_and_images(tmp_path: Path) -> None:
    journal = recovered(tmp_path)
    (sandbox,) = journal.sandboxes
    assert (sandbox.name, sandbox.run, sandbox.node) == ("run-a:box", "run-a", "local")
    assert msgspec.msgpack.decode(sandbox.spec, type=SandboxSpec) == SPEC
    runs: Any = RunRegistry(None, journal.runs)  # type: ignore[arg-type]  # it writes nothing here
    principal = runs.authenticate(TOKEN)
    assert principal is not None
    assert principal.run == "run-a"
    assert principal.caps == RUN_RECORD.caps
    assert runs.ending == ["run-b"]
    assert msgspec.msgpack.decode(journal.runs[0].record, type=RunRecord) == RUN_RECORD
    images = TenantImages(None, None, journal.notes)  # type: ignore[arg-type]
    assert images.by_name == {"run-a:fixed": "run-a:fixed"}


def test_the_trace_gives_back_every_event_and_effect() -> None:
    with open_trace(GOLDEN / formats.TRACE) as (header, lines):
        read_back = list(lines)
    assert (header.policy, header.note, header.limits.queue_max) == ("adaptive", "golden", 1000)
    assert header.pools == formats.POOLS
    messages = [line.message for line in read_back]
    assert messages == [example(EVENTS[0]), *map(example, get_args(Effect)), *map(example, EVENTS[1:])]
    assert set(map(type, messages)) == {*get_args(Event), *get_args(Effect)}


def test_requests_and_responses_are_read_as_the_records_of_their_routes() -> None:
    kept = msgspec.json.decode((GOLDEN / "http.json").read_bytes(), type=dict[str, dict[str, msgspec.Raw]])
    assert kept.keys() == {route.operation_id for route in ROUTES}
    for route in ROUTES:
        for record, content in (
            (route.request_type, kept[route.operation_id]["request"]),
            (route.response_type, kept[route.operation_id]["response"]),
        ):
            if record is Submission:
                sent = msgspec.json.decode(content, type=list[Submission])
                assert [each.work for each in sent] == [example(work) for work in get_args(AnyWork)]
            elif isinstance(record, type) and issubclass(record, msgspec.Struct):
                assert msgspec.json.decode(content, type=record) == example(record)


def test_the_state_directory_gives_back_a_sandbox_and_images(tmp_path: Path) -> None:
    owner = GOLDEN / "state" / "owners" / "golden.00000000"
    assert SandboxRecords(owner / "kept").read() == ({SANDBOX.name: SANDBOX}, {})
    with formats.state_directory() as (folder, image):
        for kind in ("images", "cache"):
            target = folder / "images" / kind
            target.mkdir()
            for path in (GOLDEN / "state" / "images" / kind).iterdir():
                (target / path.name).write_bytes(path.read_bytes().replace(STATE.encode(), str(folder).encode()))
        store = ImageStore(folder / "images")
        assert store.get(IMAGE.name) == image
        assert store.find_by_key("codefix-1") == image


def test_the_folder_of_a_run_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(GOLDEN / "run", path)
    assert read_settings(path) == SETTINGS
    assert read_modules(path) == ("environments",)
    assert read_metrics(path / "metrics.jsonl") == list(LINES)
    with open_run(path, SETTINGS, resume=True) as run:
        assert run.setting_changes == ()
        checkpoint = run.latest_checkpoint()
        assert checkpoint is not None
        assert checkpoint.step == STEP
        waiting = tuple(
            msgspec.structs.replace(each, group=strip_for_training(each.group)) for each in RUN_STATE.buffer.waiting
        )
        buffer = msgspec.structs.replace(RUN_STATE.buffer, waiting=waiting)
        assert checkpoint.state == msgspec.structs.replace(RUN_STATE, buffer=buffer)
        logs = run.samples_after(STEP)
        assert list(logs) == [GroupPut(group=strip_for_training(GROUP)), GroupLost(id="lake/8", cause="stale")]
        assert not logs.torn
    assert read_checkpoint(GOLDEN / "run" / "checkpoints" / "00000040").step == STEP


def test_the_log_of_a_rollout_gives_back_its_records_and_a_timeline() -> None:
    log = read(GOLDEN / "rollout.jsonl")
    assert log.header.words == ("go", "look")
    assert log.header.settings is not None
    assert log.header.settings.tasks == SETTINGS.tasks
    trajectory, failed, closing, event, statistics = log
    assert (trajectory, failed) == (TRAJECTORY, GROUP.left_out[0])
    assert closing == GroupClosing.of(GROUP, at_s=3.0)
    assert isinstance(event, EngineEvent)
    assert event.name == "EngineLost"
    assert isinstance(statistics, StatisticsRecord)
    assert statistics.values == {"buffered": float("inf")}
    assert list(log.groups()) == [GROUP]
    assert timeline_of_log(log)


def test_answers_of_functions_are_read() -> None:
    kept = msgspec.json.decode((GOLDEN / "messages" / "answers.json").read_bytes())
    assert decode_result(bytes.fromhex(kept["returned"])) == (None, 1)
    assert decode_result(bytes.fromhex(kept["failed"])) == (Failure(kind="raised", message="no", traceback="at"), None)


@pytest.mark.parametrize("path", PATHS)
def test_engines_in_configs_are_detected(path: str) -> None:
    module, _, name = path.partition(":")
    assert hasattr(importlib.import_module(module), name)
