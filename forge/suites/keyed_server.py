"""A model server that asks for a key: which lies in one file, and is shown by no tool.

The suites of rigs with such a server are made from it.
"""

from __future__ import annotations

import urllib.error
import urllib.request

from forge.suites.rig_case import RigCase


class KeyedServerSuite(RigCase):
    """`key_file` is the name of the file in the rig's state folder."""

    key_file = ""

    def _status(self, path: str, headers: dict[str, str]) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    async def test_a_key_is_asked_for_and_lies_in_its_file_alone(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            self.assertEqual(self._status("/v1/models", {}), 401)
            self.assertEqual(self._status("/v1/models", self.engine.headers()), 200)
            self.assertEqual(self._status("/health", {}), 200)
            said = [await self.text(client, tool) for tool in ("get_endpoint", "get_server_logs")]
            said += [await self.text(client, tool) for tool in ("get_system_status", "get_help")]
        key = self.engine.headers()["Authorization"].partition(" ")[2]
        self.assertRegex(key, r"^sk-[0-9a-f]{48}$")
        self.assertNotIn(key, "\n".join(said))
        self.assertNotIn(key, " ".join(self.engine.starts()[-1]["argv"]))
        holders = [
            path
            for path in self.state.rglob("*")
            if path.is_file() and key in path.read_text(errors="replace")
        ]
        self.assertEqual([path.name for path in holders], [self.key_file])
        self.assertEqual(holders[0].stat().st_mode & 0o077, 0)
