"""SIGKILL at any moment of a start: the next server tells what is so, and stops what is left.

The built server of the local rig, with the fake `transformers serve`. It is killed by the clock, as
a user or the system would, and exactly before and after each of its steps that outlast it: a line
of the journal, a record, a detached process. The job's worker is killed in the same places.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

from forge.suites.raw_stdio import call_fault, raw_server
from forge.suites.rig_case import RigCase, RigUnderTest, use_rig

RIG_FOLDER = Path(__file__).resolve().parent.parent / "local-pytorch-cpu-2b"
TIMED_KILLS = 10
GRACE_S = 3.0  # ten seconds in real life, in which a worker is waited for that never shows itself
KILLS_WITHIN_S = 2.0

# Counts the steps that leave something behind, in the process of one role, and ends that process
# by SIGKILL right before or right after the step that the environment names.
_COUNT_AND_KILL = """
import json, os, signal

role = "job" if "job" in sys.argv[1:2] else "server"
wanted = os.environ.get("KILL_AT", "")
steps = [0]


def counted(name, original):
    def step(*arguments, **keywords):
        steps[0] += 1
        with open(os.environ["STEPS_FILE"], "a") as file:
            file.write(json.dumps([role, steps[0], name]) + "\\n")
        if wanted == f"{role} before {steps[0]}":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **keywords)
        if wanted == f"{role} after {steps[0]}":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return step


