"""A state folder that takes no byte: no intent on the disk, no act; and the server goes on.

A limit on the size of files stands in for the full disk: it needs no privilege and no mount, and
the writes fail in the same place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any, ClassVar

from forge.suites.raw_stdio import RawServer, call_fault, raw_server
from forge.suites.rig_case import RigCase, spelled

# The soft limit alone, so that a program which stands at the edge can lift it for itself.
NO_FILE_GROWS = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


class FullDiskSuite(RigCase):
    """What cannot be written down is not started, and says so."""

    starting_tool: ClassVar[str] = "serve_model"
    starting_arguments: ClassVar[Mapping[str, Any]] = {}
    preamble: ClassVar[str] = ""  # of the runner that is the rig's server
    looking: ClassVar[tuple[str, ...]] = ("get_system_status", "wait_for_model_ready", "get_help")

    def _refused(self, server: RawServer, *words: str) -> None:
        """A start is DENIED with `words`, and everything that only looks still answers."""
        starts = len(self.engine.starts())
        fault = call_fault(server.call(self.starting_tool, dict(self.starting_arguments)))
        self.assertTrue(fault.startswith("DENIED "), fault)
        for word in (*words, " Next: "):
            self.assertIn(word, fault)
        for tool in self.looking:
            self.assertEqual(call_fault(server.call(spelled(tool), {})), "", tool)
        status = server.call("get_system_status", {})["result"]["structuredContent"]
        self.assertEqual(status["state"], "stopped")
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.engine.starts()), starts)
        self.assertTrue(server.answers_ping())

    def test_the_disk_is_full(self) -> None:
        runner = self.write_runner("full.py", self.preamble + NO_FILE_GROWS)
        for known in (False, True):  # on the very first start, and later
            with self.subTest(known):
                shutil.rmtree(self.state, ignore_errors=True)
                if known:
                    self.assembled()
                # Standard error is a file here, which would not grow either: nobody reads it.
                with raw_server(runner, self.environment, self.stderr_file) as server:
                    self._refused(server, "written")

    def test_a_file_stands_where_the_folder_should_be(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.write_text("not a folder")
        try:
            with raw_server(self.server_file, self.environment, self.stderr_file) as server:
                self._refused(server, str(self.state))
        finally:
            self.state.unlink()

    def test_what_is_started_after_the_mending_is_found_again(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.write_text("not a folder")
        server_file = self.rig_folder / "server.py"
        with raw_server(server_file, self.environment, self.stderr_file) as server:
            self.state.unlink()
            answer = server.call("serve_model", {"wait_s": 50})
            running = self.processes("server")
            if not call_fault(answer):
                self.assertEqual(answer["result"]["structuredContent"]["state"], "ready", answer)
            self.assertEqual(bool(call_fault(answer)), not running, answer)
        with raw_server(server_file, self.environment, self.stderr_file) as server:
            status = server.call("get_system_status", {})["result"]["structuredContent"]
            self.assertEqual([status["pid"]] if running else [], running, json.dumps(status))
            self.assertEqual(call_fault(server.call("stop_model", {})), "")
        self.assertEqual(self.processes("server"), [], "it was not found again")

    def test_a_model_that_runs_can_be_asked_and_stopped_on_a_full_disk(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        with raw_server(
            self.rig_folder / "server.py", self.environment, self.stderr_file
        ) as server:
            ready = server.call("serve_model", {"wait_s": 50})["result"]["structuredContent"]
            self.assertEqual(ready["state"], "ready")
        runner = self.write_runner("full.py", self.preamble + NO_FILE_GROWS)
        with raw_server(runner, self.environment, self.stderr_file) as server:
            self.assertEqual(call_fault(server.call("query_gemma4", {"prompt": "hello"})), "")
            self.assertEqual(call_fault(server.call("stop_model", {})), "")
            self.assertEqual(self.processes("server"), [])
            status = server.call("get_system_status", {})["result"]["structuredContent"]
            self.assertEqual(status["state"], "stopped")
