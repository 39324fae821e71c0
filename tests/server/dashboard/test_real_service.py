"""The page of a real service, in a process of its own that is killed: what was asked of it is what is seen."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.client.conftest import why_not
from tests.server.dashboard.conftest import Opener
from tests.server.process import Process

ADMIN = "0123456789abcdef" * 3


def send_request(process: Process, method: str, path: str, body: Any = None, token: str = ADMIN) -> Any:
    request = urllib.request.Request(
        process.url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        content = response.read()
    return json.loads(content) if content else None


def run(process: Process, token: str, id: str, command: str, wait_s: float = 30.0) -> Any:
    body = {"id": id, "sandbox": "box", "trajectory": "t1", "work": {"type": "Exec", "command": command}}
    return send_request(process, "POST", f"/v1/actions?wait_s={wait_s}", body, token)


def test_a_real_service_is_shown_live_drilled_into_and_shown_again_after_a_kill(tmp_path: Path, screen: Opener) -> None:
    if why_not():
        pytest.skip(why_not())
    folder = tmp_path / "service"
    folder.mkdir(mode=0o700)
    (folder / "admin.token").write_text(ADMIN)
    (folder / "admin.token").chmod(0o600)
    process = Process(folder, backend="sandbox", service='admin_token_file = "admin.token"', node="cores = 2")
    with process:
        token = send_request(process, "POST", "/v1/runs/maths", {})["token"]
        opening = {"type": "Open", "spec": {"memory_bytes": 64 << 20}}
        send_request(process, "POST", "/v1/actions", {"id": "open", "sandbox": "box", "work": opening}, token)
        run(process, token, "first", "echo one")
        run(process, token, "held", "sleep 600", wait_s=0.0)

        page = screen(process)
        page.go(wait=False)
        page.until("document.querySelector('input[type=password]') !== null")
        page.page.fill("input[type=password]", ADMIN)
        page.page.press("input[type=password]", "Enter")
        page.until("document.body.innerText.includes('maths') && document.body.innerText.includes('cpu@local')")
        page.turn_to("actions")
        page.until("document.body.innerText.includes('maths/held')")
        page.page.click("text=maths/held")
        page.until("document.body.innerText.includes('granted')")
        page.turn_to("timeline")
        page.until("document.body.innerText.includes('actions from')")

        process.kill()
        page.until("!document.body.innerText.includes('Live,')")
        process.start()
        page.until("document.body.innerText.includes('lost while running')")  # what the start found
        run(process, token, "second", "echo two")
        page.turn_to("sandboxes")
        page.until("document.body.innerText.includes('maths/box')")
        assert page.js("document.body.innerText.includes('Live')")
        send_request(process, "DELETE", "/v1/runs/maths")
    page.faults[:] = [fault for fault in page.faults if "401" not in fault]  # it asked for a token
