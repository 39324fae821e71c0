"""Quotas, model services and functions through a shared service: what the client gets is what it gets embedded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.client.conftest import why_not
from tests.managers.models.bytes_engine import expected
from tests.server.shared import serving, shared, wire_of

import tangram
from tangram import Quota, Rate
from tangram.client import remote_connection, remote_transport
from tangram.client.client import Client, connect
from tangram.client.remote_transport import RemoteTransport
from tangram.client.sync import connect_sync
from tangram.clock import SimClock
from tangram.config import DeviceConfig, ModelConfig, RunLimits
from tangram.core.action import Status
from tangram.errors import ActionTimedOut, AdmissionRefused, FileFailed, InvalidAction, InvalidConfig, ManagerError
from tangram.server.actions import service

DEADLINE_S = 60.0
SEARCH = Quota("search", concurrent=2)
SIZE = 1 << 20
ADMIN = "a" * 40


def play(folder: Path, test: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), shared(folder, **options) as client:
            await test(client)

    asyncio.run(main())


async def until_running(t: Client) -> None:
    """Until the service runs an action."""
    while b'"running_total":1' not in await wire_of(t).call("GET", "/v1/view"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


# ---- quotas -------------------------------------------------------------------------------------------------------


def test_a_quota_is_held_inside_and_free_outside(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        async with t.quota("search", requests=2):
            with pytest.raises(ActionTimedOut):
                async with t.quota("search", deadline_s=0.05):
                    pass
        async with t.quota("search", requests=2, deadline_s=DEADLINE_S):
            pass

    play(tmp_path, test, quotas=[SEARCH])


def test_two_connections_share_one_quota(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            serving(tmp_path, quotas=[SEARCH]) as up,
            connect(up.address) as one,
            connect(up.address) as two,
        ):
            most = now = 0

            async def use(t: Client) -> None:
                nonlocal most, now
                async with t.quota("search"):
                    now += 1
                    most = max(most, now)
                    await asyncio.sleep(0.005)
                    now -= 1

            await asyncio.gather(*(use(t) for t in (one, two) * 10))
            assert most == 2

    asyncio.run(main())


def test_a_silent_holder_of_a_quota_loses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram.server.serve.SWEEP_INTERVAL_S", 0.02)

    async def main() -> None:
        limits, clock = RunLimits(hold_idle_s=0.2), SimClock()
        async with asyncio.timeout(DEADLINE_S), shared(tmp_path, quotas=[SEARCH], limits=limits, clock=clock) as t:
            demand = {"pools": {"search": {"min": 2, "max": 2}}}
            body = {"id": "silent", "work": {"type": "Hold"}, "demand": demand}
            wire = wire_of(t)
            assert b"settled" not in await wire.call("POST", "/v1/actions", body, wait_s=0.0)
            clock.set(0.3)
            async with t.quota("search", requests=2, deadline_s=DEADLINE_S):
                pass
            reply = msgspec.json.decode(await wire.call("GET", "/v1/actions/silent", wait_s=30.0))
            reason = "its holder did not poll for 0.2 s (hold_idle_s)"
            assert reply["settled"]["outcome"]["reason"] == reason
            story = msgspec.json.decode(await wire.call("GET", "/v1/actions/admin/silent/story"))
            assert story["explanation"] == reason

    asyncio.run(main())


def test_quotas_are_added_observed_and_corrected(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        await t.add_quota(Quota("judge", tokens=Rate(100, 3600.0)))
        async with t.quota("judge", tokens=60) as use:
            use.spent(tokens=10)
            use.report_response(200, {"x-ratelimit-remaining": "50"})
        async with t.quota("judge", tokens=60, deadline_s=DEADLINE_S):
            pass
        with pytest.raises(InvalidAction, match="one that the service had"):
            t.quota("none")

    play(tmp_path, test, quotas=[SEARCH])


def test_an_unused_sandbox_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram.server.serve.SWEEP_INTERVAL_S", 0.02)
    clock = SimClock()

    async def test(t: Client) -> None:
        ask = wire_of(t).call
        async with t.sandbox() as used, t.sandbox() as unused:
            busy = asyncio.create_task(used.exec("sleep 60"))
            await until_running(t)
            clock.set(1.0)
            while unused.name.encode() in await ask("GET", "/v1/sandboxes"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert used.name.encode() in await ask("GET", "/v1/sandboxes"), "an action runs in it"
            lost = await unused.exec("true")
            assert lost.status is Status.LOST and "unused for" in lost.reason
            busy.cancel()
            await asyncio.wait({busy})

    play(tmp_path, test, limits=RunLimits(sandbox_idle_s=0.5), clock=clock)


# ---- model services -----------------------------------------------------------------------------------------------


def test_a_model_service_answers_and_errors_of_its_engine_are_raised(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        answers = await t.gather(*(t.infer("judge", f"p{n}".encode()) for n in range(8)))
        for n, answer in enumerate(answers):
            assert answer.check() == expected(1, SIZE, f"p{n}".encode())
        with pytest.raises(InvalidAction, match="one of 1"):
            await t.infer("judge", "x", devices=2)
        with pytest.raises(InvalidAction, match="service"):
            await t.infer("none", "x")

    judge = ModelConfig(
        name="judge", engine="tests.managers.models.bytes_engine:BytesEngine", arguments={"seed": 1, "size": SIZE}
    )
    device = DeviceConfig(kind="emulated", memory_bytes=4 * SIZE, bandwidth=1e12)
    play(tmp_path, test, services=[judge], devices=[device])


# ---- runs ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def admin_and(folder: Path, *runs: str, **options: Any) -> AsyncIterator[list[Client]]:
    """Connections of the admin and of runs."""
    path = admin_token(folder)
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(serving(folder / "service", admin_token_file=str(path), **options))
        admin = await stack.enter_async_context(connect(up.address, token=ADMIN))
        wire = wire_of(admin)
        clients = [admin]
        for run in runs:
            made = msgspec.json.decode(await wire.call("POST", f"/v1/runs/{run}", {"weight": 2.0}))
            clients.append(await stack.enter_async_context(connect(up.address, token=made["token"])))
        yield clients


def admin_token(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "admin.token"
    path.write_text(ADMIN)
    path.chmod(0o600)
    return path


def test_a_run_works_in_its_own_name_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), admin_and(tmp_path, "math") as (admin, math):
            async with math.sandbox() as box:
                assert (await box.exec("echo hi")).stdout == "hi\n"
            with pytest.raises(InvalidAction, match="the run of the token"):
                async with math.sandbox(run="other"):
                    pass
            async with admin.sandbox(run="other") as box:
                assert (await box.exec("true")).ok
            with pytest.raises(ManagerError, match="only the admin"):
                await math.weigh("math", 3.0)

    asyncio.run(main())


def test_a_run_that_is_revoked_loses_all_that_it_has(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), admin_and(tmp_path, "math") as (admin, math):
            wire = wire_of(admin)
            box = await math.sandbox().__aenter__()
            running = asyncio.create_task(box.exec("sleep 60"))
            while b'"running_total":1' not in await wire.call("GET", "/v1/view"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await wire.call("DELETE", "/v1/runs/math")
            ended = await running  # it was waited for before
            assert (ended.status, ended.reason) == (Status.CANCELLED, "its run math was revoked")
            assert b"math/" not in await wire.call("GET", "/v1/sandboxes")
            with pytest.raises(ManagerError, match=f"{wire.url} rejects this token: it was revoked"):
                await box.exec("true")

    asyncio.run(main())


def test_a_cap_may_change_while_actions_are_under_way(tmp_path: Path) -> None:
    """The same submission is the same action, whatever the cap is by now; and a cap that is taken away caps no more."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), admin_and(tmp_path, "math", cores=8) as (admin, math):
            ask, call_of_math = wire_of(admin).call, wire_of(math).call

            async def cap(running_max: int | None) -> None:
                await ask("PATCH", "/v1/runs/math", {"weight": 1.0, "caps": {"running_max": running_max}})

            async def running(number: int) -> None:
                while f'"running_total":{number}'.encode() not in await ask("GET", "/v1/view"):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

            async with math.sandbox() as box:
                await cap(1)
                demand = {"pools": {"cpu": {"min": 1000, "max": 1000}}}
                bodies = [
                    {
                        "id": f"a{n}",
                        "sandbox": box.name,
                        "demand": demand,
                        "work": {"type": "Exec", "command": "sleep 60"},
                    }
                    for n in range(4)
                ]
                for body in bodies[:2]:
                    await call_of_math("POST", "/v1/actions", body, wait_s=0.0)
                await running(1)
                await cap(None)
                assert b'"a0"' in await call_of_math("POST", "/v1/actions", bodies[0], wait_s=0.0)
                for body in bodies[2:]:
                    await call_of_math("POST", "/v1/actions", body, wait_s=0.0)
                await running(3)
                for body in bodies:
                    await call_of_math("POST", f"/v1/actions/{body['id']}/cancel")

    asyncio.run(main())


