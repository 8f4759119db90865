"""A program's text without what only people read: what goes, what stays, and that it does the same.

Tried on small texts that are easy to get wrong, and on the programs that go out to machines."""

from __future__ import annotations

import ast
import subprocess
import sys
import unittest
from pathlib import Path

from forge.parts.ground.lean_program import lean_program

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = '''#!/usr/bin/env python3
"""What it does.

In two lines."""

from __future__ import annotations

TEXT = """kept

# no comment
"""  # a comment


class Empty:
    """Alone in its body, and so it stays."""


class Full:
    """Goes."""

    # goes as well
    value = "# stays"  # goes

    def method(self) -> str:
        """Goes."""
        numbers = [
            1,  # one

            # two
            2,
        ]
        return f"{self.value} {numbers} {'# stays'}"


def only() -> None:
    """Alone."""


async def later() -> None:
    """Goes."""
    return None


if __name__ == "__main__":
    print(repr(TEXT), Full().method(), only(), Empty.__doc__)
'''


def meaning(text: str) -> str:
    """The program as a tree, without the docstrings that are not all of a body."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None and len(node.body) > 1:
                del node.body[0]
    return ast.dump(tree)


class TestLeanProgram(unittest.TestCase):
    def test_what_goes_and_what_stays(self) -> None:
        lean = lean_program(SAMPLE)
        self.assertTrue(lean.startswith("#!/usr/bin/env python3\nfrom __future__"))
        for gone in ("What it does", "Goes", "a comment", "# one", "# two", "goes as well"):
            self.assertNotIn(gone, lean)
        for kept in ("kept\n\n# no comment\n", '"# stays"', "'# stays'", "Alone in its body"):
            self.assertIn(kept, lean)

    def test_it_does_the_same(self) -> None:
        lean = lean_program(SAMPLE)
        self.assertEqual(meaning(lean), meaning(SAMPLE))
        said = [
            subprocess.run([sys.executable, "-c", text], capture_output=True, check=True).stdout
            for text in (SAMPLE, lean)
        ]
        self.assertEqual(said[0], said[1])
        self.assertIn(b"# no comment", said[0])

    def test_blank_lines_go_except_in_texts(self) -> None:
        lines = lean_program(SAMPLE).splitlines()
        self.assertEqual(lines.count(""), 1)  # the one within TEXT

    def test_twice_changes_nothing(self) -> None:
        once = lean_program(SAMPLE)
        self.assertEqual(lean_program(once), once)

    def test_every_module_that_machines_run_means_the_same_and_is_shorter(self) -> None:
        modules = sorted((ROOT / "forge" / "machine").glob("*.py"))
        self.assertGreater(len(modules), 5)
        for path in modules:
            text = path.read_text()
            lean = lean_program(text)
            self.assertEqual(meaning(lean), meaning(text), path)
            self.assertLessEqual(len(lean), len(text), path)

    def test_what_is_no_program_is_refused(self) -> None:
        for text in ("def (", "'''", "if x:\n"):
            with self.assertRaises(SyntaxError):
                lean_program(text)

    def test_odd_texts(self) -> None:
        for text, lean in (
            ("", ""),
            ("x = 1", "x = 1"),
            ("x = 1  # a", "x = 1\n"),
            ('"""Doc."""', '"""Doc."""'),
            ('"""Doc."""\nx = 1\n', "x = 1\n"),
            ("#!/bin/sh\n# two\nx = 1\n", "#!/bin/sh\nx = 1\n"),
            ("x = '''\n#\n'''\n", "x = '''\n#\n'''\n"),
            ("x = 1\r\n# y\r\nz = 2\r\n", "x = 1\r\nz = 2\r\n"),
        ):
            self.assertEqual(lean_program(text), lean, text)


if __name__ == "__main__":
    unittest.main()
