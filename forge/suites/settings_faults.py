"""tpu.env at fault, in every way: the server comes up, says what is wrong, recovers when mended."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

from mcp import Client

from forge.suites.rig_case import RigCase
from forge.suites.witness import free_port


class SettingsSuite(RigCase):
    """Whoever edits tpu.env learns the file, the key and the remedy, without a restart."""

    starting_tool: ClassVar[str] = "serve_model"
    starting_arguments: ClassVar[Mapping[str, Any]] = {}
    stopping_tool: ClassVar[str] = "stop_model"  # needs no value; empty where there is no such
    defaulted: ClassVar[tuple[str, str]] = ("DTYPE", "bfloat16")  # a key, and its own value

    def _good(self) -> str:
        return "".join(f"{key}={value}\n" for key, value in self.good_settings().items())

    async def refused_start(self, client: Client) -> str:
        """The refusal of what would start something."""
        arguments = dict(self.starting_arguments)
        return await self.refusal(client, self.starting_tool, "INVALID", **arguments)

    def _faults(self) -> dict[str, tuple[str, str]]:
        """Each fault by name: the file's text, and the words that must stand in the error."""
        good, port = self._good(), f"PORT={self.port}\n"
        return {
            "a missing key": (port, "MODEL_NAME is missing"),
            "another missing key": (f"MODEL_NAME={self.model}\n", "PORT is missing"),
            "an unknown key": (good + "PROT=8000\n", "PROT is not a key of this rig"),
            "a key twice": (good + port, "PORT stands in line 2 already"),
            "garbage": (good + "this is no assignment\n", "line 3 is not KEY=value"),
            "a bare key": (good + "DTYPE\n", "line 3 is not KEY=value"),
            "an export": (good + "export DTYPE=float32\n", "line 3 is not KEY=value"),
            "interpolation": (good.replace(self.model, "${HOME}/model"), "MODEL_NAME holds a '$'"),
            "a port that is no number": (good.replace(port, "PORT=http\n"), "PORT (from tpu.env)"),
            "a port below all bounds": (good.replace(port, "PORT=80\n"), "PORT (from tpu.env)"),
            "an unknown number format": (good + "DTYPE=int3\n", "DTYPE (from tpu.env)"),
            "an empty value": (good.replace(port, "PORT=\n"), "PORT"),
        }

    async def test_every_fault_is_named_and_mended_without_a_restart(self) -> None:
        starts = len(self.engine.starts())
        for name, (text, words) in self._faults().items():
            with self.subTest(name):
                self.write_settings_text(text)
                async with self.in_process() as client:
                    fault = await self.refused_start(client)
                    self.assertIn(words, fault)
                    self.assertIn("tpu.env", fault)
                    if self.stopping_tool:
                        await self.answer(client, self.stopping_tool)
                    status = await self.answer(client, "get_system_status")
                    self.assertIn(words, " ".join(status["notes"]))
                    self.assertIn(words, await self.text(client, "get_help"))
                    self.write_settings_text(self._good())
                    status = await self.answer(client, "get_system_status")
                    self.assertEqual((status["notes"], status["model"]), ([], self.model))
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.engine.starts()), starts)

    async def test_over_stdio_from_a_missing_file_to_a_served_model(self) -> None:
        path = self.rig_folder / "tpu.env"
        path.unlink()
        try:
            async with self.over_stdio() as client:
                text = await self.refused_start(client)
                self.assertIn(str(path), text)
                self.assertIn(" Next: ", text)
                status = await self.answer(client, "get_system_status")
                self.assertIn("tpu.env", " ".join(status["notes"]))
                self.write_settings_text(self._good())
                await self.serve(client)
        finally:
            self.write_settings_text(self._good())

    async def test_bytes_that_are_no_text(self) -> None:
        try:
            (self.rig_folder / "tpu.env").write_bytes(b"MODEL_NAME=\xff\xfe\x00\n")
            async with self.in_process() as client:
                text = await self.refused_start(client)
                self.assertIn("tpu.env", text)
                status = await self.answer(client, "get_system_status")
                self.assertIn("tpu.env", " ".join(status["notes"]))
        finally:
            self.write_settings_text(self._good())

    async def test_an_ambient_variable_wins_and_the_status_says_so(self) -> None:
        other = free_port()
        key, value = self.defaulted
        with mock.patch.dict("os.environ", {"PORT": str(other), key: ""}):
            async with self.in_process() as client:
                values = (await self.answer(client, "get_system_status"))["settings"]
                self.assertEqual(values["PORT"], f"{other} (environment)")
                self.assertEqual(values["MODEL_NAME"], f"{self.model} (tpu.env)")
                self.assertEqual(values[key], f"{value} (default)")
                self.assertIn(f"`PORT={other}` (environment)", await self.text(client, "get_help"))

    async def test_an_ambient_variable_at_fault_is_told_from_the_file(self) -> None:
        with mock.patch.dict("os.environ", PORT="http"):
            async with self.in_process() as client:
                text = await self.refused_start(client)
                self.assertIn("PORT (from the environment)", text)

    async def test_a_comment_a_quote_and_a_blank_line_are_no_fault(self) -> None:
        good = {**self.good_settings(), "MODEL_NAME": f"'{self.model}'  # why"}
        good["PORT"] = f'"{self.port}"\r'
        text = "# words = more\n\n" + "".join(f"{key}={value}\n" for key, value in good.items())
        try:
            self.write_settings_text(text)
            async with self.in_process() as client:
                status = await self.answer(client, "get_system_status")
                self.assertEqual((status["model"], status["notes"]), (self.model, []))
        finally:
            self.write_settings_text(self._good())

    async def test_a_shell_gets_the_values_as_the_server_read_them(self) -> None:
        folder = self.place / "models" / "with a blank"
        self.write_settings_text(self._good().replace(self.model, f"'{folder}'"))
        try:
            done = subprocess.run(
                [sys.executable, str(self.rig_folder / "server.py"), "env"],
                env=dict(os.environ, RIG_READ_ONLY="1"),
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            self.write_settings_text(self._good())
        self.assertEqual(done.returncode, 0, done.stderr)
        exported = {}
        for line in done.stdout.splitlines():
            word, assignment = shlex.split(line)
            self.assertEqual(word, "export")
            key, _, value = assignment.partition("=")
            exported[key] = value
        self.assertEqual(exported["MODEL_NAME"], str(folder))
        self.assertEqual(exported["RIG_READ_ONLY"], "1")
        self.assertEqual(exported["PORT"], str(self.port))
