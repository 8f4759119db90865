"""What a rig on Google Cloud ships besides its server: init.sh and its first hour's script."""

from __future__ import annotations

import importlib
import os
import re
import string
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from dotenv import dotenv_values

from forge.google_files import first_hour_words, google_files
from forge.parts.assembly.rig import AssembledRig, Rig
from forge.parts.planes.cloud_tpu import CloudTpu
from forge.parts.planes.compute_engine import ComputeEngine
from forge.parts.planes.compute_order import ComputeEngineSettings
from forge.parts.planes.tpu_order import CloudTpuSettings
from tests.test_first_hour import VALUES

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = (ROOT / "forge" / "first_hour_google.md").read_text()


def all_rigs() -> list[Rig]:
    """Every rig of the forge."""
    names = [path.stem for path in (ROOT / "forge" / "rigs").glob("[a-z]*.py")]
    return [importlib.import_module(f"forge.rigs.{name}").RIG for name in sorted(names)]


def on_google(rig: Rig) -> bool:
    return issubclass(rig.settings, ComputeEngineSettings | CloudTpuSettings)


def values_of(rig: Rig) -> dict[str, str]:
    found = dotenv_values(ROOT / rig.name / "tpu.env")
    return {key: value or "" for key, value in found.items()}


class FilesTest(unittest.TestCase):
    def setUp(self) -> None:
        self.rigs = [rig for rig in all_rigs() if on_google(rig)]
        self.assertGreaterEqual(len(self.rigs), 2)

    def files(self, rig: Rig) -> dict[str, str]:
        return google_files(rig, ROOT / rig.name / "tpu.env")

    def test_a_rig_elsewhere_has_none(self) -> None:
        others = [rig for rig in all_rigs() if not on_google(rig)]
        self.assertGreaterEqual(len(others), 3)
        for rig in others:
            self.assertEqual(self.files(rig), {}, rig.name)

    def test_each_rig_on_google_has_both(self) -> None:
        for rig in self.rigs:
            with self.subTest(rig.name):
                files = self.files(rig)
                self.assertEqual(set(files), {"first_hour.md", "init.sh"})
                self.assertEqual(
                    files["init.sh"], (ROOT / "forge" / "programs" / "init.sh").read_text()
                )
                self.assertIn(rig.name, files["first_hour.md"])

    def test_every_word_is_filled_in(self) -> None:
        wanted = {name for _, name, _, _ in string.Formatter().parse(TEMPLATE) if name is not None}
        self.assertEqual(wanted, set(VALUES))
        for rig in self.rigs:
            with self.subTest(rig.name):
                words = first_hour_words(rig, values_of(rig))
                self.assertEqual(set(words), wanted)
                self.assertTrue(all(words.values()), words)

    def test_its_commands_are_a_shell_script(self) -> None:
        for rig in self.rigs:
            blocks = re.findall(r"```sh\n(.*?)```", self.files(rig)["first_hour.md"], re.S)
            self.assertGreater(len(blocks), 10)
            for block in blocks:
                ended = subprocess.run(
                    ["bash", "-n"], input=block, capture_output=True, text=True, timeout=60
                )
                self.assertEqual(ended.returncode, 0, f"{rig.name}: {block}{ended.stderr}")

    def test_the_tools_that_it_calls_are_the_rigs_own(self) -> None:
        for rig in self.rigs:
            with self.subTest(rig.name), tempfile.TemporaryDirectory() as folder:
                server = Path(folder) / "server.py"
                server.write_text("# not run\n")
                (Path(folder) / "tpu.env").write_text((ROOT / rig.name / "tpu.env").read_text())
                names = self.tools(rig, server)
                text = self.files(rig)["first_hour.md"]
                called = set(re.findall(r"\$CALL (?:--json )?([a-z]\w+)", text))
                self.assertLessEqual(called, names, f"{rig.name}: {sorted(called - names)}")
                self.assertGreater(len(called), 8)

    def tools(self, rig: Rig, server: Path) -> set[str]:
        """The names of all tools of the rig, loaded by default or not."""
        with mock.patch.dict(os.environ, XDG_STATE_HOME=str(server.parent / "state")):
            assembled = AssembledRig(rig, server)
        assembled.every_toolset = True
        return {method.name for _, methods in assembled.listing() for method in methods}

    def test_it_speaks_of_its_own_plane_and_of_no_other(self) -> None:
        for rig in self.rigs:
            with self.subTest(rig.name):
                compute = issubclass(rig.settings, ComputeEngineSettings)
                own, other = (ComputeEngine, CloudTpu) if compute else (CloudTpu, ComputeEngine)
                words = first_hour_words(rig, values_of(rig))
                self.assertEqual(words["find"], f"find_{own.vocabulary['hardware']}")
                self.assertEqual(words["list"], f"list_{own.vocabulary['rental']}s")
                text = self.files(rig)["first_hour.md"]
                self.assertIn(f"list_{own.vocabulary['rental']}s", text)
                self.assertNotIn(f"list_{other.vocabulary['rental']}s", text)
                self.assertEqual("queued-resources" in text, not compute)

    def test_nothing_private_is_in_them(self) -> None:
        for rig in self.rigs:
            for name, text in self.files(rig).items():
                self.assertNotIn(str(ROOT), text, f"{rig.name}/{name}")
                self.assertNotRegex(text, r"hf_[A-Za-z0-9]{20,}|ya29\.")


