"""The scripts of the first hour on Google's machines: whole for every rig, and within its money."""

from __future__ import annotations

import re
import string
import subprocess
import unittest
from pathlib import Path

from forge.naming import TOOLS

FORGE = Path(__file__).resolve().parents[1] / "forge"
# What differs between the rigs; the values are those of a rig on Compute Engine.
VALUES = {
    "rig": "tpu-vllm-v6e1-2b",
    "machine": "a TPU v6e",
    "hardware": "v6e1",
    "zone": "europe-west4-a",
    "market": "flex-start",
    "price": "1.35",
    "price_source": "a list of 2026-07-25",
    "hours": "1.25",
    "minutes": "75",
    "limit_usd": "2",
    "find": "find_tpu_vm",
    "list": "list_tpu_vm_instances",
    "config": "get_vllm_deployment_config",
    "boot_log": "$CALL get_tpu_vm_serial_log",
    "boot_source": "They come through the serial port.",
    "gcloud_describe": "gcloud compute instances describe NAME --zone=europe-west4-a",
    "gcloud_ssh": "gcloud compute ssh NAME --zone=europe-west4-a --tunnel-through-iap",
    "gcloud_left": "gcloud compute instances list --filter=labels.managed-by=gemma4-rigs",
    "gcloud_delete": "gcloud compute instances delete NAME --zone=europe-west4-a",
    "idle_question": "is a stopped machine's disk billed on?",
}


class FirstHourTest(unittest.TestCase):
    source = "first_hour_google.md"

    def setUp(self) -> None:
        self.template = (FORGE / self.source).read_text()
        self.text = self.template.format_map(VALUES)
        self.blocks = re.findall(r"```sh\n(.*?)```", self.text, re.S)

    def test_the_words_that_differ_are_just_these(self) -> None:
        named = {
            name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None
        }
        self.assertEqual(named, set(VALUES))

    def test_every_block_is_a_shell_script(self) -> None:
        self.assertGreater(len(self.blocks), 10)
        for block in self.blocks:
            ended = subprocess.run(
                ["bash", "-n"], input=block, capture_output=True, text=True, timeout=60
            )
            self.assertEqual(ended.returncode, 0, block + ended.stderr)

    def test_every_tool_that_it_calls_has_a_name_in_the_list(self) -> None:
        called = set(re.findall(r"\$CALL (?:--json )?([a-z]\w+)", self.text))
        known = {tool.name for tool in TOOLS}
        # Words of a plane or a runtime are filled into the names of the list.
        patterns = [re.sub(r"\\?<[^>]+\\?>", r"\\w+", re.escape(name)) for name in known]
        spelled = VALUES["find"], VALUES["list"], VALUES["config"], "check_quota"
        for tool in called - set(spelled):
            self.assertTrue(any(re.fullmatch(one, tool) for one in patterns), tool)

    def test_its_life_costs_less_than_it_says(self) -> None:
        self.assertLessEqual(
            float(VALUES["price"]) * float(VALUES["hours"]), float(VALUES["limit_usd"])
        )
        self.assertEqual(self.text.count("hours=1.25"), 3)
        self.assertIn("budget_usd=2", self.text)

    def test_every_step_of_the_table_exists_and_every_output_has_its_place(self) -> None:
        steps = {int(number) for number in re.findall(r"^## (\d+)\.", self.text, re.M)}
        self.assertEqual(steps, set(range(1, 13)))
        table = [int(number) for number in re.findall(r"^\|.*\| (\d+) \|", self.text, re.M)]
        self.assertGreaterEqual(len(table), 15)
        self.assertLessEqual(set(table), steps)
        for step in set(table):
            self.assertIn(f'"$RUN/{step:02d}-', self.text)


class JaxFirstHourTest(FirstHourTest):
    """The same of the rig with the JAX engine."""

    source = "first_hour_jax.md"


if __name__ == "__main__":
    unittest.main()