def test_a_cap_on_running_actions_does_not_reduce_the_share_of_other_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), admin_and(tmp_path, "math", cores=8) as (admin, math):
            ask = wire_of(admin).call
            await ask("PATCH", "/v1/runs/math", {"weight": 1.0, "caps": {"running_max": 1}})
            async with math.sandbox() as box:
                running = asyncio.create_task(box.exec("sleep 60", cpus=1))
                while b'"running_total":1' not in (view := await ask("GET", "/v1/view")):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                shares = {run["name"]: run["share"] for run in msgspec.json.decode(view)["runs"]}
                assert shares["math"] == pytest.approx(1 / 8, abs=0.07), "its own cap is none of what others want"
                running.cancel()
                await asyncio.wait({running})

    asyncio.run(main())


def test_the_admin_ends_one_thing_of_a_run_in_its_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), admin_and(tmp_path, "math", "code") as (admin, math, code):
            ask = wire_of(admin).call
            async with math.sandbox() as box:
                running = asyncio.create_task(box.exec("sleep 60"))
                while b'"running_total":1' not in await ask("GET", "/v1/view"):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                with pytest.raises(ManagerError, match="there is no sandbox"):
                    await ask("DELETE", f"/v1/sandboxes/{box.name}")
                with pytest.raises(ManagerError, match="there is no sandbox"):
                    await wire_of(code).call("DELETE", f"/v1/sandboxes/{box.name}", run="math")
                await ask("DELETE", f"/v1/sandboxes/{box.name}", run="math")
                assert (await running).status is not Status.SUCCEEDED

    asyncio.run(main())


