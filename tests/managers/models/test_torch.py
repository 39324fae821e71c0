"""The engine for PyTorch: the same answers as the module itself, from tensors in device memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.managers.models.conftest import Flag, Rig, devices, run

from tangram.errors import InvalidAction, InvalidConfig, ManagerError
from tangram.managers.models import Service
from tangram.managers.models.devices import Cuda, CudaDevice
from tangram.managers.models.torch_engine import TorchEngine

torch = pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")

PAYLOAD = b"[[1, 2, 3, 4, 5, 6, 7, 8.5]]"


def tied(name: str = "tied", seed: int = 0, degrees: tuple[int, ...] = (1,), **options: Any) -> Service:
    arguments = {"seed": seed, **options.pop("arguments", {})}
    engine = TorchEngine("tests.managers.models.modules:Tied", arguments, **options)
    return Service(name=name, engine=engine, degrees=degrees)


def by_hand(seed: int = 0, **arguments: Any) -> list[list[float]]:
    from tests.managers.models.modules import Tied

    with torch.inference_mode():
        expected: list[list[float]] = Tied(seed, **arguments).eval()(torch.tensor(json.loads(PAYLOAD))).tolist()
    return expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_the_module_at_every_degree(dtype: str) -> None:
    async def test(rig: Rig) -> None:
        for chunk in ((1,), (0, 1)):
            assert json.loads((await rig.call("tied", chunk, PAYLOAD)).answer) == by_hand(dtype=dtype)

    run(Rig([tied(degrees=(1, 2), arguments={"dtype": dtype})], devices(2)), test)


def test_services_that_do_not_fit_together_alternate_and_give_their_memory_back() -> None:
    async def test(rig: Rig) -> None:
        used = set()
        for _ in range(3):
            for name, seed in (("one", 1), ("two", 2)):
                assert json.loads((await rig.call(name, payload=PAYLOAD)).answer) == by_hand(seed)
                used.add(rig.manager.statistics().device_bytes)
        assert len(used) == 1 and used != {(0,)}, "each has the same size, and the device for itself"
        assert rig.manager.statistics().evictions == 5
        assert len(rig.residency_changes()) == 11

    run(Rig([tied("one", 1), tied("two", 2)], devices(1, memory_bytes=4096)), test)


def test_a_tensor_with_two_names_is_held_once() -> None:
    weights = TorchEngine("tests.managers.models.modules:Tied").prepare()
    names = [piece.name for piece in weights.pieces]
    assert "one.weight" in names and "two.weight" not in names
    assert "scale" in names


def test_parameters_are_views_into_device_memory() -> None:
    engine = TorchEngine("tests.managers.models.modules:Tied")
    device = CudaDevice(0, Cuda(place="cpu", memory_bytes=1 << 20))
    placed = engine.load(engine.prepare(), [device])
    [module] = placed.module
    [block] = device.blocks
    start, end = block.memory.data_ptr(), block.memory.data_ptr() + block.size
    tensors = [*module.parameters(), *module.buffers()]
    assert all(start <= tensor.data_ptr() < end for tensor in tensors if tensor.numel())
    assert module.two.weight is module.one.weight
    assert json.loads(engine.call(placed, [PAYLOAD])[0]) == by_hand()


def test_a_checkpoint_is_read_once_and_reused_after_an_eviction(tmp_path: Path) -> None:
    from tests.managers.models.modules import Tied

    path = tmp_path / "state.pt"
    torch.save(Tied(7).state_dict(), path)

    async def test(rig: Rig) -> None:
        path.unlink()
        for _ in range(2):
            assert json.loads((await rig.call("tied", payload=PAYLOAD)).answer) == by_hand(7)
            await rig.call("other", payload=PAYLOAD)

    run(Rig([tied(checkpoint=str(path)), tied("other", 3)], devices(1, memory_bytes=4096)), test)


def test_batches_are_padded_by_the_function_of_the_user() -> None:
    async def test(rig: Rig) -> None:
        payloads = [b"[1]", b"[1, 2]", b"[1, 2, 3]"]
        ends = await asyncio.gather(*(rig.call("tied", payload=payload, batch="lead") for payload in payloads))
        assert [json.loads(ended.answer)["batch"] for ended in ends] == [3, 3, 3]
        alone = json.loads((await rig.call("tied", payload=payloads[1])).answer)
        assert json.loads(ends[1].answer)["sum"] == pytest.approx(alone["sum"], rel=1e-5)

    run(Rig([tied(forward_batch="tests.managers.models.modules:batch", batch_max=8)], devices(1)), test)


def test_a_payload_that_is_no_tensor_is_the_fault_of_its_caller() -> None:
    async def test(rig: Rig) -> None:
        for payload in (b"[[1], [2, 3]]", b"null", b'{"a": 1}', b"words", b"\xff", b'["a"]', b"[1%s]" % (b"0" * 40)):
            with pytest.raises(InvalidAction, match="a tensor as JSON"):
                await rig.call("tied", payload=payload)
        for payload in (b"[[1, 2]]", b"1", b"[]", b"[[[1, 2, 3, 4, 5, 6, 7]]]"):
            with pytest.raises(InvalidAction, match=r"Error: .* \(modules\.py, line \d+, in forward\)"):
                await rig.call("tied", payload=payload)
        assert json.loads((await rig.call("tied", payload=PAYLOAD)).answer) == by_hand()

    run(Rig([tied()], devices(1)), test)


def test_payload_errors_of_forward_belong_to_the_caller_and_the_rest_to_the_service() -> None:
    async def test(rig: Rig) -> None:
        for payload in (b"ValueError", b"TypeError", b"IndexError", b"KeyError"):
            with pytest.raises(InvalidAction, match=rf"{payload.decode()}: .*\(modules\.py, line \d+, in raising\)"):
                await rig.call("tied", payload=payload)
        for payload in (b"RuntimeError", b"ZeroDivisionError", b"MemoryError"):
            ended = await rig.call("tied", payload=payload)
            assert f"service tied failed: {payload.decode()}: as asked (modules.py, line" in ended.lost

    run(Rig([tied(forward="tests.managers.models.modules:raising")], devices(1), circuit_pause_s=3600.0), test)


def test_nan_and_infinities_come_back_unchanged() -> None:
    async def test(rig: Rig) -> None:
        answer = (await rig.call("same", payload=b"[NaN, Infinity, -Infinity, 1.5]")).answer
        assert answer == b"[NaN, Infinity, -Infinity, 1.5]"

    run(Rig([Service(name="same", engine=TorchEngine("torch.nn:Identity"))], devices(1)), test)


def test_a_module_that_crashes_or_loops_costs_its_own_call_alone(flag: Flag) -> None:
    async def test(rig: Rig) -> None:
        assert "signal 11" in (await rig.call("tied", payload=b"crash")).lost
        looping = await rig.start("tied", payload=b"loop")
        await looping.stop()
        assert (await looping.wait()).lost == ""
        assert (await rig.call("tied", payload=b"")).answer == b"1"  # the number of threads

    run(Rig([tied(forward="tests.managers.models.modules:misbehave")], devices(1)), test)


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        (TorchEngine("tests.managers.models.modules:Unpicklable"), "expected a picklable module"),
        (TorchEngine("json:loads", {"s": "1"}), "expected a factory of modules, got int"),
    ],
)
def test_a_factory_that_makes_no_module_is_detected_at_the_start(engine: TorchEngine, complaint: str) -> None:
    async def test(rig: Rig) -> None:
        raise AssertionError("entered")

    with pytest.raises(ManagerError, match=complaint):
        run(Rig([Service(name="a", engine=engine)], devices(1)), test)


@pytest.mark.parametrize(
    ("factory", "options", "complaint"),
    [
        (
            "tests.managers.models.modules:Missing",
            {},
            "a factory: .* module tests.managers.models.modules, which has no Missing",
        ),
        ("tests.managers.models.missing:Tied", {}, "a factory: .* there is no tests.managers.models.missing"),
        ("Tied", {}, "a factory: expected 'module:name', got 'Tied'"),
        (
            "tests.managers.models.modules:Tied",
            {"forward": "tests.managers.models.modules:missing"},
            "a forward: .* has no missing",
        ),
        (
            "tests.managers.models.modules:Tied",
            {"forward_batch": "missing:batch"},
            "a forward_batch: .* there is no missing",
        ),
        (
            "tests.managers.models.modules:Tied",
            {"forward": "tests.managers.models.modules:FEATURES"},
            "a forward: expected a function",
        ),
    ],
)
def test_a_failed_import_is_detected_at_the_start(factory: str, options: dict[str, str], complaint: str) -> None:
    async def test(rig: Rig) -> None:
        raise AssertionError("entered")

    engine = TorchEngine(factory, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=complaint):
        run(Rig([Service(name="a", engine=engine)], devices(1)), test)
