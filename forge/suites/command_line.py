"""server.py as a command: what the make targets call goes through the same checks as a client's."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from unittest import mock

from forge.suites.rig_case import RigCase, rig_under_test, spelled


class CommandCase(RigCase):
    """A case that runs the rig's server.py as a command."""

    def program(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run server.py with `words` as a process, to its end."""
        return subprocess.run(
            [sys.executable, str(self.rig_folder / "server.py"), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def command(self, *words: str) -> tuple[int, str, str]:
        """The same in this process, which saves a second each: status, output, errors."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = [(number, signal.getsignal(number)) for number in signals]
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                server_file = self.rig_folder / "server.py"
                status = int(self.module.run_rig(self.module.RIG, server_file, list(words)))
        finally:
            for number, handler in handlers:
                signal.signal(number, handler)
        return status, out.getvalue(), err.getvalue()


class CommandLineSuite(CommandCase):
    """Status 0 and the answer on standard output, or status 1 and the reason on standard error."""

    def test_from_preflight_to_stop(self) -> None:
        status, out, _ = self.command("preflight")
        self.assertEqual(status, 0, out)
        self.assertNotIn("MISSING", out)
        served = self.program("call", "serve_model", "wait_s=50", "--json")
        self.assertEqual(served.returncode, 0, served.stderr)
        self.assertEqual(json.loads(served.stdout)["state"], "ready")
        self.assertIn("… load:", served.stderr, "no progress was told")
        status, _, err = self.command(
            "call", "query_gemma4", "prompt=what=is\nthis?", "max_tokens=1"
        )
        self.assertEqual(status, 0, err)
        body = self.engine.requests()[-1]["body"]
        self.assertEqual(body["messages"][-1]["content"], "what=is\nthis?")
        self.assertEqual(body["max_tokens"], 1)
        status, _, err = self.command("call", "stop_model")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(self.processes("server"), [])

    def test_what_is_refused_is_refused_here_too(self) -> None:
        for words, error_class in (
            (("call", "serve_model", "model=; touch P #"), "INVALID model"),
            (("call", spelled("get_server_logs"), "lines=many"), "INVALID lines"),
            (("call", "stop_model", "confirm=yes"), "INVALID confirm"),
            (("call", "query_gemma4", "prompt"), "INVALID"),
            (("call", "destroy_everything"), "NOT_FOUND"),
            (("job", "../../etc/passwd"), "INVALID"),
            (("job", "serve-20260101-000000-abcdef"), "NOT_FOUND"),
        ):
            with self.subTest(words):
                status, out, err = self.command(*words)
                self.assertEqual((status, out), (1, ""), err)
                self.assertTrue(err.startswith(error_class), err)
                self.assertNotIn("Traceback", err)
        self.assertEqual(self.processes(), [])

    def test_read_only_holds_for_commands(self) -> None:
        with mock.patch.dict("os.environ", RIG_READ_ONLY="1"):
            status, _, err = self.command("call", "stop_model")
        self.assertEqual(status, 1)
        self.assertTrue(err.startswith("DENIED "), err)

    def test_a_wrong_command_is_a_wrong_usage(self) -> None:
        err = io.StringIO()
        with self.assertRaises(SystemExit) as left, contextlib.redirect_stderr(err):
            self.module.run_rig(self.module.RIG, self.rig_folder / "server.py", ["explode"])
        self.assertEqual(left.exception.code, 2)
        self.assertIn("usage:", err.getvalue())

    def test_the_list_is_the_live_one(self) -> None:
        status, out, _ = self.command("call", "list")
        self.assertEqual(status, 0)
        listed = {line.split()[0] for line in out.splitlines()}
        self.assertEqual(listed, set(rig_under_test().tools))

    def test_preflight_names_every_gap_and_its_remedy(self) -> None:
        with mock.patch.dict("os.environ", PORT="80"):
            status, out, _ = self.command("preflight")
        self.assertEqual(status, 1)
        self.assertIn("MISSING settings", out)
        template = self.place / "models" / "tiny" / "chat_template.jinja"
        template.rename(self.place / "kept")
        try:
            status, out, _ = self.command("preflight")
        finally:
            (self.place / "kept").rename(template)
        self.assertEqual(status, 1)
        self.assertIn("chat template", out)
        self.assertIn("get it:", out)
