"""The journal: nothing lost, nothing mixed, and no act without a written intent.

That the entry is forced to the disk before `append` returns cannot be seen from a test, which
would need the power to fail; it is not claimed here.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import JOURNAL_SCHEMA, Journal, utc_now

ROOT = Path(__file__).resolve().parents[2]


class JournalTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.journal = Journal(self.folder / "state" / "journal.jsonl")

    def other_process(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(self.journal.path), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def raw(self, content: bytes) -> None:
        self.journal.path.parent.mkdir(exist_ok=True)
        self.journal.path.write_bytes(content)

    def test_an_entry_comes_back_with_schema_and_time(self) -> None:
        self.journal.append("server started", pid=7, argv=["a", "b c"])
        (entry,) = self.journal.entries()
        self.assertEqual(entry["v"], JOURNAL_SCHEMA)
        self.assertEqual(
            {k: entry[k] for k in ("event", "pid", "argv")},
            {"event": "server started", "pid": 7, "argv": ["a", "b c"]},
        )
        self.assertRegex(entry["at"], r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\Z")

    def test_stamps_sort_as_text(self) -> None:
        stamps = [utc_now() for _ in range(50)]
        self.assertEqual(stamps, sorted(stamps))

    def test_whatever_is_written_is_one_line_of_ascii(self) -> None:
        self.journal.append("x", text="a\nb\r\nc\x00\u2028\ud800é", nested={"k\n": ["\n"]})
        data = self.journal.path.read_bytes()
        self.assertEqual(data.count(b"\n"), 1)
        self.assertTrue(data.isascii() and data.endswith(b"\n"))
        self.assertEqual(self.journal.entries()[0]["text"], "a\nb\ncé")

    def test_secrets_and_floods_stay_out(self) -> None:
        secret = "hf_" + "Q1" * 16
        self.journal.append("x", why=f"refused {secret}", long="y" * 1_000_000, argv=["a"] * 10_000)
        text = self.journal.path.read_text()
        self.assertNotIn(secret, text)
        self.assertLess(len(text), 10_000)

    def test_it_is_private(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        self.journal.append("x")
        self.assertEqual(stat.S_IMODE(self.journal.path.stat().st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(self.journal.path.parent.stat().st_mode), 0o700)

    def test_without_a_file_there_are_no_entries(self) -> None:
        self.assertEqual(self.journal.entries(), [])

    def test_only_the_last_ones_are_given(self) -> None:
        for number in range(5):
            self.journal.append("x", n=number)
        self.assertEqual([e["n"] for e in self.journal.entries(last=2)], [3, 4])

    def test_a_torn_last_line_swallows_no_later_entry(self) -> None:
        self.journal.append("first")
        whole = self.journal.path.read_bytes()
        for cut in range(1, len(whole)):
            self.raw(whole + whole[:cut])
            self.journal.append("last")
            with self.subTest(cut=cut):
                events = [entry["event"] for entry in self.journal.entries()]
                # Of a line that lacks its newline alone, nothing is lost.
                torn = ["first"] if cut == len(whole) - 1 else []
                self.assertEqual(events, ["first", *torn, "last"])

    def test_damage_costs_its_own_line_only(self) -> None:
        self.journal.append("good")
        good = self.journal.path.read_bytes()
        for bad in (
            b"\xff\xfe\n",
            b"\x00\x00\x00\n",
            b"[]\n",
            b"7\n",
            b"\n",
            b'{"v": 999, "event": "from a later version"}\n',
            b'{"event": "without a version"}\n',
            b"[" * 100_000 + b"\n",
            b"a" * 1_000_000 + b"\n",
        ):
            self.raw(good + bad + good)
            with self.subTest(bad=bad[:20]):
                self.assertEqual([e["event"] for e in self.journal.entries()], ["good", "good"])

    def test_four_processes_at_once_lose_and_mix_nothing(self) -> None:
        script = """
            import sys
            from pathlib import Path
            from forge.parts.ground.journal import Journal
            journal = Journal(Path(sys.argv[1]))
            for number in range(100):
                pad = sys.argv[2] * (number * 17 % 900)
                journal.append("x", who=sys.argv[2], n=number, pad=pad)
        """
        writers = [self.other_process(script, letter) for letter in "abcd"]
        for writer in writers:
            _, errors = writer.communicate(timeout=60)
            self.assertEqual((writer.returncode, errors), (0, ""))
        lines = self.journal.path.read_bytes().splitlines()
        entries = [json.loads(line) for line in lines]
        self.assertEqual(len(entries), 400)
        for letter in "abcd":
            own = [entry for entry in entries if entry["who"] == letter]
            self.assertEqual([entry["n"] for entry in own], list(range(100)))
            self.assertTrue(
                all(
                    re.fullmatch(f"{letter}{{{n * 17 % 900}}}", e["pad"]) for n, e in enumerate(own)
                )
            )

    @unittest.skipUnless(Path("/dev/full").exists(), "no /dev/full: the kernel's full disk")
    def test_a_full_disk_is_denied(self) -> None:
        self.journal.path.parent.mkdir()
        self.journal.path.symlink_to("/dev/full")
        with self.assertRaises(RigError) as caught:
            self.journal.append("intent")
        self.assertEqual(caught.exception.error_class, "DENIED")
        self.assertIn("nothing was done", caught.exception.what)
        self.assertIn("disk space", caught.exception.next_step)

    def test_a_disk_that_fills_in_mid_entry_is_denied_and_keeps_the_whole_ones(self) -> None:
        script = """
            import resource, sys
            from pathlib import Path
            from forge.parts.ground.errors import RigError
            from forge.parts.ground.journal import Journal
            journal = Journal(Path(sys.argv[1]))
            journal.append("first")
            room = journal.path.stat().st_size + 30
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            for attempt in range(2):
                try:
                    journal.append("second")
                except RigError as error:
                    print(error)
        """
        process = self.other_process(script)
        output, errors = process.communicate(timeout=60)
        self.assertEqual((errors, output.count("DENIED the journal ")), ("", 2))
        self.assertEqual([entry["event"] for entry in self.journal.entries()], ["first"])
        self.assertEqual(self.journal.path.read_bytes().count(b"\n"), 1)
        self.journal.append("third")
        self.assertEqual([e["event"] for e in self.journal.entries()], ["first", "third"])

    def test_a_folder_in_its_place_is_denied(self) -> None:
        self.journal.path.mkdir(parents=True)
        with self.assertRaises(RigError) as caught:
            self.journal.append("intent")
        self.assertEqual(caught.exception.error_class, "DENIED")
        self.assertEqual(self.journal.entries(), [])


if __name__ == "__main__":
    unittest.main()