server._WORKER_START_GRACE_S = {grace}
server.Journal.append = counted("journal", server.Journal.append)
server.write_json = counted("record", server.write_json)
server.spawn_detached = counted("spawn", server.spawn_detached)
"""


def setUpModule() -> None:
    use_rig(RigUnderTest(RIG_FOLDER, {}))


class KilledServerTests(RigCase):
    """After each kill: the truth, a stop that leaves nothing, a start that works."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.write_runner("killed.py", _COUNT_AND_KILL.replace("{grace}", str(GRACE_S)))
        cls.steps_file = cls.place / "steps"

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        self.engine.script(load_s=0.3)
        patience = mock.patch.object(self.module, "_WORKER_START_GRACE_S", GRACE_S)
        patience.start()
        self.addCleanup(patience.stop)

    async def _steps_of_a_start(self) -> dict[str, list[str]]:
        """By role, the names of the steps of an undisturbed start, in order."""
        self.steps_file.unlink(missing_ok=True)
        environment = {**self.environment, "STEPS_FILE": str(self.steps_file)}
        runner = self.rig_folder / "killed.py"
        with raw_server(runner, environment, self.stderr_file) as server:
            answer = server.call("serve_model", {"wait_s": 50})
            self.assertEqual(call_fault(answer), "")
            steps = [json.loads(line) for line in self.steps_file.read_text().splitlines()]
            self.assertEqual(call_fault(server.call("stop_model", {})), "")
        found = {role: [name for by, _, name in steps if by == role] for role in ("server", "job")}
        self.assertEqual(found["server"], ["record", "journal", "spawn"])
        # A record is written as progress is made, so their number differs from run to run.
        lasting = [name for name in found["job"] if name != "record"]
        self.assertEqual(lasting, ["journal", "spawn", "journal", "journal"])
        return found

    def _server_killed(self, kill_at: str) -> None:
        """Begin a start in a server that ends by SIGKILL at `kill_at`."""
        environment = {**self.environment, "KILL_AT": kill_at, "STEPS_FILE": str(self.steps_file)}
        runner = self.rig_folder / "killed.py"
        with raw_server(runner, environment, self.stderr_file) as server:
            number = server.send("tools/call", {"name": "serve_model", "arguments": {"wait_s": 50}})
            self.assertIsNone(server.receive(number), f"{kill_at}: the server was not killed")
            self.assertEqual(server.process.wait(10), -signal.SIGKILL, kill_at)

    async def _worker_killed(self, kill_at: str) -> None:
        """Begin a start whose worker ends by SIGKILL at `kill_at`, and see it end."""
        with mock.patch.dict("os.environ", KILL_AT=kill_at, STEPS_FILE=str(self.steps_file)):
            async with self.in_process(server_file="killed.py") as client:
                begun = await self.answer(client, "serve_model", wait_s=50)
                job = await self.answer(client, "get_job", job_id=begun["job_id"])
                # Before the last record the model is ready, and only the job does not know it.
                self.assertEqual(job["state"], "lost", kill_at)

    async def _the_next_server_copes(self, where: str, *, again: bool = True) -> str:
        """Truth, stop, and if `again` a new start: asserts them; returns the state it found."""
        async with self.in_process() as client:
            # What goes on without the killed server may go on; then it is at an end.
            for _ in range(3):
                await client.call_tool("wait_for_model_ready", {"wait_s": 20})
                status = await self.answer(client, "get_system_status")
                if status["state"] != "starting":
                    break
            servers = self.processes("server")
            self.assertEqual(
                [status["pid"]] if status["pid"] else [], servers, f"{where}: {status}"
            )
            self._state_is_true(where, status, servers)
            if status["state"] == "ready":
                await self.answer(client, "query_gemma4", prompt="hello")
            elif servers:
                await self.refusal(client, "serve_model", "EXISTS")
                await self.refusal(client, "query_gemma4", "NOT_FOUND", prompt="hello")
            stopped = await self.answer(client, "stop_model")
            self.assertEqual(stopped["state"], "stopped", where)
            await self.assert_all_gone()
            if again:
                ready = await self.answer(client, "serve_model", wait_s=50)
                self.assertEqual(ready["state"], "ready", where)
                await self.answer(client, "stop_model")
                await self.assert_all_gone()
        return str(status["state"])

    def _state_is_true(self, where: str, status: dict[str, Any], servers: list[int]) -> None:
        told = f"{where}: {status}"
        self.assertIn(status["state"], ("ready", "failed", "stopped"), told)
        if status["state"] == "ready":
            self.assertEqual(len(servers), 1, told)
            self.assertTrue(status["endpoint"], told)
        elif status["state"] == "failed":
            self.assertEqual(len(servers), 1, told)
            self.assertIn("half-started", " ".join(status["notes"]), told)
        else:
            self.assertEqual(servers, [], told)

    async def test_killed_by_the_clock(self) -> None:
        server_file = self.rig_folder / "server.py"
        found = []
        for number in range(TIMED_KILLS):
            delay = KILLS_WITHIN_S * number / TIMED_KILLS
            with self.subTest(f"after {delay:.2f} s"):
                with raw_server(server_file, self.environment, self.stderr_file) as server:
                    server.send("tools/call", {"name": "serve_model", "arguments": {"wait_s": 50}})
                    time.sleep(delay)
                    server.process.kill()
                    server.process.wait()
                found.append(await self._the_next_server_copes(f"after {delay:.2f} s"))
        # Too early and nothing had begun; late enough and the worker finished on its own.
        self.assertIn("ready", found)

    async def test_killed_before_and_after_each_step_of_the_server(self) -> None:
        steps = (await self._steps_of_a_start())["server"]
        found = {}
        for number, name in enumerate(steps, start=1):
            for side in ("before", "after"):
                where = f"server {side} {number}"
                with self.subTest(f"{where} ({name})"):
                    self._server_killed(where)
                    found[f"{side} {name}"] = await self._the_next_server_copes(where)
        self.assertEqual(found.get("before spawn"), "stopped")
        self.assertEqual(found.get("after spawn"), "ready", "the worker fell with its server")

    async def test_killed_before_each_step_of_the_worker(self) -> None:
        steps = (await self._steps_of_a_start())["job"]
        spawn = steps.index("spawn") + 1
        points = [f"job before {number}" for number in range(1, len(steps) + 1)]
        # Records of progress come and go with the clock; the ones that matter are at the ends.
        points = points[: spawn + 3] + points[-4:] if len(points) > spawn + 7 else points
        found = {}
        for where in [*points, f"job after {spawn}"]:
            with self.subTest(where):
                await self._worker_killed(where)
                again = where.endswith(f" {spawn}") or where == points[-1]
                found[where] = await self._the_next_server_copes(where, again=again)
        self.assertEqual(found.get(f"job before {spawn}"), "stopped")
        self.assertEqual(found.get(f"job after {spawn}"), "failed")

    async def test_worker_and_server_are_killed_together(self) -> None:
        """As when the whole session goes: only the model server is left, without its pid."""
        server_file = self.rig_folder / "server.py"
        self.engine.script(never_listens=True)
        with raw_server(server_file, self.environment, self.stderr_file) as server:
            self.assertEqual(call_fault(server.call("serve_model", {})), "")
            await self.until(lambda: self.processes("server"), "the model server never began")
            for pid in self.processes("job"):
                os.kill(pid, signal.SIGKILL)
            server.process.kill()
        record = self.rig_state / "server.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "pid": None}))
        await self.until(lambda: not self.processes("job"), "the worker did not die")
        self.engine.script()
        self.assertEqual(await self._the_next_server_copes("both at once"), "failed")

    async def test_intents_stand_before_acts_whatever_was_killed(self) -> None:
        await self._worker_killed("job after 1")
        await self._the_next_server_copes("job after 1")
        events = [entry["event"] for entry in self.journal()]
        started = [index for index, event in enumerate(events) if event == "server started"]
        self.assertTrue(started)
        for index in started:
            self.assertEqual(events[index - 1], "server start intended")
