"""Tests of ejecting a rig: its server is its own from then on, and drift is told, not failed."""

from __future__ import annotations

import re
import sys
import unittest

from forge.build import drift, is_ejected
from tests.forge_copy import ForgeCopyCase

RIG = "local-pytorch-cpu-2b"
SKILL_SERVER = f"skills/{RIG}-management/mcp/server.py"


class EjectTests(ForgeCopyCase):
    """One story, in the order of its tests' numbers: they share one copy on purpose."""

    def test_1_an_unknown_rig_is_refused(self) -> None:
        before = self.contents()
        ejected = self.forge("eject", "gpu-vllm-t4-2b")
        self.assertEqual(ejected.returncode, 1)
        self.assertIn("no rig gpu-vllm-t4-2b", ejected.stdout)
        self.assertEqual(self.contents(), before)

    def test_2_both_files_say_that_they_are_the_rigs_own(self) -> None:
        before = self.contents()
        ejected = self.forge("eject", RIG)
        self.assertEqual(ejected.returncode, 0, ejected.stdout)
        for name in (
            "server.py",
            "test_server.py",
            "loadgen.py",
            "triage.py",
            "probe.py",
            "plan.py",
            "judge.py",
        ):
            old, new = before[f"{RIG}/{name}"].decode(), self.read(f"{RIG}/{name}")
            self.assertIn("# Built from forge/", old)
            self.assertNotIn("# Built from forge/", new)
            self.assertTrue(is_ejected(new))
            changed = [a for a, b in zip(old.splitlines(), new.splitlines(), strict=True) if a != b]
            self.assertEqual(len(changed), 1, "more than the mark has changed")
        # What quotes the server has followed.
        self.assertEqual(self.read(f"{RIG}/{SKILL_SERVER}"), self.read(f"{RIG}/server.py"))
        self.assertEqual(self.forge("check").returncode, 0, self.forge("check").stdout)

    def test_3_it_cannot_be_ejected_twice(self) -> None:
        before = self.contents()
        ejected = self.forge("eject", RIG)
        self.assertEqual(ejected.returncode, 1)
        self.assertIn("ejected already", ejected.stdout)
        self.assertEqual(self.contents(), before)

    def test_4_the_build_leaves_it_alone_and_builds_the_rest(self) -> None:
        own = self.read(f"{RIG}/server.py")
        own = own.replace('title="Stop the model"', 'title="Stop it"', 1)
        own = re.sub(r'(?m)^#     "psutil.*\n', "", own, count=1)
        own = own.replace("\nimport argparse\n", "\nimport argparse\n\n# Of this rig alone.\n", 1)
        (self.root / RIG / "server.py").write_text(own, encoding="utf-8")
        (self.root / RIG / "test_server.py").write_text(
            self.read(f"{RIG}/test_server.py") + "# Own.\n", encoding="utf-8"
        )
        suite = self.read(f"{RIG}/test_server.py")
        stale = self.forge("check").stdout
        self.assertIn(f"{RIG}/GemmaTools.md is stale", stale)
        self.assertNotIn(f"{RIG}/server.py is stale", stale)
        self.assertNotIn(f"{RIG}/test_server.py is stale", stale)

        built = self.forge("build")
        self.assertEqual(built.returncode, 0, built.stdout)
        self.assertEqual(self.read(f"{RIG}/server.py"), own)
        self.assertEqual(self.read(f"{RIG}/test_server.py"), suite)
        self.assertIn("| `stop_model` | Stop it |", self.read(f"{RIG}/GemmaTools.md"))
        self.assertNotIn("psutil", self.read(f"{RIG}/requirements.txt"))
        self.assertEqual(self.read(f"{RIG}/{SKILL_SERVER}"), own)

    def test_5_the_check_tells_the_drift_and_passes(self) -> None:
        checked = self.forge("check")
        self.assertEqual(checked.returncode, 0, checked.stdout)
        self.assertIn(
            f"{RIG}/server.py: ejected; it has 3 lines that the forge would not build, "
            "and lacks 2 that it would",
            checked.stdout,
        )

    def test_6_a_change_in_the_forge_does_not_reach_it(self) -> None:
        own = self.read(f"{RIG}/server.py")
        part = "forge/parts/toolsets/help.py"
        self.edit(part, self.read(part).replace('title="Help"', 'title="Help me"'))
        built = self.forge("build")
        self.assertEqual(built.returncode, 0, built.stdout)
        self.assertEqual(self.read(f"{RIG}/server.py"), own)
        checked = self.forge("check")
        self.assertEqual(checked.returncode, 0, checked.stdout)
        self.assertIn("it has 4 lines", checked.stdout)

    def test_7_it_still_serves(self) -> None:
        listed = self.run_in(self.root / RIG, sys.executable, "server.py", "call", "list")
        self.assertEqual(listed.returncode, 0, listed.stdout)
        self.assertRegex(listed.stdout, r"(?m)^stop_model +Stop it ")


class DriftTests(unittest.TestCase):
    OURS = "# Built from forge/rigs/a.py by `x`: there.\n\none\ntwo\nthree\n"

    def test_lines_are_counted_both_ways(self) -> None:
        for theirs, wanted in (
            ("\none\ntwo\nthree\n", (0, 0)),
            ("\none\ntwo\nthree\nfour\n", (1, 0)),
            ("\none\nthree\n", (0, 1)),
            ("\none\n2\n3\nthree\n", (2, 1)),
            ("\none\n++ two\n-- two\nthree\n", (2, 1)),
        ):
            mark = "# Ejected from the forge: the rig's own.\n"
            self.assertEqual(drift(self.OURS, mark + theirs), wanted, theirs)

    def test_the_mark_counts_in_the_head_only(self) -> None:
        mark = "# Ejected from the forge: the rig's own.\n"
        self.assertTrue(is_ejected(f'# /// script\n{mark}"""A server."""\n'))
        self.assertFalse(is_ejected(f'# /// script\n"""A server."""\n{mark}'))
        self.assertFalse(is_ejected(self.OURS))
        self.assertFalse(is_ejected(""))


if __name__ == "__main__":
    unittest.main()
