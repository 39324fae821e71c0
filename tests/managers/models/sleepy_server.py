"""A server that keeps the contract of sleep mode: `python sleepy_server.py PORT LOG`. It logs its requests.

Prompts: `crash` ends it, `wait` is never answered, `wrong` is the fault of the caller, `broken` that of the server, a
number is the status of the answer, `lazy` makes it refuse to sleep from then on. Called while it sleeps, it fails.

A third word breaks the contract: `unhealthy` is never ready, `sleepless` has no sleep mode, `garbled` speaks no JSON of
it, `drowsy` starts asleep and never wakes up.
"""

from __future__ import annotations

import asyncio
import os
import sys

from aiohttp import web

PORT, LOG, FAULT = int(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
state = {"sleeping": FAULT == "drowsy", "lazy": False, "waking": False, "together": 0, "most": 0}


def note(word: str) -> None:
    with open(LOG, "a", encoding="utf-8") as file:
        file.write(f"{word}\n")


async def health(request: web.Request) -> web.Response:
    if FAULT == "unhealthy":
        note("asked")
        return web.Response(status=500)
    return web.Response()


async def is_sleeping(request: web.Request) -> web.Response:
    if FAULT == "garbled":
        return web.Response(text="<html>")
    if FAULT == "drowsy" and state["waking"]:
        note("asked")
    return web.json_response({"is_sleeping": state["sleeping"]})


async def sleep(request: web.Request) -> web.Response:
    if state["lazy"]:
        return web.Response(status=500, text="no")
    note(f"sleep {request.query['level']}")
    state["sleeping"] = True
    return web.Response()


async def wake_up(request: web.Request) -> web.Response:
    note("wake_up")
    state["waking"] = True
    state["sleeping"] = FAULT == "drowsy"
    return web.Response()


async def completions(request: web.Request) -> web.Response:
    prompt = (await request.json())["prompt"]
    if state["sleeping"]:
        return web.Response(status=500, text="asleep")
    if prompt == "crash":
        os._exit(3)
    if prompt == "wrong":
        return web.Response(status=400, text="no such parameter")
    if prompt.isdigit():
        return web.Response(status=int(prompt), text="as you like")
    if prompt == "broken":
        return web.Response(status=500, text="out of luck")
    state["lazy"] = state["lazy"] or prompt == "lazy"
    state["together"] += 1
    state["most"] = max(state["most"], state["together"])
    try:
        if prompt == "wait":
            note("waiting")
            await asyncio.sleep(3600)
        while prompt.startswith("pair") and state["most"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        note("hung up")
        raise
    finally:
        state["together"] -= 1
    content = {"text": prompt.upper(), "pid": os.getpid(), "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}
    return web.json_response(content)


if __name__ == "__main__":
    note(f"start {os.getpid()}")
    app = web.Application()
    app.add_routes([web.get("/health", health), web.post("/v1/completions", completions)])
    if FAULT != "sleepless":
        app.add_routes([web.get("/is_sleeping", is_sleeping), web.post("/sleep", sleep), web.post("/wake_up", wake_up)])
    web.run_app(app, host="127.0.0.1", port=PORT, print=None, handler_cancellation=True)
