"""Translation: what a caller may say, and as what the service understands it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tangram.core.demand import fixed
from tangram.errors import AdmissionRefused, InvalidAction
from tangram.managers.work import HOST_IMAGE, Commit, Open
from tangram.runtime.views import HIDDEN_NAME
from tangram.runtime.wire import NAME, RUN, Caps, Submission
from tangram.server.actions.translate import (
    CHOICES_MAX,
    KINDS_BY_WORK,
    UNITS_MAX,
    AdmissionPolicy,
    TenantNamespace,
    running_pool,
    translate,
    with_running_cap,
)
from tangram.server.tenants import Principal, Revocation

IMAGES = {"a:one": "a:one", "a:added": "sha256-1", "b:other": "b:other", "ab:third": "ab:third"}
RULES = AdmissionPolicy(quota_pools=frozenset({"search", "search/requests"}), capture_bytes_max=1 << 20)
A = Principal("a", "a", False, Caps(), Revocation())
ADMIN = Principal("admin", "", True, Caps(), Revocation())

words = st.from_regex(NAME, fullmatch=True).map(lambda name: name[:100])
runs = st.from_regex(RUN, fullmatch=True)


def translated(caller: Principal = A, rules: AdmissionPolicy = RULES, **fields: Any) -> Any:
    record = {"id": "it", "work": {"type": "Exec", "command": "true"}, "sandbox": "box"} | fields
    submission = msgspec.json.decode(msgspec.json.encode(record), type=Submission)
    return translate(submission, caller, TenantNamespace(caller.tenant, IMAGES), rules)


@given(runs, words, runs, words)
def test_no_two_callers_can_mean_the_same_thing(one: str, name: str, other: str, word: str) -> None:
    mine, others = TenantNamespace(one, {}), TenantNamespace(other, {})
    if (one, name) != (other, word):
        assert mine.qualify("id", name) != others.qualify("id", word)
        assert mine.qualify_image(name) != others.qualify_image(word)
        assert mine.qualify_image_key(name) != others.qualify_image_key(word)


@given(st.text(max_size=120))
@example("b/x")
@example("b:x")
@example("../b/x")
@example("x\n")
@example("x\0")
@example("x%2Fy")
@example("x\\y")
@example("é")
def test_a_name_holds_nothing_that_could_lead_elsewhere(name: str) -> None:
    names = TenantNamespace("a", {})
    try:
        inner = names.qualify("id", name)
    except InvalidAction:
        assert not (0 < len(name) <= 100 and NAME.fullmatch(name))
    else:
        assert inner == f"a/{name}" and inner.isascii() and inner.isprintable() and inner.count("/") == 1


@given(runs, words)
def test_a_name_is_returned_as_it_was_given(run: str, name: str) -> None:
    names = TenantNamespace(run, {})
    assert names.unqualify(names.qualify("id", name)) == name
    assert names.unqualify(names.qualify_image(name)) == name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sandbox b/box is gone", "sandbox box is gone"),
        ("image 'b:one' is gone", "image 'one' is gone"),
        ("/usr/b/c and job/x and a.b/c", "/usr/b/c and job/x and a.b/c"),
        ("http://b:80 is b:one", "http://b:80 is one"),
        ("one of host, a:one, ab:third, b:other", f"one of host, {HIDDEN_NAME}, {HIDDEN_NAME}, other"),
    ],
)
def test_sentences_lose_the_names_of_spaces_and_nothing_else(text: str, shown: str) -> None:
    assert TenantNamespace("b", IMAGES).unqualify(text) == shown


def test_images_are_those_of_the_caller() -> None:
    names = TenantNamespace("a", IMAGES)
    assert (names.resolve_image(HOST_IMAGE), names.resolve_image("one"), names.resolve_image("added")) == (
        HOST_IMAGE,
        "a:one",
        "sha256-1",
    )
    for name in ("other", "b:other", "a:one", "sha256-1", "", "../b:other"):
        with pytest.raises(InvalidAction) as caught:
            names.resolve_image(name)
        assert caught.value.expected == "one of 'host', 'added', 'one'"
    assert (names.image_name("sha256-1"), names.image_name("b:other"), names.image_name("nothing")) == ("added", "", "")


def test_a_commit_makes_an_image_of_its_run() -> None:
    _, work = translated(work={"type": "Commit", "image": "fresh"})
    assert work == Commit(image="a:fresh")
    with pytest.raises(InvalidAction):
        translated(work={"type": "Commit", "image": "b:other"})


def test_a_run_acts_in_its_own_name_only() -> None:
    action, _ = translated()
    assert (action.id, action.run, action.sandbox) == ("a/it", "a", "a/box")
    with pytest.raises(InvalidAction, match="run"):
        translated(run="b")
    action, _ = translated(ADMIN, run="b")
    assert (action.id, action.run) == ("admin/it", "b")


def test_kinds_are_not_made_up() -> None:
    assert translated(kind="server")[0].kind == "server"
    for kind in ("open", "prepare", "warm", "exec2", "EXEC"):
        with pytest.raises(InvalidAction, match="kind"):
            translated(kind=kind)
    assert all(kinds for kinds in KINDS_BY_WORK.values())


def test_the_demand_of_each_operation_matches_its_work() -> None:
    with pytest.raises(InvalidAction, match="demand"):
        translated(demand={"pools": {"cpu": {"min": 1, "max": 1}, "gpu": {"min": 1, "max": 1}}})
    with pytest.raises(InvalidAction, match="demand"):
        translated(work={"type": "Hold"}, sandbox="", demand={"pools": {"cpu": {"min": 1, "max": 1}}})
    with pytest.raises(InvalidAction, match="demand"):
        translated(demand={"pools": {"running/b": {"min": 1, "max": 1}}})
    action, _ = translated(work={"type": "Hold"}, sandbox="", demand={"pools": {"search": {"min": 1, "max": 1}}})
    assert action.demand.pools == {"search": fixed(1)}
    for pool in ("function/b/x", "endpoint/b/x"):
        action, _ = translated(demand={"pools": {"cpu": {"min": 1, "max": 1}, pool: {"min": 1, "max": 1}}})
        assert list(action.demand.pools) == ["cpu"]  # the name that a client gives the pool of its function is ignored


@pytest.mark.parametrize(
    "amounts",
    [
        {"min": 1, "max": UNITS_MAX + 1},
        {"min": 1, "max": 10**30},
        {"min": 1, "max": 2, "step": 10**30},
        {"min": 1, "max": CHOICES_MAX + 1, "choices": list(range(1, CHOICES_MAX + 2))},
    ],
)
def test_absurd_amounts_are_refused(amounts: dict[str, Any]) -> None:
    with pytest.raises(InvalidAction, match="demand"):
        translated(demand={"pools": {"cpu": amounts}})


def test_operations_on_sandboxes_have_their_own_demand() -> None:
    """Opening a sandbox cannot demand a whole machine, nor nothing."""
    demand = {"pools": {"cpu": {"min": 64_000, "max": 64_000}}}
    for work in ({"type": "Open", "spec": {}}, {"type": "Close"}, {"type": "Commit", "image": "x"}):
        assert translated(work=work, demand=demand)[0].demand.pools["cpu"].max < 1000


def test_network_requires_the_permission_of_the_admin() -> None:
    work = {"type": "Open", "spec": {"network": True}}
    with pytest.raises(AdmissionRefused) as caught:
        translated(work=work)
    assert caught.value.limit == "network"
    allowed = Principal("a", "a", False, Caps(network=True), Revocation())
    _, opened = translated(allowed, work=work)
    assert isinstance(opened, Open) and opened.spec.network
    with pytest.raises(AdmissionRefused):
        translated(
            Principal("a", "a", False, Caps(network=False), Revocation()), AdmissionPolicy(network=True), work=work
        )
    assert translated(ADMIN, work=work)[1].spec.network


def test_the_output_that_is_kept_has_a_limit() -> None:
    work = {"type": "Exec", "command": "true", "capture_bytes_max": (1 << 20) + 1}
    with pytest.raises(AdmissionRefused) as caught:
        translated(work=work)
    assert caught.value.limit == "capture_bytes_max"


def test_no_address_is_called_that_the_config_does_not_name() -> None:
    def post(url: str, *allowed: str) -> None:
        work = {"type": "Post", "endpoint": {"name": "x", "url": url}, "body": "", "key": "k"}
        translated(rules=AdmissionPolicy(endpoints=allowed), work=work, sandbox="")

    with pytest.raises(AdmissionRefused, match="none"):
        post("http://169.254.169.254/latest")
    with pytest.raises(AdmissionRefused):
        post("http://inside/", "https://rewards.example/")
    post("https://rewards.example/score", "https://rewards.example/")


def test_functions_require_a_manager_of_sandboxes() -> None:
    work: dict[str, Any] = {
        "type": "Call",
        "function": {"name": "f", "module": "os", "qualname": "system"},
        "arguments": "",
    }
    with pytest.raises(AdmissionRefused) as caught:
        translated(work=work, sandbox="")
    assert caught.value.limit == "functions"
    action, _ = translated(rules=AdmissionPolicy(functions=True), work=work, sandbox="")
    assert action.demand.pools["function/a/f"] == fixed(1)
    work["function"] = work["function"] | {"paths": ["/python3" + "9" * 5000 + ".zip"]}
    with pytest.raises(InvalidAction, match="paths"):
        translated(rules=AdmissionPolicy(functions=True), work=work, sandbox="")


def test_a_cap_on_what_runs_is_a_pool_of_its_run() -> None:
    action, _ = translated(Principal("a", "a", False, Caps(running_max=2), Revocation()))
    assert running_pool("a") not in action.demand.pools, "then a submission would change when the cap does"
    assert with_running_cap(action).demand.pools[running_pool("a")] == fixed(1)