def test_a_run_gets_another_token_and_keeps_all_that_it_has(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), admin_and(tmp_path, "math") as (admin, math):
            wire = wire_of(admin)
            box = await math.sandbox().__aenter__()
            await box.write("a", "kept")
            renewed = msgspec.json.decode(await wire.call("POST", "/v1/runs/math/token"))
            with pytest.raises(ManagerError, match="rejects this token"):
                await box.read("a")
            async with connect(wire.url, token=renewed["token"]) as again:
                ask = wire_of(again).call
                assert await ask("GET", f"/v1/sandboxes/{box.name}/files", path="a") == b"kept"

    asyncio.run(main())


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_go_in_and_out_up_to_the_limit_of_the_service_which_is_named(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as box:
            await box.write("small", b"x" * 1000)
            assert (await box.download("small", tmp_path / "here")).read_bytes() == b"x" * 1000
            assert await box.read("small", bytes_max="1GiB") == b"x" * 1000
            assert (await box.download("small", tmp_path / "there", bytes_max="9GiB")).exists()
            for sent in (box.write("large", b"x" * 60_000), box.upload(large, ".")):
                with pytest.raises(AdmissionRefused, match=r"more than 50000 bytes, .*\(file_bytes_max\)") as caught:
                    await sent
                assert caught.value.limit == "file_bytes_max"
            await box.write("a", b"x" * 40_000)
            await box.write("b/c", b"x" * 40_000)
            with pytest.raises(FileFailed, match="50000"):
                await box.download("/work", tmp_path / "nowhere")

    large = tmp_path / "large"
    large.write_bytes(b"x" * 60_000)
    play(tmp_path / "service", test, limits=RunLimits(file_bytes_max=50_000))


# ---- connecting ---------------------------------------------------------------------------------------------------


def test_an_address_without_a_service_fails_at_once() -> None:
    async def main(url: str, **options: Any) -> None:
        async with asyncio.timeout(DEADLINE_S), connect(url, **options):
            pass

    with pytest.raises(ManagerError, match=r"no service responds at http://127\.0\.0\.1:9"):
        asyncio.run(main("http://127.0.0.1:9"))
    with pytest.raises(InvalidConfig, match="ca"):
        asyncio.run(main("https://127.0.0.1:9", ca="/nowhere.pem"))


def test_a_rejected_client_gets_the_reason_and_the_address(tmp_path: Path) -> None:
    async def refused(url: str, token: str = "") -> str:
        with pytest.raises(ManagerError) as caught:
            async with connect(url, token=token):
                pass
        return str(caught.value)

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), serving(tmp_path, admin_token_file=str(admin_token(tmp_path))) as up:
            reason = f"{up.address} rejects this token: it was revoked, or belongs to another service"
            assert await refused(up.address, "another") == reason
            assert (await refused(up.address)).startswith(
                f"{up.address} requires a token: give it to connect(url, token="
            )
            secure = up.address.replace("http://", "https://")
            assert await refused(secure, ADMIN) == f"{secure} does not speak TLS: try an address with http://"
        reason = f"no service responds at {up.address} (Connection refused): start one with `tangram serve`"
        assert (await refused(up.address, ADMIN)).startswith(reason)

    asyncio.run(main())


def test_leaving_the_connection_ends_what_it_has_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), serving(tmp_path) as up:
            async with connect(up.address) as t:
                box = await t.sandbox().__aenter__()
                running = asyncio.create_task(box.exec("sleep 60"))
                await until_running(t)
            assert (await running).status is Status.CANCELLED
            async with connect(up.address) as t:
                response = await wire_of(t).call("GET", "/v1/sandboxes")
                assert response == b'{"sandboxes":[]}'

    asyncio.run(main())


