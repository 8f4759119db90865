"""The shared suites on a rig whose EC2 machine builds llama-server: what is its own in them.

Its keys of tpu.env, and its way through server.py as a command.
"""

from __future__ import annotations

import json
import os
from unittest import mock

from forge.suites.command_line import CommandLineSuite
from forge.suites.ec2_build_case import Ec2BuildCase
from forge.suites.rented_shared import RentedSettingsSuite
from forge.suites.rig_case import rig_under_test


class Ec2BuildSettingsSuite(RentedSettingsSuite):
    """The keys of llama.cpp on a rented machine at fault, beside those of every rented rig."""

    def _faults(self) -> dict[str, tuple[str, str]]:
        good = self._good()
        wrong = {
            "no slot": ("SLOTS", "0"),
            "slots beyond all bounds": ("SLOTS", "33"),
            "a tiny context": ("CONTEXT_PER_SLOT", "8"),
            "a crooked context": ("CONTEXT_PER_SLOT", "1000"),
            "an unknown cache": ("CACHE_TYPE", "q4_0"),
            "attention by force": ("FLASH_ATTN", "on"),
            "thinking perhaps": ("THINKING", "perhaps"),
            "a GPU by its name": ("GPU_ARCH", "turing"),
            "a hash that is none": ("MODEL_SHA256", "c0ffee"),
            "a file that is no GGUF": ("MODEL_FILE", "model.safetensors"),
            "a bucket with its scheme": ("CACHE_BUCKET", "s3://mine"),
        }
        own = {
            name: (f"{good}{key}={value}\n", f"{key} (from tpu.env)")
            for name, (key, value) in wrong.items()
        }
        others = {"another engine's key": (good + "DTYPE=int3\n", "DTYPE is not a key of this rig")}
        return {**super()._faults(), **own, **others}

    async def test_a_cache_that_takes_fused_attention_is_not_rented_for(self) -> None:
        with mock.patch.dict(os.environ, CACHE_TYPE="q8_0", FLASH_ATTN="off"):
            async with self.in_process() as client:
                text = await self.refused_start(client)
        self.assertIn("CACHE_TYPE=q8_0", text)
        self.assertIn("FLASH_ATTN=auto", text)
        self.assertEqual((self.rented(), self.provider().changes()), ({}, 0))


class Ec2BuildCommandLineSuite(Ec2BuildCase, CommandLineSuite):
    """What the make targets call, on a machine that builds."""

    def test_from_preflight_to_stop(self) -> None:
        status, out, _ = self.command("preflight")
        self.assertEqual(status, 0, out)
        self.assertNotIn("MISSING", out)
        made = self.program("call", "create_gpu_instance", f"zone={self.zone}", "--json")
        self.assertEqual(made.returncode, 0, made.stderr)
        name = json.loads(made.stdout)["machine"]["name"]
        self.assertEqual([name], self.rented()["instances"])
        status, out, err = self.command("call", "wait_for_model_ready", "wait_s=50", "--json")
        self.assertEqual(status, 0, err)
        self.assertEqual(json.loads(out)["state"], "ready")
        self.assertIn("… ", err, "no progress was told")
        status, out, err = self.command("call", "get_build_progress", "--json")
        self.assertEqual((status, json.loads(out)["state"]), (0, "done"), err)
        status, _, err = self.command("call", "query_gemma4", "prompt=what=is\nthis?")
        self.assertEqual(status, 0, err)
        body = self.engine.requests()[-1]["body"]
        self.assertEqual(body["messages"][-1]["content"], "what=is\nthis?")
        status, out, err = self.command("take-down", "--yes")
        self.assertEqual((status, err), (0, ""))
        self.assertIn(f"Destroyed: machine {name}", out)
        self.assertEqual(self.rented(), {})

    def test_what_is_refused_is_refused_here_too(self) -> None:
        for words, error_class in (
            (("call", "create_gpu_instance", "zone=; touch P #"), "INVALID zone"),
            (("call", "get_server_logs", "lines=many"), "INVALID lines"),
            (("call", "get_build_progress", "lines=-1"), "INVALID lines"),
            (("call", "get_build_progress"), "NOT_FOUND"),
            (("call", "verify_gpu_arch"), "NOT_FOUND"),
            (("call", "manage_llama_server", "action=explode"), "INVALID action"),
            (("call", "query_gemma4", "prompt"), "INVALID"),
            (("call", "destroy_everything"), "NOT_FOUND"),
        ):
            with self.subTest(words):
                status, out, err = self.command(*words)
                self.assertEqual((status, out), (1, ""), err)
                self.assertTrue(err.startswith(error_class), err)
                self.assertNotIn("Traceback", err)
        self.assertEqual((self.processes(), self.rented()), ([], {}))

    def test_read_only_holds_for_commands(self) -> None:
        changing = [name for name, does in rig_under_test().tools.items() if does != "reads"]
        self.assertGreaterEqual(len(changing), 7)
        with mock.patch.dict(os.environ, RIG_READ_ONLY="1"):
            for tool in changing:
                status, _, err = self.command("call", tool)
                self.assertEqual(status, 1)
                self.assertTrue(err.startswith(f"DENIED {tool}"), err)
        self.assertEqual(self.provider().changes(), 0)

    def test_preflight_names_every_gap_and_its_remedy(self) -> None:
        """The program that leads to the machine, the profile that it runs as."""
        self.addCleanup(self.provider().renew)
        with mock.patch.dict(os.environ, PATH=os.defpath, PORT="80"):
            status, out, _ = self.command("preflight")
        self.assertEqual(status, 1)
        self.assertIn("MISSING settings", out)
        with mock.patch.dict(os.environ, PATH=os.defpath, INSTANCE_PROFILE="nobodys"):
            status, out, _ = self.command("preflight")
        self.assertEqual(status, 1)
        missing = [line for line in out.splitlines() if line.startswith("MISSING")]
        self.assertIn("session-manager-plugin", " ".join(missing))
        self.assertIn("nobodys", " ".join(missing))
        self.assertEqual(len(missing), 2, out)
        self.assertIn("get it:", out)
