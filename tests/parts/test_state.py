"""The rig's folders and files: private, replaced in one step, and honest about damage."""

from __future__ import annotations

import json
import os
import random
import re
import stat
import string
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
from pathlib import Path
from unittest import mock

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import (
    RigPaths,
    installation_id,
    json_object,
    private_folder,
    read_json,
    rig_paths,
    write_json,
    write_private,
)

ROOT = Path(__file__).resolve().parents[2]


def in_another_process(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )


# No byte more than that into any file of this process: the kernel's own refusal, as a full disk.
NO_ROOM = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))\n"


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def mode(self, path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)


class FolderTest(Case):
    def test_state_and_cache_follow_the_platforms_variables(self) -> None:
        places = {
            "XDG_STATE_HOME": str(self.folder / "s"),
            "XDG_CACHE_HOME": str(self.folder / "c"),
        }
        with mock.patch.dict(os.environ, places):
            paths = rig_paths("a-rig")
        self.assertEqual(paths.state, self.folder / "s" / "gemma4-rigs" / "a-rig")
        self.assertEqual(paths.cache, self.folder / "c" / "gemma4-rigs")
        self.assertEqual(list(self.folder.iterdir()), [], "asking must make nothing")

    def test_two_rigs_share_no_state(self) -> None:
        self.assertNotEqual(rig_paths("a").state, rig_paths("a-q4_0").state)

    def test_every_missing_folder_is_private_whatever_the_umask(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        made = private_folder(self.folder / "a" / "b" / "c")
        for path in (made, made.parent, made.parent.parent):
            self.assertEqual(self.mode(path), 0o700, path)

    def test_a_folder_of_the_users_own_keeps_its_mode(self) -> None:
        (self.folder / "shared").mkdir(mode=0o755)
        (self.folder / "shared").chmod(0o755)
        private_folder(self.folder / "shared" / "mine")
        self.assertEqual(self.mode(self.folder / "shared"), 0o755)

    def test_it_may_be_there_already(self) -> None:
        self.assertEqual(private_folder(self.folder), self.folder)

    def test_a_file_in_its_place_is_denied_with_the_way_out(self) -> None:
        (self.folder / "x").write_text("")
        for path in (self.folder / "x", self.folder / "x" / "y"):
            with self.assertRaises(RigError) as caught:
                private_folder(path)
            self.assertEqual(caught.exception.error_class, "DENIED")
            self.assertIn("XDG_STATE_HOME", caught.exception.next_step)


class WriteTest(Case):
    def test_content_and_mode(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        path = self.folder / "new" / "x.json"
        write_json(path, {"a": "é\ud800", "b": [1, None]})
        self.assertEqual(json.loads(path.read_text()), {"a": "é\ud800", "b": [1, None]})
        self.assertEqual(self.mode(path), 0o600)
        self.assertEqual(self.mode(path.parent), 0o700)

    def test_a_public_file_becomes_private_when_it_is_replaced(self) -> None:
        path = self.folder / "x"
        path.write_text("old")
        path.chmod(0o666)
        write_private(path, "new")
        self.assertEqual((path.read_text(), self.mode(path)), ("new", 0o600))

    def test_a_link_is_replaced_and_not_followed(self) -> None:
        target, path = self.folder / "target", self.folder / "x"
        target.write_text("kept")
        path.symlink_to(target)
        write_private(path, "new")
        self.assertEqual((target.read_text(), path.is_symlink()), ("kept", False))

    def test_a_full_disk_is_denied_keeps_the_old_and_leaves_no_scraps(self) -> None:
        write_private(self.folder / "x", "old")
        done = in_another_process(
            NO_ROOM.format(1000)
            + """
from pathlib import Path
from forge.parts.ground.errors import RigError
from forge.parts.ground.state import write_private
write_private(Path("small"), "fits")
try:
    write_private(Path("x"), "n" * 100_000)
except RigError as error:
    print(error)
""",
            self.folder,
        )
        self.assertEqual(done.stderr, "")
        self.assertTrue(done.stdout.startswith("DENIED x cannot be written: "), done.stdout)
        self.assertEqual((self.folder / "x").read_text(), "old")
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["small", "x"])

    def test_a_folder_in_its_place_is_denied_and_leaves_no_scraps(self) -> None:
        (self.folder / "x" / "y").mkdir(parents=True)
        with self.assertRaises(RigError) as caught:
            write_private(self.folder / "x", "new")
        self.assertEqual(caught.exception.error_class, "DENIED")
        self.assertEqual([p.name for p in self.folder.iterdir()], ["x"])

    def test_a_reader_never_meets_half_a_file(self) -> None:
        path = self.folder / "x.json"
        write_json(path, {"n": 0, "pad": ""})
        stop = threading.Event()

        def write() -> None:
            for number in range(60):
                write_json(path, {"n": number, "pad": "p" * 50_000})
            stop.set()

        writer = threading.Thread(target=write)
        writer.start()
        seen = set()
        while not stop.is_set():
            value = read_json(path)
            assert value is not None, "a reader saw damage"
            seen.add(value["n"])
        writer.join()
        self.assertGreater(len(seen), 1)


class ReadTest(Case):
    def test_absent_is_none(self) -> None:
        self.assertIsNone(read_json(self.folder / "x.json"))
        self.assertIsNone(read_json(self.folder / "no" / "x.json"))

    def test_damage_is_none_and_put_aside_for_people(self) -> None:
        for content in (b"", b"{", b"[1]", b'"text"', b"null", b"\xff\xfe\xfa", b"[" * 100_000):
            path = self.folder / "x.json"
            path.write_bytes(content)
            with self.subTest(content=content[:10]):
                self.assertIsNone(read_json(path))
                self.assertFalse(path.exists())
                self.assertEqual((self.folder / "x.damaged").read_bytes(), content)

    def test_what_cannot_be_read_now_is_not_called_damage(self) -> None:
        """Out of file handles, or no permission: the record must still be there afterwards."""
        write_json(self.folder / "x.json", {"pid": 7})
        done = in_another_process(
            """
            import os, resource
            from pathlib import Path
            from forge.parts.ground.errors import RigError
            from forge.parts.ground.state import read_json
            resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
            handles = []
            try:
                while True:
                    handles.append(os.dup(0))
            except OSError:
                pass
            try:
                print(read_json(Path("x.json")))
            except RigError as error:
                print(error)
            """,
            self.folder,
        )
        self.assertTrue(done.stdout.startswith("DENIED x.json cannot be read: "), done)
        self.assertEqual(read_json(self.folder / "x.json"), {"pid": 7})

    def test_json_object_never_raises(self) -> None:
        source = random.Random(4)
        pieces = ['{"a":', "}", "[", "]", '"', "\\u", "d800", "1e999", "NaN", ",", "\x00", "\ud800"]
        for _ in range(3000):
            text = "".join(source.choices(pieces, k=source.randrange(12)))
            with self.subTest(text=ascii(text)):
                value = json_object(text)
                self.assertTrue(value is None or isinstance(value, dict))
        self.assertIsNone(json_object('{"a":' * 100_000))
        self.assertIsNone(json_object('{"a":' + "1" * 10_000 + "}"))
        self.assertEqual(json_object(b'{"a": 1}'), {"a": 1})


class InstallationTest(Case):
    def setUp(self) -> None:
        super().setUp()
        self.paths = RigPaths(state=self.folder / "app" / "rig", cache=self.folder / "cache")
        self.file = self.folder / "app" / "installation"

    def test_it_is_made_once_and_shared_by_the_rigs_of_the_user(self) -> None:
        first = installation_id(self.paths)
        self.assertRegex(first, r"\A[0-9a-f]{16}\Z")
        other = RigPaths(state=self.folder / "app" / "other", cache=self.folder / "cache")
        self.assertEqual((installation_id(self.paths), installation_id(other)), (first, first))
        self.assertEqual(self.mode(self.file), 0o600)
        self.assertEqual([p.name for p in self.file.parent.iterdir()], ["installation"])

    def test_servers_that_start_at_once_agree(self) -> None:
        script = f"""
            import sys, time
            from pathlib import Path
            from forge.parts.ground.state import RigPaths, installation_id
            paths = RigPaths(state=Path({str(self.paths.state)!r}), cache=Path("c"))
            time.sleep(max(0, float(sys.argv[1]) - time.time()))
            print(installation_id(paths))
        """
        import time

        argv = [sys.executable, "-c", textwrap.dedent(script), str(time.time() + 1.5)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        servers = [
            subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(6)
        ]
        answers = {server.communicate(timeout=30)[0].strip() for server in servers}
        self.assertEqual(answers, {self.file.read_text().strip()})
        self.assertEqual([p.name for p in self.file.parent.iterdir()], ["installation"])

    def test_a_damaged_id_is_replaced_and_never_taken_for_one(self) -> None:
        self.file.parent.mkdir()
        for content in ("", "\n", "x", "0123456789abcdef;role=server", "é", "0" * 15):
            self.file.write_text(content, encoding="utf-8")
            with self.subTest(content=content):
                known = installation_id(self.paths)
                self.assertTrue(re.fullmatch("[0-9a-f]{16}", known), known)
                self.assertEqual(installation_id(self.paths), known)

    def test_ids_differ(self) -> None:
        others = [
            RigPaths(state=self.folder / letter / "rig", cache=self.folder)
            for letter in string.ascii_lowercase
        ]
        self.assertEqual(len({installation_id(paths) for paths in others}), len(others))


if __name__ == "__main__":
    unittest.main()
