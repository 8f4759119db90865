"""`make demo`: a coding agent's session with a rig, narrated, against a real model.

Starts the rig's server as a client does, over stdio under the SDK's own client, with the small
embedded model, and checks every answer. Whatever happens, the model server it started is stopped.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from forge.launch import user_cache

if TYPE_CHECKING:
    from mcp import Client

RIG = Path(__file__).resolve().parent.parent / "local-pytorch-cpu-2b"
STATE = user_cache() / "gemma4-rigs" / "demo-state"  # kept, so that the next run knows times left
START_PATIENCE_S = 900.0  # a first start downloads 93 MB and converts them
STOP_PATIENCE_S = 60.0
SMALL_GRID = {"concurrency": [1, 2], "context_tokens": [64], "output_tokens": 16} | {
    "requests_per_cell": 4,
    "seconds_per_cell": 20,
    "save_result": False,  # figures of a few seconds are no report
}
# What the model of a rig says of itself where its weights are random numbers.
MEANS_NOTHING = "its answers mean nothing"
DONE = ("done", "installed", "ready")  # as jobs and the tools that install or build say it
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WIDTH = 92


class DemoFailed(Exception):
    """A step did not do what it should; the message says which and what came instead."""


@dataclass(frozen=True)
class Answer:
    """What a call brought: the structured half (empty on an error) and the text."""

    fields: Mapping[str, Any]
    text: str
    is_error: bool


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_environment(state: Path, port: int) -> dict[str, str]:
    """The environment of the rig's server: this one's, the embedded model, a port, own state.

    The user's own settings for the rig are left out, so that the demo shows the same everywhere.
    """
    other = ("RIG_READ_ONLY", "RIG_TOOLSETS", "DTYPE", "MAX_MODEL_LEN", "SLOTS", "QUERY_TIMEOUT_S")
    kept = {name: value for name, value in os.environ.items() if name not in other}
    own = {"MODEL_NAME": "embedded", "PORT": str(port), "XDG_STATE_HOME": str(state)}
    return {**kept, **own}


class Narrator:
    """Writes the story to standard output; in colour on a terminal only."""

    def __init__(self) -> None:
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.step = 0

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def say(self, text: str = "", code: str = "0") -> None:
        print(self._paint(code, text), flush=True)

    def intend(self, thought: str, call: str) -> None:
        """The agent's next step: what it thinks, and the call that follows from it."""
        self.step += 1
        self.say()
        self.say(f"{self.step}. {thought}", "1")
        self.say(f"   -> {call}", "36")

    def progress(self, text: str) -> None:
        self.say(f"      {text}", "2")

    def heard(self, text: str, seconds: float) -> None:
        """The answer, wrapped, with the seconds it took."""
        told = f"{text} ({seconds:.1f} s)".split("\n")
        lines = [line for part in told for line in textwrap.wrap(part, WIDTH)] or ["(nothing)"]
        for line in lines:
            self.say(f"   <- {line}" if line is lines[0] else f"      {line}")


class Session:
    """The agent's side: calls tools, tells what it does, and holds every answer to its promise."""

    def __init__(self, client: Client, narrator: Narrator) -> None:
        self._client = client
        self._narrator = narrator

    async def call(
        self,
        thought: str,
        tool: str,
        check: Callable[[Answer], bool],
        show: Callable[[Answer], str] = lambda answer: str(answer.fields.get("summary", "")),
        **arguments: Any,
    ) -> Answer:
        """Call `tool` and narrate it. Raises DemoFailed when `check` fails on the answer."""
        words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        self._narrator.intend(thought, f"{tool}({words})")
        answer, seconds = await self._timed(tool, arguments)
        good = check(answer)
        self._narrator.heard(show(answer) if good else answer.text, seconds)
        if not good:
            raise DemoFailed(f"step {self._narrator.step}, {tool}, did not do what it should")
        return answer

    async def means_nothing(self) -> bool:
        """Whether the served model says of itself that its answers mean nothing."""
        answer, _ = await self._timed("get_model_details", {})
        return MEANS_NOTHING in str(answer.fields.get("beside", ""))

    async def job(
        self,
        thought: str,
        tool: str,
        show: Callable[[Answer], str] = lambda answer: str(answer.fields.get("summary", "")),
        **arguments: Any,
    ) -> None:
        """Start a job and follow it to its good end. Raises DemoFailed."""
        going = ("queued", "running", "installing", "building")
        answer = await self.call(thought, tool, _in_state(*going, *DONE), **arguments, wait_s=2)
        while answer.fields["state"] in going:
            self._narrator.intend("I follow it.", f"get_job({answer.fields['job_id']!r}, …)")
            arguments = {"job_id": answer.fields["job_id"], "wait_s": 50}
            answer, seconds = await self._timed("get_job", arguments)
            if not _in_state(*going, *DONE)(answer):
                raise DemoFailed(f"{tool}: {answer.text}")
            told = show if answer.fields["state"] in DONE else None
            self._narrator.heard(told(answer) if told else answer.fields["summary"], seconds)

    async def _timed(self, tool: str, arguments: dict[str, Any]) -> tuple[Answer, float]:
        told = ""

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            nonlocal told
            # The time left counts down several times a second; a new line is for new words only.
            words = (message or "").partition(", about ")[0]
            if message and words != told:
                told = words
                self._narrator.progress(message)

        begun = time.monotonic()
        result = await self._client.call_tool(tool, arguments, progress_callback=tell)
        text = "\n".join(item.text for item in result.content if item.type == "text")
        answer = Answer(result.structured_content or {}, text, bool(result.is_error))
        return answer, time.monotonic() - begun


