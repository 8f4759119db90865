"""User data of a machine on EC2: taken apart as cloud-init does, its boothook run by real shells.

The boothook runs in a folder that stands for the machine's /; systemctl and shutdown are stand-ins
that write down how they were called, and fail when a test says so. cloud-init 22.4.2 itself was
seen to take such a message as `CloudInit` here does (2026-11-30).
"""

from __future__ import annotations

import email
import gzip
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.planes.ec2_user_data import (
    END_TIMER,
    MACHINE_DOCUMENT,
    MACHINE_END,
    USER_DATA_LIMIT,
    boothook,
    user_data,
)

PROGRAM = b"#!/usr/bin/env python3\nprint('boots')\n"
DOCUMENT = json.dumps({"rig": "gpu-vllm-g6-2b", "life_s": 3600}).encode()
SHELLS = ("dash", "bash")
LIFE_S = 7200
STAND_IN = """\
#!/bin/sh
echo "{name} $*" >>"{calls}"
[ ! -e "{fails}/{name}" ] && [ ! -e "{fails}/{name} $1" ]
"""


class CloudInit:
    """What cloud-init makes of user data: by gzip's mark, then MIME, then each part by its type."""

    def __init__(self, packed: bytes) -> None:
        text = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
        # cloud-init looks for this in the first 4 kB, and else takes all of it for one part.
        assert b"mime-version:" in text[:4096].lower()
        message = email.message_from_bytes(text)
        assert message.is_multipart()
        self.kinds: list[str] = []
        self.names: list[str | None] = []
        self.parts: dict[str, bytes] = {}
        for part in message.walk():
            if not part.is_multipart():
                payload = part.get_payload(decode=True)
                assert isinstance(payload, bytes)
                self.kinds.append(part.get_content_type())
                self.names.append(part.get_filename())
                self.parts[part.get_content_type()] = payload
        assert not message.defects, message.defects

    @property
    def files(self) -> list[dict[str, Any]]:
        head, _, body = self.parts["text/cloud-config"].decode().partition("\n")
        assert head == "#cloud-config"
        found: dict[str, list[dict[str, Any]]] = json.loads(body)
        assert list(found) == ["write_files"]
        return found["write_files"]


class MessageTest(unittest.TestCase):
    def test_it_has_three_parts_the_end_of_the_machine_before_all_else(self) -> None:
        seen = CloudInit(user_data(PROGRAM, DOCUMENT, LIFE_S))
        self.assertEqual(
            seen.kinds, ["text/cloud-boothook", "text/cloud-config", "text/x-shellscript"]
        )
        self.assertEqual(seen.names, ["end", "order", "boot"])

    def test_the_program_arrives_as_it_was(self) -> None:
        for program in (
            PROGRAM,
            b"#!/bin/sh\n",
            b"#!/bin/sh\nno newline at its end",
            b"#!/bin/sh\n\n\n.\nFrom here\n--gemma4\n--gemma4--\n\t trailing blanks  \n\n",
            b"#!/bin/sh\n=20=3D\nContent-Type: text/html\n\n" + b"x" * 2000 + b"\n",
        ):
            with self.subTest(program[:30]):
                seen = CloudInit(user_data(program, DOCUMENT, LIFE_S))
                self.assertEqual(seen.parts["text/x-shellscript"], program)
                self.assertEqual(len(seen.kinds), 3)

    def test_the_document_becomes_a_file_of_root_alone(self) -> None:
        strange = {"a": "ü 😀 \\ \" ' {% if %} ${x} %s \n\t\x7f", "b": [1, None, {"c": "--gemma4"}]}
        for document in (DOCUMENT, json.dumps(strange).encode(), json.dumps(strange, indent=1)):
            data = document.encode() if isinstance(document, str) else document
            (file,) = CloudInit(user_data(PROGRAM, data, LIFE_S)).files
            self.assertEqual(file["content"].encode(), data)
            self.assertEqual(file["path"], "/var/lib/gemma4/order.json")
            self.assertEqual((file["permissions"], file["owner"]), ("0600", "root:root"))
        self.assertEqual(MACHINE_DOCUMENT, "/var/lib/gemma4/order.json")

    def test_the_same_order_makes_the_same_bytes(self) -> None:
        # EC2 refuses a repeat of a client token with other parameters.
        first = user_data(PROGRAM, DOCUMENT, LIFE_S)
        time.sleep(1.1)  # gzip would put the time into its head
        self.assertEqual(first, user_data(PROGRAM, DOCUMENT, LIFE_S))
        self.assertNotEqual(first, user_data(PROGRAM, DOCUMENT, LIFE_S + 1))

    def test_what_ec2_would_not_take_is_refused_and_what_it_takes_is_not(self) -> None:
        noise = random.Random(7)

        def program(size: int) -> bytes:
            return PROGRAM + "".join(noise.choices("0123456789abcdef", k=size)).encode()

        self.assertLessEqual(len(user_data(program(24_000), DOCUMENT, LIFE_S)), USER_DATA_LIMIT)
        with self.assertRaisesRegex(RigError, r"INVALID .* \d{5} bytes packed, .* 16384"):
            user_data(program(34_000), DOCUMENT, LIFE_S)
        self.assertEqual(USER_DATA_LIMIT, 16 * 1024)

    def test_what_repeats_itself_may_be_long(self) -> None:
        seen = CloudInit(user_data(PROGRAM + b"# a line\n" * 20_000, DOCUMENT, LIFE_S))
        self.assertGreater(len(seen.parts["text/x-shellscript"]), 150_000)

    def test_what_cannot_boot_is_refused(self) -> None:
        for program, document, life_s in (
            (b"print('no shebang')", DOCUMENT, LIFE_S),
            (b"", DOCUMENT, LIFE_S),
            (PROGRAM, b"", LIFE_S),
            (PROGRAM, b"[1]", LIFE_S),
            (PROGRAM + "ü".encode(), DOCUMENT, LIFE_S),
            (PROGRAM, '{"a": "ü"}'.encode(), LIFE_S),
            (PROGRAM, DOCUMENT, 0),
            (PROGRAM, DOCUMENT, -5),
        ):
            with self.subTest((program[-8:], document[:9], life_s)), self.assertRaises(RigError):
                user_data(program, document, life_s)