class MoneyTest(unittest.TestCase):
    """The first hour costs two dollars at most, or there is none."""

    def setUp(self) -> None:
        self.compute = next(r for r in all_rigs() if issubclass(r.settings, ComputeEngineSettings))
        self.tpu = next(r for r in all_rigs() if issubclass(r.settings, CloudTpuSettings))

    def test_its_price_is_that_of_its_first_zone_and_way(self) -> None:
        for rig in (self.compute, self.tpu):
            words = first_hour_words(rig, values_of(rig))
            most = float(words["price"]) * float(words["hours"])
            self.assertLessEqual(most, float(words["limit_usd"]), rig.name)
            self.assertEqual(float(words["minutes"]), float(words["hours"]) * 60)
            self.assertTrue(words["price_source"])
            self.assertEqual(words["zone"], values_of(rig)["ZONES"].split(",")[0])
            self.assertEqual(words["market"], values_of(rig)["MARKETS"].split(",")[0])

    def test_what_is_dearer_is_refused(self) -> None:
        for markets in ("on-demand", "on-demand,spot"):
            with self.assertRaisesRegex(ValueError, "not within 2 USD"):
                first_hour_words(self.compute, {**values_of(self.compute), "MARKETS": markets})

    def test_what_nobody_knows_the_price_of_is_refused(self) -> None:
        values = values_of(self.compute)
        for changes in (
            {"ZONES": "mars-north1-a"},
            {"MACHINE_TYPE": "ct6e-standard-9t"},
            {"ZONES": "us-central1-b", "MARKETS": "flex-start"},
        ):
            with self.assertRaisesRegex(ValueError, "not within 2 USD"):
                first_hour_words(self.compute, {**values, **changes})
        with self.assertRaisesRegex(ValueError, "not within 2 USD"):
            first_hour_words(self.tpu, {**values_of(self.tpu), "ACCELERATOR_TYPE": "v5litepod-9"})

    def test_a_way_of_renting_that_is_none(self) -> None:
        for rig in (self.compute, self.tpu):
            with self.assertRaisesRegex(ValueError, "borrow is no way of renting"):
                first_hour_words(rig, {**values_of(rig), "MARKETS": "borrow"})

    def test_a_setting_that_is_missing_is_named(self) -> None:
        for key in ("ZONES", "MARKETS", "CHIP"):
            values = {k: v for k, v in values_of(self.compute).items() if k != key}
            with self.assertRaisesRegex(KeyError, key):
                first_hour_words(self.compute, values)


if __name__ == "__main__":
    unittest.main()