def _in_state(*states: str) -> Callable[[Answer], bool]:
    return lambda answer: not answer.is_error and answer.fields.get("state") in states


def _refused_with_advice(answer: Answer) -> bool:
    return answer.is_error and answer.text.startswith("EXISTS ") and "Next: stop_" in answer.text


def _said(answer: Answer) -> str:
    return f"{answer.fields['text'].strip()!r} … {answer.fields['summary']}"


async def play(client: Client, narrator: Narrator) -> None:
    """The whole session. Raises DemoFailed at the first step that does not do what it should."""
    session = Session(client, narrator)
    tools = {tool.name for tool in (await client.list_tools()).tools}
    wait_tool = next(name for name in sorted(tools) if name.startswith("wait_for_"))
    narrator.say(f"The server is up and offers {len(tools)} tools.")

    await session.call(
        "Before anything is paid for: would the largest one fit on a rented TPU v5e chip?",
        "plan_deployment",
        lambda answer: answer.fields.get("fits") is False and bool(answer.fields["reasons"]),
        lambda answer: f"{answer.fields['summary']} {answer.fields['reasons'][0]}",
        model="31B",
        hardware="v5e1",
        engine="vllm",
    )
    status = await session.call(
        "What runs at the moment? I look before I touch anything.",
        "get_system_status",
        _in_state("stopped", "starting", "ready", "failed"),
    )
    if status.fields["state"] != "stopped":
        await session.call("An earlier demo was cut off.", "stop_model", _in_state("stopped"))
    for tool in sorted(name for name in tools if name.startswith(("build_", "install_"))):
        await session.job("The engine may be missing here. What is there is not made twice.", tool)
    answer = await session.call(
        "Nothing runs. I start the model; that is a job, and I follow it for a while.",
        "serve_model",
        _in_state("starting", "ready"),
        wait_s=5,
    )
    deadline = time.monotonic() + START_PATIENCE_S
    while answer.fields["state"] != "ready":
        if time.monotonic() > deadline:
            raise DemoFailed(f"the model was not ready within {START_PATIENCE_S:.0f} s")
        answer = await session.call(
            "It is still starting. I wait; no call takes longer than 50 seconds.",
            wait_tool,
            _in_state("starting", "ready"),
            wait_s=50,
        )
    senseless = await session.means_nothing()
    await session.call(
        "Ready means that it has generated something. Is it also right?"
        + (f" (It says of itself: {MEANS_NOTHING}. So it must not be called healthy.)" * senseless),
        "verify_model_health",
        lambda answer: answer.fields.get("healthy") is not senseless,
        lambda answer: f"{answer.fields['answer'].strip()!r} {answer.fields['summary']}",
    )
    await session.call(
        "Then I ask it something.",
        "query_gemma4",
        lambda answer: bool(str(answer.fields.get("text", "")).strip()),
        _said,
        prompt="In one sentence: why is the sky blue?",
        max_tokens=48,
    )
    await session.call(
        "How fast is it here? Another question, with the clock running.",
        "query_gemma4_with_stats",
        lambda answer: answer.fields.get("complete") is True and answer.fields["tokens_per_s"] > 0,
        _said,
        prompt="Name three colours.",
        max_tokens=24,
    )
    bench = next(name for name in tools if name.startswith("run_") and name.endswith("benchmark"))
    await session.job(
        "One answer is no measurement. A small grid, from a process of its own.",
        bench,
        lambda answer: "\n".join(answer.fields["result"]["cells"]),
        **SMALL_GRID,
    )
    await session.call(
        "And its log? It is running, so I expect nothing.",
        "analyze_logs",
        lambda answer: answer.fields.get("summary") == "no failure found",
    )
    await session.call(
        "Now the big one beside it. (This must fail, and say what to do.)",
        "serve_model",
        _refused_with_advice,
        lambda answer: answer.text,
        model="google/gemma-4-E2B-it",
    )
    await session.call("I do as I am told.", "stop_model", _in_state("stopped"))
    await session.call("Is it really gone?", "get_system_status", _in_state("stopped"))