def test_closing_while_the_service_is_down_waits_once_for_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything together waits no longer than one thing would: an acknowledgement of results that begins meanwhile
    included."""
    attempts: list[list[float]] = []
    """Of each request, when they began."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ManagerError, match="did not respond"):
                await leave()

    async def leave() -> None:
        async with AsyncExitStack() as clients:
            async with serving(tmp_path) as up:
                t = await clients.enter_async_context(connect(up.address))
                for _ in range(8):
                    await clients.enter_async_context(t.sandbox())
            wire, transport = wire_of(t), t.transport
            assert isinstance(transport, RemoteTransport)
            patient = wire.retry_until_answered
            time = asyncio.get_running_loop().time

            async def noted(once: Any, *, closing: bool = False) -> Any:
                assert closing, "something waits as long as an action would"
                mine: list[float] = []
                attempts.append(mine)

                async def attempt() -> Any:
                    mine.append(time())
                    if len(attempts) == 1 and len(mine) == 2:
                        monkeypatch.setattr(remote_transport, "ACKNOWLEDGE_BATCH_MAX", 1)
                        transport.on_result("late")
                    return await once()

                return await patient(attempt, closing=closing)

            monkeypatch.setattr(wire, "retry_until_answered", noted)
            monkeypatch.setattr(remote_connection, "CLOSE_RETRY_S", 1.0)

    monkeypatch.setattr(remote_transport, "ACKNOWLEDGE_INTERVAL_S", DEADLINE_S)
    asyncio.run(main())
    assert len(attempts) >= 9, "8 sandboxes and the acknowledgement"
    deadline = attempts[0][0] + 1.0
    for mine in attempts:
        assert sum(at > deadline for at in mine) <= 1, "each thing waited for itself"


def test_what_a_connection_committed_goes_with_it_unless_it_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), serving(tmp_path) as up:
            async with connect(up.address) as t:
                kept = await t.image(setup=["echo x > made"])
                async with t.sandbox() as box:
                    image = await box.commit()
            async with connect(up.address) as t:
                assert (await t.image(setup=["echo x > made"])).name == kept.name
                with pytest.raises(InvalidAction, match="image"):
                    async with t.sandbox(image=image):
                        pass

    asyncio.run(main())


def test_the_same_without_await(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), serving(tmp_path) as up:
            await asyncio.to_thread(use, up.address)

    def use(url: str) -> None:
        with connect_sync(url) as t, t.sandbox() as box:
            box.write("a", "1")
            assert box.exec("cat a").stdout == "1"

    asyncio.run(main())


# ---- functions ----------------------------------------------------------------------------------------------------


def double(number: float) -> float:
    return 2 * number


@tangram.function(cpus=1, memory="128MiB")
def declared(number: float) -> float:
    return double(number)


@tangram.function(cpus=1, memory="128MiB")
def reward(text: str, wanted: float) -> dict[str, Any]:
    print("scored", text)
    return {"score": declared(wanted), "user": os.getuid(), "cores": len(os.sched_getaffinity(0))}


@tangram.function(cpus=1, memory="128MiB")
def broken() -> None:
    raise LookupError("no such thing")


def test_functions_of_a_module_run_in_sandboxes_with_all_dependencies(tmp_path: Path) -> None:
    reason = why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)

    async def test(t: Client) -> None:
        result = await t.try_call(reward, "an answer", 21)
        assert result.check() == {"score": 42, "user": 61999, "cores": 1}, "it ran outside of a sandbox"
        assert result.stdout == "scored an answer\n"
        outcome = await t.try_call(broken)
        assert outcome.kind == "error" and outcome.error is not None and "no such thing" in outcome.error.message
        assert await t.gather(*(t.call(declared, n) for n in range(6))) == [2 * n for n in range(6)]

    play(tmp_path, test, backend="sandbox", cores=2)
    assert list((tmp_path / "state" / "owners").iterdir()) == []


def test_a_function_that_was_not_called_for_longest_makes_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = why_not()
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    monkeypatch.setattr(service, "FUNCTION_POOLS_PER_TENANT_MAX", 2)

    async def test(t: Client) -> None:
        for _ in range(2):
            assert await t.call(declared, 1) == 2
            assert (await t.try_call(broken)).kind == "error"
            assert (await t.call(reward, "a", 1))["score"] == 2

    play(tmp_path, test, backend="sandbox", cores=2)


def test_a_service_without_walls_runs_no_functions(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        assert (await t.try_call(declared, 1)).kind == "refused"

    play(tmp_path, test, backend="process")