class BoothookCase(unittest.TestCase):
    """A machine's / in a folder, and what its systemctl and shutdown were asked."""

    def setUp(self) -> None:
        self.fresh()

    def fresh(self) -> None:
        """Another machine."""
        folder = tempfile.TemporaryDirectory(prefix="boothook-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name)
        self.root, self.fails = self.place / "root", self.place / "fails"
        for path in (self.root / "dev", self.fails, self.place / "bin"):
            path.mkdir(parents=True)
        self.console = self.root / "dev/console"
        self.console.touch()
        for name in ("systemctl", "shutdown"):
            program = self.place / "bin" / name
            calls = self.place / "calls"
            program.write_text(STAND_IN.format(name=name, calls=calls, fails=self.fails))
            program.chmod(0o755)
        self.end = self.root / MACHINE_END[1:]
        self.units = self.root / "etc/systemd/system"

    def boot(self, shell: str = "dash", life_s: int = LIFE_S, status: int = 0) -> list[str]:
        """Run the boothook; what was called. It is run as a file, as cloud-init does."""
        script = self.place / "part-001"
        script.write_text(boothook(life_s))
        path = f"{self.place / 'bin'}{os.pathsep}{os.environ['PATH']}"
        ended = subprocess.run(
            [shell, str(script)],
            env={"PATH": path, "GEMMA4_ROOT": str(self.root)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(ended.returncode, status, ended.stderr)
        self.said, self.complaints = ended.stdout, ended.stderr
        calls = self.place / "calls"
        found = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return found

    def timer(self) -> str:
        return (self.units / f"{END_TIMER}.timer").read_text()


STARTED = [
    "systemctl daemon-reload",
    f"systemctl enable {END_TIMER}.timer",
    f"systemctl --no-block start {END_TIMER}.timer",
]
LEFT = ["shutdown -P now"]


class FirstBootTest(BoothookCase):
    def test_the_end_is_written_down_and_a_timer_started(self) -> None:
        for shell in SHELLS:
            with self.subTest(shell):
                self.fresh()
                before = int(time.time())
                self.assertEqual(self.boot(shell), STARTED)
                end = int(self.end.read_text())
                self.assertTrue(before + LIFE_S <= end <= time.time() + LIFE_S)
                self.assertIn(f"OnCalendar=@{end}\n", self.timer())
                self.assertIn("Persistent=true\n", self.timer())
                self.assertEqual(self.complaints, "")

    def test_it_waits_for_no_unit(self) -> None:
        # cloud-init runs before sysinit.target: a start that waits would never end, and so would
        # one of a timer that itself waits for that target.
        for call in self.boot():
            if "start" in call:
                self.assertIn("--no-block", call)
        self.assertIn("DefaultDependencies=no\n", self.timer())

    def test_the_end_is_told_on_the_console(self) -> None:
        self.boot()
        self.assertEqual(self.console.read_text(), f"GEMMA4-END written: in {LIFE_S} seconds\n")
        self.assertEqual(self.said, self.console.read_text())

    def test_a_machine_without_a_console_gets_its_end_all_the_same(self) -> None:
        self.console.unlink()
        self.assertEqual(self.boot(), STARTED)

    def test_its_script_is_one_of_a_posix_shell(self) -> None:
        script = boothook(LIFE_S)
        self.assertTrue(script.startswith("#!/bin/sh\n"))
        for shell in SHELLS:
            ended = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True)
            self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_nothing_but_a_number_gets_into_the_script(self) -> None:
        with self.assertRaises(ValueError):
            boothook("5; reboot")  # type: ignore[arg-type]  # what must not be


class LaterBootTest(BoothookCase):
    def test_the_first_end_stays_whatever_the_life(self) -> None:
        for shell in SHELLS:
            with self.subTest(shell):
                self.fresh()
                self.boot(shell)
                end, timer = self.end.read_text(), self.timer()
                for life_s in (LIFE_S, 10 * LIFE_S):
                    self.assertEqual(self.boot(shell, life_s), STARTED)
                    self.assertEqual((self.end.read_text(), self.timer()), (end, timer))
                self.assertEqual(self.said, "", "the end is told once")

    def test_after_the_end_the_machine_goes_at_once(self) -> None:
        for shell in SHELLS:
            with self.subTest(shell):
                self.fresh()
                self.boot(shell)
                self.end.write_text(f"{int(time.time()) - 1}\n")
                self.assertEqual(self.boot(shell, status=1), LEFT)
                self.assertIn("GEMMA4-END its time is over", self.console.read_text())

    def test_a_timer_that_somebody_removed_is_there_again(self) -> None:
        self.boot()
        end = self.end.read_text().strip()
        shutil.rmtree(self.units)
        self.assertEqual(self.boot(), STARTED)
        self.assertIn(f"OnCalendar=@{end}\n", self.timer())

    def test_an_end_that_is_none_is_written_anew(self) -> None:
        self.boot()
        for text in ("", "\n", "soon", "12 34", "-5", "1e9", "$(reboot)", "9" * 12, "1\n2\n"):
            with self.subTest(text):
                self.end.write_text(text)
                self.assertEqual(self.boot(), STARTED)
                end = int(self.end.read_text())
                self.assertLess(abs(end - LIFE_S - time.time()), 120)
                self.assertIn(f"OnCalendar=@{end}\n", self.timer())


class FaultTest(BoothookCase):
    """A machine without an end may not stay: it would be billed until somebody looks."""

    def test_without_systemd_the_machine_goes(self) -> None:
        for step in ("systemctl", "systemctl daemon-reload", "systemctl enable"):
            with self.subTest(step):
                self.fresh()
                (self.fails / step).touch()
                self.assertEqual(self.boot(status=1)[-1:], LEFT)
                self.assertIn("its timer could not be started", self.console.read_text())

    def test_a_start_that_is_refused_ends_it_too(self) -> None:
        (self.fails / "systemctl --no-block").touch()
        self.assertEqual(self.boot(status=1), [*STARTED, *LEFT])

    def test_where_shutdown_fails_systemd_is_asked_with_force(self) -> None:
        for name in ("systemctl enable", "shutdown"):
            (self.fails / name).touch()
        self.assertEqual(self.boot(status=1)[-2:], [*LEFT, "systemctl poweroff --force"])

    def test_an_end_that_cannot_be_written_ends_it(self) -> None:
        (self.root / "var").write_text("a file where the folder should be")
        self.assertEqual(self.boot(status=1), LEFT)
        self.assertIn("its end could not be written", self.console.read_text())

    def test_a_timer_that_cannot_be_written_ends_it(self) -> None:
        (self.root / "etc").write_text("a file where the folder should be")
        self.assertEqual(self.boot(status=1), LEFT)
        self.assertIn(f"{END_TIMER}.timer could not be written", self.console.read_text())

    def test_a_full_disk_later_on_ends_no_machine_that_has_its_timer(self) -> None:
        self.boot()
        before = self.timer()
        for name in ("timer", "service"):
            # As a full disk would: the new file cannot be written, the old one is whole.
            (self.units / f"{END_TIMER}.{name}.new").mkdir()
        self.assertEqual(self.boot(), STARTED)
        self.assertEqual(self.timer(), before)
        self.assertNotIn("could not", self.console.read_text())

    def test_but_it_ends_one_whose_timer_is_another(self) -> None:
        self.boot()
        unit = self.units / f"{END_TIMER}.timer"
        unit.write_text(unit.read_text().replace("OnCalendar=@", "OnCalendar=@9"))
        (self.units / f"{END_TIMER}.timer.new").mkdir()
        self.assertEqual(self.boot(status=1), LEFT)


@unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not on this machine")
class SystemdTest(BoothookCase):
    def analyzed(self, *words: str) -> str:
        ended = subprocess.run(
            ["systemd-analyze", *words], capture_output=True, text=True, timeout=60
        )
        said = ended.stdout + ended.stderr
        self.assertEqual(ended.returncode, 0, said)
        return said

    def test_systemd_takes_both_units_without_a_word(self) -> None:
        self.boot()
        for kind in ("timer", "service"):
            path = self.units / f"{END_TIMER}.{kind}"
            # shutdown comes with systemd's init, which a container lacks; its path is no matter.
            path.write_text(path.read_text().replace("/sbin/shutdown", "/bin/true"))
            self.assertEqual(self.analyzed("verify", str(path)).strip(), "")

    def test_systemd_reads_the_end_as_the_moment_that_was_meant(self) -> None:
        self.boot()
        end = int(self.end.read_text())
        meant = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(end))
        self.assertIn(meant, self.analyzed("calendar", f"@{end}"))

    def test_systemd_finds_a_fault_where_there_is_one(self) -> None:
        self.boot()
        path = self.units / f"{END_TIMER}.timer"
        path.write_text(path.read_text().replace("OnCalendar=@", "OnCalendar=whenever"))
        ended = subprocess.run(
            ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60
        )
        self.assertIn("Failed to parse calendar specification", ended.stderr)


if __name__ == "__main__":
    unittest.main()