async def run_session(
    rig: Path, environment: Mapping[str, str], narrator: Narrator, errors: TextIO
) -> None:
    """Start the server as a client does, play the session, let the server go.

    Raises DemoFailed, bare: the client would wrap what passes through it in exception groups.
    """
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    argv = [str(rig / "launch.py")]
    server = StdioServerParameters(command=sys.executable, args=argv, env=dict(environment))
    failure: DemoFailed | None = None
    try:
        async with Client(stdio_client(server, errlog=errors)) as client:
            try:
                await play(client, narrator)
            except DemoFailed as error:
                failure = error
    except Exception as error:
        failure = failure or DemoFailed(f"the server was lost in step {narrator.step}: {error}")
    if failure is not None:
        raise failure


def clean_up(rig: Path, environment: Mapping[str, str]) -> str:
    """Stop what this demo started, through a process of its own; returns what stop_model said.

    The session's server may be gone or hanging by then. Raises DemoFailed when it cannot be done.
    """
    command = [sys.executable, str(rig / "launch.py"), "call", "stop_model"]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=STOP_PATIENCE_S,
            start_new_session=True,  # a second Ctrl-C at the terminal must not reach it
        )
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"stopping took over {STOP_PATIENCE_S:.0f} s; try it again") from None
    if done.returncode:
        raise DemoFailed(f"stopping failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.splitlines()[0]


@contextmanager
def only_demo(state: Path) -> Iterator[None]:
    """Hold the demo's state for this process. Raises DemoFailed when another demo runs."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (state / "demo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DemoFailed("another demo is running; wait until it has ended") from None
        yield


async def _until_signal(session: Coroutine[Any, Any, None]) -> int:
    """Run `session`; the interrupts cancel it. Returns the signal's number, 0 without one."""
    task = asyncio.ensure_future(session)
    received = 0

    def interrupt(number: int) -> None:
        nonlocal received
        received = received or number
        task.cancel()

    for number in INTERRUPTS:
        asyncio.get_running_loop().add_signal_handler(number, interrupt, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    return received


def run_guarded(
    rig: Path, environment: Mapping[str, str], narrator: Narrator, errors: TextIO
) -> int:
    """The session, then, unless it came to its end, the cleaning up, which nothing interrupts.

    Returns the number of the signal that broke it off, 0 if none did. Raises DemoFailed.
    """
    finished = False
    try:
        number = asyncio.run(_until_signal(run_session(rig, environment, narrator, errors)))
        finished = not number
    finally:
        for each in INTERRUPTS:
            signal.signal(each, signal.SIG_IGN)
        if not finished:
            # Nobody may be reading any more; that must not keep the cleaning up from happening.
            with suppress(OSError):
                narrator.say("\nBroken off. The model server and its jobs are being stopped …", "1")
            said = clean_up(rig, environment)
            with suppress(OSError):
                narrator.say(f"   {said}")
    return number


def main(arguments: list[str]) -> int:
    """Run the demo with the rig in the folder given, or the first one.

    Returns 0 only if every step did what it should, 1 if not, 128 + the signal's number.
    """
    rig = Path(arguments[0]).resolve() if arguments else RIG
    narrator, begun = Narrator(), time.monotonic()
    narrator.say(f"A session with the rig {rig.name}, as a coding agent would have it.", "1")
    narrator.say(f"Its state is kept in {STATE}, apart from yours.")
    environment = server_environment(STATE, free_port())
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            with only_demo(STATE):
                number = run_guarded(rig, environment, narrator, errors)
        except DemoFailed as failure:
            errors.seek(0)
            with suppress(OSError):
                for fault in (failure.__context__, failure):  # cleaning up may fail on top
                    if isinstance(fault, DemoFailed):
                        narrator.say(f"\nFAILED: {str(fault).rstrip('.')}.", "1;31")
                for line in errors.read().splitlines()[-20:]:
                    narrator.progress(line)
            return 1
    if number:
        return 128 + number
    narrator.say(f"\nEvery step did what it should, in {time.monotonic() - begun:.0f} s.", "1;32")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
