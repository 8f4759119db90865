"""What a rig on EC2 ships besides its server: its first hour's script, whole and affordable."""

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

from forge.aws_files import aws_files, ec2_hour_words
from forge.parts.assembly.rig import AssembledRig, Rig
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.capacity_plane import listed
from forge.parts.planes.ec2_settings import Ec2Settings
from forge.parts.planes.ec2_user_data import END_TIMER, MACHINE_DOCUMENT, MACHINE_END

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = (ROOT / "forge" / "first_hour_aws.md").read_text()
LIMIT_USD = 2.0


def every_rig() -> list[Rig]:
    names = [path.stem for path in (ROOT / "forge" / "rigs").glob("[a-z]*.py")]
    return [importlib.import_module(f"forge.rigs.{name}").RIG for name in sorted(names)]


def settings_file(rig: Rig) -> Path:
    return ROOT / rig.name / "tpu.env"


def values_of(rig: Rig) -> dict[str, str]:
    return {key: value or "" for key, value in dotenv_values(settings_file(rig)).items()}


class AwsFilesCase(unittest.TestCase):
    def setUp(self) -> None:
        self.rigs = [rig for rig in every_rig() if issubclass(rig.settings, Ec2Settings)]
        self.assertGreaterEqual(len(self.rigs), 2)

    def text(self, rig: Rig) -> str:
        return aws_files(rig, settings_file(rig))["first_hour.md"]

    def blocks(self, rig: Rig) -> list[str]:
        return re.findall(r"```sh\n(.*?)```", self.text(rig), re.S)


class FilesTest(AwsFilesCase):
    def test_a_rig_elsewhere_has_none(self) -> None:
        others = [rig for rig in every_rig() if rig.name not in {one.name for one in self.rigs}]
        self.assertGreaterEqual(len(others), 3)
        for rig in others:
            self.assertEqual(aws_files(rig, settings_file(rig)), {}, rig.name)

    def test_every_word_is_filled_in_and_none_is_left_over(self) -> None:
        wanted = {name for _, name, _, _ in string.Formatter().parse(TEMPLATE) if name is not None}
        for rig in self.rigs:
            with self.subTest(rig.name):
                words = ec2_hour_words(rig, values_of(rig))
                self.assertEqual(set(words), wanted)
                self.assertTrue(all(words.values()), words)

    def test_its_commands_are_a_shell_script(self) -> None:
        for rig in self.rigs:
            blocks = self.blocks(rig)
            self.assertGreater(len(blocks), 10)
            for block in blocks:
                ended = subprocess.run(
                    ["bash", "-n"], input=block, capture_output=True, text=True, timeout=60
                )
                self.assertEqual(ended.returncode, 0, f"{rig.name}: {block}{ended.stderr}")

    def test_the_tools_that_it_calls_are_the_rigs_own_with_such_parameters(self) -> None:
        for rig in self.rigs:
            with self.subTest(rig.name):
                tools = self.tools(rig)
                calls = re.findall(r"\$CALL (?:--json )?([a-z]\w+)([^|>&\n]*)", self.text(rig))
                self.assertGreater(len(calls), 12)
                for tool, rest in calls:
                    self.assertIn(tool, tools)
                    given = set(re.findall(r"(?:^| |')([a-z_]+)=", rest))
                    self.assertLessEqual(given, tools[tool], f"{tool}{rest}")

    def tools(self, rig: Rig) -> dict[str, set[str]]:
        """All tools of the rig, loaded by default or not, with their parameters."""
        with tempfile.TemporaryDirectory() as folder:
            server = Path(folder) / "server.py"
            server.write_text("# not run\n")
            (Path(folder) / "tpu.env").write_text(settings_file(rig).read_text())
            surroundings = {"XDG_STATE_HOME": folder, "AWS_ACCOUNT": "111122223333"}
            with mock.patch.dict(os.environ, surroundings):
                assembled = AssembledRig(rig, server)
                assembled.every_toolset = True
                return {tool.name: set(tool.parameters["properties"]) for tool in assembled.tools()}

    def test_its_commands_of_the_server_are_the_rigs_own(self) -> None:
        for rig in self.rigs:
            commands = set(re.findall(r"launch\.py ([a-z-]+)", self.text(rig)))
            self.assertLessEqual(commands, {*rig.commands, "call"})
            self.assertIn("set-up", commands)
            self.assertIsNotNone(rig.commands["set-up"].undo)

    def test_what_is_looked_at_on_the_machine_is_what_the_user_data_make(self) -> None:
        for rig in self.rigs:
            text = self.text(rig)
            self.assertIn(f"{END_TIMER}.timer", text)
            self.assertIn(MACHINE_END, text)
            self.assertIn(MACHINE_DOCUMENT.rpartition("/")[2], text)
            self.assertIn("GEMMA4-END written", text)

    def test_each_engine_has_its_own_steps(self) -> None:
        by_name = {rig.name: self.text(rig) for rig in self.rigs}
        for name, text in by_name.items():
            llama = "llamacpp" in name
            self.assertEqual("get_build_progress" in text, llama, name)
            self.assertEqual("docker inspect" in text, not llama, name)
            self.assertEqual("compile" in text, not llama, name)

    def test_it_speaks_of_no_other_cloud(self) -> None:
        for rig in self.rigs:
            self.assertNotRegex(self.text(rig), r"gcloud|init\.sh|TPU|serial")

    def test_every_step_of_the_table_exists_and_every_output_has_its_place(self) -> None:
        for rig in self.rigs:
            text = self.text(rig)
            steps = {int(number) for number in re.findall(r"^## (\d+)\.", text, re.M)}
            self.assertEqual(steps, set(range(1, 13)))
            table = [int(number) for number in re.findall(r"^\|.*\| (\d+) \|", text, re.M)]
            self.assertGreaterEqual(len(table), 15)
            self.assertLessEqual(set(table), steps)
            for step in set(table):
                self.assertIn(f'"$RUN/{step:02d}-', text)

    def test_nothing_private_is_in_it(self) -> None:
        for rig in self.rigs:
            self.assertNotIn(str(ROOT), self.text(rig))
            self.assertNotRegex(self.text(rig), r"hf_[A-Za-z0-9]{8,}|(AKIA|ASIA)\w|\b\d{12}\b")


