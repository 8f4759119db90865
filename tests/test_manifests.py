"""Tests of forge/manifests.py: which variables each client passes on to a rig's server."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from forge.manifests import GEMINI_FILE, MCP_FILE, PublishedRig, render_manifests

KEYS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
RIGS = {
    "local": PublishedRig("local-vllm-cpu-2b", "About.", ["MODEL_NAME", "PORT"]),
    "google": PublishedRig("tpu-vllm-v6e1-2b", "About.", ["PROJECT", "MODEL_NAME"]),
    "aws": PublishedRig("gpu-vllm-g6-2b", "About.", ["AWS_ACCOUNT", "AWS_PROFILE", "MODEL_NAME"]),
}


class VariablesTest(unittest.TestCase):
    """A login that lies in the environment alone reaches the server, and nobody else's does."""

    def written(self, rig: str) -> dict[str, dict[str, Any]]:
        """The server's entry in each client's file, by the file."""
        found = {}
        for name, text in render_manifests(RIGS[rig]).items():
            if name == ".codex/config.toml":
                (found[name],) = tomllib.loads(text)["mcp_servers"].values()
            elif name in (MCP_FILE, GEMINI_FILE):
                (found[name],) = json.loads(text)["mcpServers"].values()
        self.assertEqual(len(found), 3)
        return found

    def test_every_rig_has_the_token_and_the_switches(self) -> None:
        for rig in RIGS:
            for name, server in self.written(rig).items():
                passed = server.get("env", server.get("env_vars"))
                for variable in ("HF_TOKEN", "RIG_READ_ONLY", "RIG_TOOLSETS"):
                    self.assertIn(variable, passed, f"{rig} {name}")

    def test_the_keys_of_aws_reach_a_rig_of_aws_alone(self) -> None:
        for rig in RIGS:
            for name, server in self.written(rig).items():
                passed = set(server.get("env", server.get("env_vars")))
                self.assertEqual(passed & KEYS, KEYS if rig == "aws" else set(), f"{rig} {name}")

    def test_codex_passes_on_where_the_logins_lie(self) -> None:
        for rig, variable in (("aws", "AWS_CONFIG_FILE"), ("google", "CLOUDSDK_CONFIG")):
            others = [one for one in RIGS if one != rig]
            codex = {one: self.written(one)[".codex/config.toml"]["env_vars"] for one in RIGS}
            self.assertIn(variable, codex[rig])
            for one in others:
                self.assertNotIn(variable, codex[one])
        self.assertEqual(codex["aws"], sorted(codex["aws"]))

    def test_a_declared_variable_is_its_own_value_or_nothing(self) -> None:
        for server in self.written("aws").values():
            for variable, value in server.get("env", {}).items():
                self.assertEqual(value, f"${{{variable}:-}}")

    def test_an_empty_key_is_none_for_the_sdk(self) -> None:
        """What a client makes of an undefined variable must not hide the login in a file."""
        import boto3  # type: ignore[import-untyped]

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "credentials"
            path.write_text("[default]\naws_access_key_id = MADEUP\naws_secret_access_key = MADE\n")
            files = {"AWS_SHARED_CREDENTIALS_FILE": str(path), "AWS_CONFIG_FILE": os.devnull}
            with mock.patch.dict(os.environ, {**dict.fromkeys(KEYS, ""), **files}, clear=True):
                found = boto3.Session().get_credentials()
        self.assertEqual(found.access_key, "MADEUP")


if __name__ == "__main__":
    unittest.main()
