"""`server.py take-down` at a terminal: what is shown, what is asked, what goes and what stays.

The command is a process at a pseudo-terminal; the provider is a fake Google, and its books are the
witness of what still costs money.
"""

from __future__ import annotations

import asyncio
import os
import pty
import select
import subprocess
import sys
import time
import unittest
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.rented_rig import PATIENCE_S, PROJECT, RentedRigCase

ZONE = "europe-west4-a"
STRANGER = {"managed-by": "gemma4-rigs", "rig": "tpu-vllm-v6e1-2b", "owner": "somebody-else"}


class Terminal:
    """A person at a terminal, in front of a command that runs there."""

    def __init__(self, process: subprocess.Popen[bytes], handle: int) -> None:
        self.process, self._handle = process, handle
        self.text = ""
        self._shown = 0

    def until(self, words: str) -> str:
        """Read until the words stand there, anew since the last time; what came before them."""
        deadline = time.monotonic() + PATIENCE_S
        while (at := self.text.find(words, self._shown)) < 0:
            if time.monotonic() > deadline or not self._read():
                raise AssertionError(f"{words!r} never came: {self.text}")
        before = self.text[self._shown : at]
        self._shown = at + len(words)
        return before

    def answer(self, line: str) -> None:
        os.write(self._handle, line.encode())

    def end(self) -> tuple[int, str]:
        """The status, and the rest of what it said."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read() and time.monotonic() < deadline:
            pass
        return self.process.wait(PATIENCE_S), self.text[self._shown :]

    def _read(self) -> bool:
        """Whether there may be more."""
        if not select.select([self._handle], [], [], 0.2)[0]:
            return self.process.poll() is None
        with suppress(OSError):  # Linux's way of saying that nobody holds the other end
            data = os.read(self._handle, 65536)
            self.text += data.decode(errors="replace").replace("\r\n", "\n")
            return bool(data)
        return False


class TakeDownCase(RentedRigCase):
    worker = "ComputeEngine.delete_s, ComputeEngine.read_back_s = 1.5, 0.5"

    @contextmanager
    def terminal(self, *words: str, **environment: str) -> Iterator[Terminal]:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, str(self.rig_folder / "server.py"), "take-down", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        os.close(theirs)
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            process.wait()
            os.close(ours)

    def created(self, **arguments: Any) -> str:
        """A machine of this rig, made through its tool; its name."""

        async def create() -> str:
            async with self.calling() as caller:
                made = await caller.ok("create_tpu_vm_instance", zone=ZONE, **arguments)
            return str(made["machine"]["name"])

        return asyncio.run(create())

    def planted(self, name: str, labels: dict[str, str]) -> None:
        """A machine that was made by other means."""
        body = {
            "name": name,
            "labels": labels,
            "machineType": self.google.compute.link(f"zones/{ZONE}/machineTypes/ct6e-standard-1t"),
            "disks": [],
            "scheduling": {},
        }
        path = f"/compute/v1/projects/{PROJECT}/zones/{ZONE}/instances"
        with self.google.lock:
            self.google.compute.answer("POST", path, {}, body)

    def second(self, name: str) -> None:
        """Another machine with this rig's labels, as a damaged journal might have led to."""
        owner = self.assembled().context.owner
        self.planted(name, {**STRANGER, "owner": owner, "intent": "by-hand", "expires": "1"})

    def machines(self) -> list[str]:
        return sorted(self.google.held().get("instances", []))


class TakeDownTest(TakeDownCase):
    def test_nothing_is_asked_about_nothing(self) -> None:
        with self.terminal() as person:
            status, said = person.end()
        self.assertEqual(status, 0, said)
        self.assertIn("0 of this rig", said)
        self.assertNotIn("[y/N]", said)

    def test_what_goes_is_shown_before_it_is_asked_about(self) -> None:
        name = self.created()
        with self.terminal() as person:
            shown = person.until(f"Destroy {name}? [y/N] ")
            self.assertIn(f"Would be destroyed: machine {name}", shown)
            self.assertEqual(self.machines(), [name], "it went before it was asked about")
            person.answer("y\n")
            status, said = person.end()
        self.assertEqual(status, 0, said)
        self.assertIn(f"Destroyed: machine {name}", said)
        self.assertEqual(self.google.held(), {})

    def test_whatever_is_no_yes_leaves_it(self) -> None:
        name = self.created()
        for line in ("yesterday\n", "\x04"):
            with self.subTest(line), self.terminal() as person:
                person.until("[y/N] ")
                person.answer(line)
                status, said = person.end()
                self.assertEqual(status, 0, said)
                self.assertIn("Left as it is.", said)
                self.assertNotIn("Traceback", said)
            self.assertEqual(self.machines(), [name])

    def test_each_is_asked_about_by_itself(self) -> None:
        name = self.created()
        self.second("another")
        with self.terminal() as person:
            for _ in range(2):
                before = person.until("? [y/N] ")
                asked = before.rpartition("Destroy ")[2]
                person.answer("y\n" if asked == "another" else "n\n")
            status, said = person.end()
        self.assertEqual(status, 0, said)
        self.assertEqual(self.machines(), [name])

    def test_one_that_is_gone_meanwhile_keeps_no_other_from_going(self) -> None:
        name = self.created()
        self.second("another")
        self.second("third")
        with self.terminal() as person:
            first = person.until("? [y/N] ").rpartition("Destroy ")[2]
            others = [one for one in (name, "another", "third") if one != first]
            with self.google.lock:
                del self.google.compute.instances[ZONE, others[0]]
            person.answer("n\n")
            person.until(f"there is no {others[0]} in {ZONE}")
            person.until(f"Destroy {others[1]}? [y/N] ")
            person.answer("y\n")
            status, said = person.end()
        self.assertEqual(status, 1, "what could not be planned is no success")
        self.assertIn(f"Destroyed: machine {others[1]}", said)
        self.assertEqual(self.machines(), [first])

    def test_one_that_does_not_go_keeps_no_other_from_going(self) -> None:
        name = self.created()
        self.second("another")
        self.google.script.stubborn = {name}
        with self.terminal("--yes") as person:
            status, said = person.end()
        self.assertEqual(status, 1, said)
        self.assertIn("UNKNOWN", said)
        self.assertIn("still there", said)
        self.assertIn("Destroyed: machine another", said)
        self.assertEqual(self.machines(), [name])

    def test_what_is_somebody_elses_is_not_even_asked_about(self) -> None:
        self.planted("of-another", STRANGER)
        self.planted("of-nobody", {})
        with self.terminal("--yes") as person:
            status, said = person.end()
        self.assertEqual(status, 0, said)
        self.assertNotIn("of-another", said)
        self.assertIn("2 of others", said)
        self.assertEqual(self.machines(), ["of-another", "of-nobody"])
        self.assertEqual(self.google.sent("DELETE", "/"), [])

    def test_without_a_project_it_says_so(self) -> None:
        self.write_settings(PROJECT="")
        with self.terminal("--yes") as person:
            status, said = person.end()
        self.assertEqual(status, 1, said)
        self.assertIn("PROJECT", said)
        self.assertNotIn("Traceback", said)

    def test_a_list_that_cannot_be_read_ends_it(self) -> None:
        name = self.created()
        self.gcloud.fault("compute", "instances", "list", said="[{half", instead=True)
        with self.terminal("--yes") as person:
            status, said = person.end()
        self.assertEqual(status, 1, said)
        self.assertIn("UNKNOWN", said)
        self.assertEqual(self.machines(), [name])


if __name__ == "__main__":
    unittest.main()