class PrivateTest(AwsFilesCase):
    """Its last step takes out what would tell whose account it was."""

    def test_the_line_takes_ids_and_accounts_out_and_leaves_figures(self) -> None:
        block = next(one for one in self.blocks(self.rigs[0]) if "sed -i.bak" in one)
        line = next(one for one in block.splitlines() if one.startswith("sed "))
        kept = '{"tok_s": 213.123456789012, "seconds": 12.5, "at": 1796047237}'
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "02-machine.json"
            output.write_text(
                '"arn:aws:iam::111122223333:instance-profile/gemma4-rig" i-0123456789abcdef0 '
                "vol-0123456789abcdef0 sg-12345678 111122223333\n10.0.0.7 me@example.org\n"
                f"{kept}\n"
            )
            ended = subprocess.run(
                ["bash", "-c", line],
                env={"PATH": os.environ["PATH"], "RUN": folder},
                capture_output=True,
                text=True,
                timeout=60,
            )
            self.assertEqual(ended.returncode, 0, ended.stderr)
            left = output.read_text()
            self.assertEqual([path.name for path in Path(folder).iterdir()], [output.name])
        self.assertIn(kept, left)
        for private in ("111122223333", "0123456789abcdef0", "12345678 ", "10.0.0.7", "me@"):
            self.assertNotIn(private, left)


class HourMoneyTest(AwsFilesCase):
    """The first hour costs two dollars at most, or there is none."""

    def test_the_price_is_the_dearest_that_it_may_be(self) -> None:
        for rig in self.rigs:
            words, values = ec2_hour_words(rig, values_of(rig)), values_of(rig)
            zones = listed(values["ZONES"])
            self.assertEqual((words["zone"], words["region"]), (zones[0], region_of(zones[0])))
            self.assertEqual(set(words["regions"].split()), set(map(region_of, zones)))
            self.assertLessEqual(float(words["price"]) * float(words["hours"]), LIMIT_USD)
            self.assertEqual(float(words["minutes"]), float(words["hours"]) * 60)
            self.assertRegex(words["price_source"], r"20\d\d")
            text = self.text(rig)
            self.assertEqual(text.count(f"hours={words['hours']}"), 3)
            self.assertIn(f"budget_usd={words['limit_usd']}", text)

    def test_a_machine_of_this_life_is_within_the_rigs_own_limits(self) -> None:
        for rig in self.rigs:
            words, values = ec2_hour_words(rig, values_of(rig)), values_of(rig)
            self.assertLessEqual(float(words["hours"]), float(values["MAX_HOURS"]))
            self.assertLessEqual(float(words["limit_usd"]), float(values["BUDGET_USD"]))

    def test_what_is_dearer_or_unknown_is_refused(self) -> None:
        for rig in self.rigs:
            for changes in (
                {"ZONES": "eu-north-1a"},
                {"INSTANCE_TYPE": "g6.48xlarge"},
                {"CHIP": "t4", "INSTANCE_TYPE": "g4dn.metal"},
            ):
                with self.assertRaisesRegex(ValueError, "not within 2 USD"):
                    ec2_hour_words(rig, {**values_of(rig), **changes})

    def test_a_way_of_renting_that_ec2_has_not(self) -> None:
        with self.assertRaisesRegex(ValueError, "flex-start is no way of renting on EC2"):
            ec2_hour_words(self.rigs[0], {**values_of(self.rigs[0]), "MARKETS": "flex-start"})

    def test_a_setting_that_is_missing_is_named(self) -> None:
        for key in ("ZONES", "MARKETS", "CHIP", "INSTANCE_TYPE"):
            values = {k: v for k, v in values_of(self.rigs[0]).items() if k != key}
            with self.assertRaisesRegex(KeyError, key):
                ec2_hour_words(self.rigs[0], values)


if __name__ == "__main__":
    unittest.main()
