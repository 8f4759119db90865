"""Tests of the bundler: each refusal on a minimal source tree, the order, the text, the proof."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

from forge import bundle as bundler
from forge.bundle import SECTIONS, Bundle, BundleError, bundle

ROOT = Path(__file__).resolve().parent.parent
HERE = (*SECTIONS, "tests.imaginary")  # as the project's own tests bundle an imaginary rig

PEP_723 = """\
#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "zebra>=1,<2",
# ]
# ///
# Built from forge/rigs/demo.py; change it there.
"""

# A small forge: five sections, an entry with a __main__ block, and what text can be lost by.
FORGE = {
    "forge/parts/ground/names.py": '''
        """Names of things.

        Knows nothing else:
            - an indented line
        """

        from __future__ import annotations

        import re
        from dataclasses import dataclass

        # A comment that stands alone.


        @dataclass(frozen=True)
        class Name:
            """A name."""

            text: str  # as it was given


        NAME = re.compile(r"[a-z]+")
        ''',
    "forge/parts/ground/alpha.py": '''
        """Uses names, so it stands after them in spite of its own."""

        from __future__ import annotations

        from forge.parts.ground.names import NAME, Name


        def parse(text: str) -> Name:
            if not NAME.fullmatch(text):
                raise ValueError(text)
            return Name(text)
        ''',
    "forge/parts/ground/unused.py": '''
        """Nobody imports this one."""

        import zebra


        def useless() -> object:
            return zebra
        ''',
    "forge/parts/planes/cloud.py": '''
        """A plane."""

        from __future__ import annotations

        import os.path
        from dataclasses import (
            asdict,
            dataclass,
        )

        from forge.parts.ground.alpha import parse
        from forge.parts.ground.names import (
            Name,
        )


        @dataclass
        class Cloud:
            name: Name


        def make(text: str) -> dict[str, object]:
            import boto3.session
            from botocore import config  # slow to import

            del boto3, config
            return asdict(Cloud(parse(os.path.basename(text))))
        ''',
    "forge/rigs/demo.py": '''
        """The demo's server.

        Its docstring is the file's.
        """

        from __future__ import annotations

        import sys

        import numpy as np
        from forge.parts.ground.names import Name
        from forge.parts.planes.cloud import Cloud

        HERE = __file__


        def main() -> str:
            """Runs."""
            return Cloud(Name(f"é {len(sys.argv) > 0}")).name.text + np.__name__


        if __name__ == "__main__":
            print(main())
        ''',
    "forge/rigs/second.py": '''
        """Another entry, which needs less."""

        from __future__ import annotations

        from forge.parts.ground.alpha import parse


        def second(text: str) -> str:
            return parse(text).text
        ''',
}


def write(root: Path, tree: Mapping[str, str]) -> None:
    """Writes files, their indentation taken off, below `root`."""
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")


class TreeCase(unittest.TestCase):
    """A test that bundles a source tree in a temporary folder."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def bundle(self, tree: Mapping[str, str], entry: str = "forge.rigs.demo") -> Bundle:
        write(self.root, tree)
        return bundle(entry, self.root, sections=HERE)

    def body(self, source: str, *before: str) -> str:
        """The text that one part comes to in a bundle, from under its banner to the entry's."""
        tree = {
            "forge/parts/ground/part.py": textwrap.dedent(source) + "\n\nPART = None\n",
            "forge/rigs/demo.py": "from forge.parts.ground.part import PART\n\nRIG = PART\n",
        }
        text = self.bundle(tree).render()
        return text.partition("# ── ground / part ")[2].partition("\n")[2].partition("# ── rigs")[0]


class Refusals(TreeCase):
    """Each rule, broken in the smallest way; the message holds the rule and every place."""

    def refuse(self, tree: Mapping[str, str], rule: str, *places: str) -> str:
        """Bundles forge.rigs.demo, expects a refusal, and returns its message."""
        with self.assertRaises(BundleError) as caught:
            self.bundle(tree)
        message = str(caught.exception)
        self.assertIn(rule, message)
        self.assertEqual(re.findall(r"[\w./]+:\d+", message), list(places), message)
        return message

    def refuse_part(self, source: str, rule: str, *lines: int) -> None:
        """One part with this text, and an entry that imports its X."""
        tree = {
            "forge/parts/ground/part.py": source,
            "forge/rigs/demo.py": "from forge.parts.ground.part import X\n\nRIG = X\n",
        }
        self.refuse(tree, rule, *(f"forge/parts/ground/part.py:{line}" for line in lines))

    def refuse_pair(self, one: str, two: str, rule: str, *places: str) -> None:
        """Two parts, `one` with an A and `two` with a B, both imported by the entry."""
        tree = {
            "forge/parts/ground/one.py": one,
            "forge/parts/ground/two.py": two,
            "forge/rigs/demo.py": (
                "from forge.parts.ground.one import A\nfrom forge.parts.ground.two import B\n"
            ),
        }
        self.refuse(tree, rule, *(f"forge/parts/ground/{place}" for place in places))

    # names

    def test_clash_of_definitions(self) -> None:
        self.refuse_pair(
            "A = 1\n\n\ndef same() -> None: ...\n",
            "B = 1\nsame = 2\n",
            "name same bound twice",
            "one.py:4",
            "two.py:2",
        )

    def test_clash_of_classes_and_async_functions(self) -> None:
        self.refuse_pair(
            "A = 1\nclass Same: ...\n",
            "B = 1\n\n\n@str\nasync def Same(): ...\n",
            "name Same bound twice",
            "one.py:2",
            "two.py:5",
        )

    def test_import_against_definition(self) -> None:
        self.refuse_pair(
            "import json\n\nA = json\n",
            "B = 1\n\n\ndef json() -> None: ...\n",
            "name json bound twice",
            "one.py:1",
            "two.py:4",
        )

    def test_definition_against_later_import(self) -> None:
        self.refuse_pair(
            "A = 1\ntime = 3\n",
            "import time\n\nB = time\n",
            "name time bound twice",
            "one.py:2",
            "two.py:1",
        )

    def test_same_name_from_different_imports(self) -> None:
        self.refuse_pair(
            "from datetime import datetime\n\nA = datetime\n",
            "import datetime\n\nB = datetime\n",
            "name datetime bound twice",
            "one.py:1",
            "two.py:1",
        )

    def test_one_alias_for_two_modules(self) -> None:
        self.refuse_pair(
            "import numpy as np\n\nA = np\n",
            "import jax.numpy as np\n\nB = np\n",
            "name np bound twice",
            "one.py:1",
            "two.py:1",
        )

    def test_clash_with_the_entry(self) -> None:
        self.refuse(
            {
                "forge/parts/ground/one.py": "A = 1\nB = 2\n",
                "forge/rigs/demo.py": "from forge.parts.ground.one import A\n\nB = A\n",
            },
            "name B bound twice",
            "forge/parts/ground/one.py:2",
            "forge/rigs/demo.py:3",
        )

    def test_definition_of_an_imported_source_name(self) -> None:
        self.refuse(
            {
                "forge/parts/ground/one.py": "A = 1\n",
                "forge/rigs/demo.py": "from forge.parts.ground.one import A\n\nA = A\n",
            },
            "name A bound twice",
            "forge/parts/ground/one.py:1",
            "forge/rigs/demo.py:3",
        )

    def test_name_bound_twice_in_a_module(self) -> None:
        self.refuse_part("X = 1\nX = 2\n", "name X bound twice", 1, 2)
        self.refuse_part("X = 1\n\n\ndef X(): ...\n", "name X bound twice", 1, 4)
        self.refuse_part("import X\n\nX = 2\n", "name X bound twice", 1, 3)

    def test_name_bound_in_every_form(self) -> None:
        for form in ("Y: int = 2", "Z, Y = 1, 2", "[*Y] = 1, 2", "Z = (Y := 2)", "Z = Y = 1"):
            with self.subTest(form):
                self.refuse_part(f"X = 1\nY = 1\n{form}\n", "name Y bound twice", 2, 3)
        self.refuse_part("X = 1\nY = 1\nZ = [Y := i for i in ()]\n", "name Y bound twice", 2, 3)

    def test_name_bound_in_the_main_block(self) -> None:
        self.refuse(
            {"forge/rigs/demo.py": 'code = 1\n\nif __name__ == "__main__":\n    code = 2\n'},
            "name code bound twice",
            "forge/rigs/demo.py:1",
            "forge/rigs/demo.py:4",
        )

    def test_builtin_name(self) -> None:
        self.refuse_part("X = 1\n\n\ndef open() -> None: ...\n", "open is a builtin's", 4)
        self.refuse_part("from asyncio import TimeoutError\n\nX = 1\n", "is a builtin's", 1)

    def test_dunder_all(self) -> None:
        self.refuse_part('X = 1\n__all__ = ["X"]\n', "__all__", 2)

    def test_global_that_the_module_does_not_define(self) -> None:
        source = "X = 1\n\n\ndef f() -> None:\n    global elsewhere\n    elsewhere = 1\n"
        self.refuse_part(source, "global without a top-level definition", 5)

    # imports between source modules

    def test_source_import_forms(self) -> None:
        one = {"forge/parts/ground/one.py": "A = 1\n"}
        for line, rule in {
            "import forge.parts.ground.one": "write `from forge.parts.ground.one import Name`",
            "import forge.parts.ground.one as one": "write `from forge.parts.ground.one import Nam",
            "from forge.parts.ground.one import A as B": "alias",
            "from forge.parts.ground.one import *": "star",
            "from ..parts.ground.one import A": "relative",
            "from forge.parts.ground import one": "lies in no section",
            "from forge import parts": "lies in no section",
            "import forge": "write `from forge import Name`",
            "from forge.engines.jax import A": "lies in no section",
            "from tests.helpers import A": "lies in no section",
            "from forge.parts.ground.two import A": "does not exist",
            "from forge.parts.ground.one import B": "does not define",
        }.items():
            with self.subTest(line):
                places = ["forge/rigs/demo.py:2"]
                if rule == "does not define":
                    places.append("forge/parts/ground/one.py:1")
                self.refuse({**one, "forge/rigs/demo.py": f"# First.\n{line}\n"}, rule, *places)

    def test_star_import_of_a_library(self) -> None:
        self.refuse_part("from os.path import *\n\nX = 1\n", "star", 1)

    def test_re_export(self) -> None:
        tree = {
            "forge/parts/ground/one.py": "A = 1\n",
            "forge/parts/ground/two.py": "import json\nfrom forge.parts.ground.one import A\n",
        }
        for name, line in {"A": 2, "json": 1}.items():
            with self.subTest(name):
                self.refuse(
                    {**tree, "forge/rigs/demo.py": f"from forge.parts.ground.two import {name}\n"},
                    f"import of {name}, which forge.parts.ground.two only imports itself",
                    "forge/rigs/demo.py:1",
                    f"forge/parts/ground/two.py:{line}",
                )

    def test_source_import_below_the_top_level(self) -> None:
        one = {"forge/parts/ground/one.py": "A = 1\n"}
        line = "from forge.parts.ground.one import A"
        for source, number in {
            f"def f():\n    {line}\n": 2,
            f"class C:\n    {line}\n": 2,
            f"if True:\n    {line}\n": 2,
            f"try:\n    {line}\nexcept ImportError:\n    pass\n": 2,
            "def f():\n    import forge.parts.ground.one\n": 2,
            f'if __name__ == "__main__":\n    {line}\n': 2,
        }.items():
            with self.subTest(source):
                self.refuse(
                    {**one, "forge/rigs/demo.py": source},
                    "below the top level",
                    f"forge/rigs/demo.py:{number}",
                )

    def test_direction(self) -> None:
        self.refuse(
            {
                "forge/parts/planes/cloud.py": "C = 1\n",
                "forge/parts/ground/low.py": "from forge.parts.planes.cloud import C\n\nL = C\n",
                "forge/rigs/demo.py": "from forge.parts.ground.low import L\n\nRIG = L\n",
            },
            "order of sections, forge.parts.ground from forge.parts.planes",
            "forge/parts/ground/low.py:1",
        )

    def test_machines_have_a_section_that_no_part_takes_from(self) -> None:
        """What runs on a rented machine is for programs; a server never carries it."""
        console = {"forge/machine/console.py": "MARK = 1\n"}
        boot = "from forge.machine.console import MARK\n\nBOOT = MARK\n"
        for section in ("parts/ground", "parts/assembly"):
            file = f"forge/{section}/low.py"
            self.refuse(
                {**console, file: boot, "forge/rigs/demo.py": "RIG = 1\n"},
                f"order of sections, forge.{section.replace('/', '.')} from forge.machine",
                f"{file}:1",
            )
            (self.root / file).unlink()
        made = self.bundle({**console, "forge/programs/boot.py": boot}, "forge.programs.boot")
        self.assertEqual(made.modules, ("forge.machine.console", "forge.programs.boot"))
        self.assertIn("# ── machine / console ─", made.render())

    def test_ring_names_every_edge(self) -> None:
        message = self.refuse(
            {
                "forge/parts/ground/a.py": "# First\nfrom forge.parts.ground.c import C\n\nA = C\n",
                "forge/parts/ground/b.py": "from forge.parts.ground.a import A\n\nB = A\n",
                "forge/parts/ground/c.py": "from forge.parts.ground.b import B\n\nC = B\n",
                "forge/rigs/demo.py": "from forge.parts.ground.b import B\n",
            },
            "ring of imports",
            "forge/parts/ground/a.py:2",
            "forge/parts/ground/c.py:1",
            "forge/parts/ground/b.py:1",
        )
        ring = " -> ".join(f"forge.parts.ground.{name}" for name in "acba")
        self.assertIn(ring, message)

    def test_ring_of_one(self) -> None:
        self.refuse(
            {"forge/rigs/demo.py": "from forge.rigs.demo import A\n\nA = 1\n"},
            "forge.rigs.demo -> forge.rigs.demo",
            "forge/rigs/demo.py:1",
        )

    def test_a_bad_import_in_an_unused_module_is_reported(self) -> None:
        self.refuse(
            {
                "forge/rigs/demo.py": "RIG = 1\n",
                "forge/parts/ground/idle.py": "from forge.parts.ground.gone import G\n",
            },
            "does not exist",
            "forge/parts/ground/idle.py:1",
        )

    # text that cutting would lose

    def test_comment_on_an_import(self) -> None:
        self.refuse_part("import os  # why\n\nX = os\n", "a comment on an import", 1)
        self.refuse_part("from os import (\n    path,  # why\n)\n\nX = path\n", "a comment on", 1)
        self.refuse_part("import yaml  # type: ignore\n\nX = yaml\n", "a comment on an import", 1)
        self.refuse(
            {
                "forge/parts/ground/part.py": "X = 1\n",
                "forge/rigs/demo.py": "from forge.parts.ground.part import (\n    X,  # y\n)\n",
            },
            "a comment on an import",
            "forge/rigs/demo.py:1",
        )

    def test_comment_on_a_docstring(self) -> None:
        self.refuse_part('"""Part."""  # noqa\n\nX = 1\n', "a comment on a docstring", 1)

    def test_several_statements_on_a_line(self) -> None:
        for source in (
            "import os; X = 1\n",
            "X = 1; import os\n",
            'X = "é"; import os\n',
            "import os; import re\nX = 1\n",
            "import os;\nX = 1\n",
            '"""Part."""; X = 1\n',
            "from os import (\n    path,\n); X = 1\n",
        ):
            with self.subTest(source):
                self.refuse_part(source, "several statements", 1)

    # top level

    def test_top_level_statements(self) -> None:
        for source, rule in {
            "if X:\n    Y = 1\n": "top-level if",
            "try:\n    Y = 1\nfinally:\n    pass\n": "top-level try",
            "for Y in ():\n    pass\n": "top-level for",
            "while X:\n    pass\n": "top-level while",
            "with X:\n    pass\n": "top-level with",
            "match X:\n    case _:\n        pass\n": "top-level match",
            "del X\n": "top-level delete",
            "assert X\n": "top-level assert",
            "X += 1\n": "top-level augassign",
            "print(X)\n": "top-level expression",
            '"""A second string."""\n': "top-level expression",
            "...\n": "top-level expression",
            "X.y = 1\n": "assignment to other than a name",
            "X[0]: int = 1\n": "assignment to other than a name",
            "Y, X[0] = 1, 2\n": "assignment to other than a name",
        }.items():
            with self.subTest(source):
                self.refuse_part("X = 1\n" + source, rule, 2)

    def test_main_block_outside_the_entry(self) -> None:
        source = 'X = 1\n\nif __name__ == "__main__":\n    pass\n'
        self.refuse_part(source, "the __main__ block stands last in the entry", 3)

    def test_main_block_that_is_not_last_or_has_an_else(self) -> None:
        block = 'if __name__ == "__main__":\n    pass\n'
        for source in (block + "X = 1\n", block + "else:\n    pass\n"):
            with self.subTest(source):
                tree = {"forge/rigs/demo.py": source}
                self.refuse(tree, "the __main__ block stands last", "forge/rigs/demo.py:1")

    def test_dunder_file_outside_the_entry(self) -> None:
        source = "X = 1\n\n\ndef here() -> str:\n    return __file__\n"
        self.refuse_part(source, "__file__ outside the entry", 5)

    def test_type_checking(self) -> None:
        source = "from typing import TYPE_CHECKING\n\nX = 1\n"
        self.refuse_part(source, "TYPE_CHECKING", 1)
        source = "import typing\n\nX = 1\nif typing.TYPE_CHECKING:\n    import os\n"
        self.refuse_part(source, "TYPE_CHECKING", 4)

    # files

    def test_syntax_error(self) -> None:
        self.refuse_part("X = 1\ndef :\n", "cannot be parsed", 2)

    def test_syntax_newer_than_the_oldest_python(self) -> None:
        self.refuse_part("X = 1\ntype Y = int\n", "cannot be parsed", 2)

    def test_not_utf_8(self) -> None:
        write(self.root, {"forge/rigs/demo.py": "A = 1\n"})
        (self.root / "forge/rigs/demo.py").write_bytes(b"A = '\xff'\n")
        with self.assertRaisesRegex(BundleError, r"cannot be read .*forge/rigs/demo\.py:1"):
            bundle("forge.rigs.demo", self.root)

    def test_entry_that_is_not_there(self) -> None:
        self.refuse(
            {"forge/rigs/other.py": ""}, "no module forge.rigs.demo", "forge/rigs/demo.py:1"
        )

    def test_entry_outside_the_sections(self) -> None:
        write(self.root, {"tests/imaginary/rig.py": "A = 1\n"})
        with self.assertRaisesRegex(BundleError, "no module tests.imaginary.rig"):
            bundle("tests.imaginary.rig", self.root)

    def test_head_that_is_not_a_comment(self) -> None:
        made = self.bundle({"forge/rigs/demo.py": "A = 1\n"})
        with self.assertRaisesRegex(BundleError, "comment lines only: head:2"):
            made.render("# fine\nimport os\n")

    def test_ruff_that_fails(self) -> None:
        made = self.bundle({"forge/rigs/demo.py": "A = 1\n"})
        with mock.patch.object(sys, "executable", "false"):
            with self.assertRaisesRegex(BundleError, "ruff check failed"):
                made.render()


class Order(TreeCase):
    """What is in a bundle, and in which order."""

    def test_sections_then_dependency_then_name(self) -> None:
        made = self.bundle(FORGE)
        self.assertEqual(
            made.modules,
            (
                "forge.parts.ground.names",
                "forge.parts.ground.alpha",
                "forge.parts.planes.cloud",
                "forge.rigs.demo",
            ),
        )
        self.assertEqual(made.entry, "forge.rigs.demo")

    def test_the_same_order_in_two_bundles(self) -> None:
        # Depth-first, b would come before a in one rig and after it in the other.
        tree = {f"forge/parts/ground/{name}.py": f"{name.upper()} = 1\n" for name in "abc"}
        tree["forge/parts/ground/d.py"] = "from forge.parts.ground.b import B\n\nD = B\n"
        tree["forge/parts/ground/aa.py"] = "from forge.parts.ground.d import D\n\nAA = D\n"
        lines = [
            f"from forge.parts.ground.{name} import {name.upper()}" for name in "d a aa c".split()
        ]
        tree["forge/rigs/demo.py"] = "\n".join(lines)
        tree["forge/rigs/other.py"] = "\n".join(reversed(lines[1:]))
        made = self.bundle(tree).modules
        other = self.bundle(tree, "forge.rigs.other").modules
        self.assertEqual([name.rpartition(".")[2] for name in made], "a b c d aa demo".split())
        self.assertEqual([name.rpartition(".")[2] for name in other], "a b c d aa other".split())

    def test_a_module_that_nobody_imports_does_not_move_the_others(self) -> None:
        before = self.bundle(FORGE).render()
        extra = {
            "forge/parts/ground/aaa.py": "from forge.parts.ground.names import Name\n\nAA = Name\n",
            "forge/parts/planes/other.py": "Name = 3\n\n\nclass Cloud: ...\n",
        }
        self.assertEqual(self.bundle({**FORGE, **extra}).render(), before)

    def test_third_party_with_the_lazy_ones(self) -> None:
        self.assertEqual(self.bundle(FORGE).third_party, ("boto3", "botocore", "numpy"))

    def test_package_files_are_no_modules(self) -> None:
        tree = {**FORGE, "forge/parts/ground/__init__.py": "print('never bundled')\n"}
        self.assertEqual(self.bundle(tree).modules, self.bundle(FORGE).modules)

    def test_a_section_of_the_tests(self) -> None:
        tree = {
            "tests/imaginary/machine.py": (
                "from forge.parts.ground.names import Name\n\nMACHINE = Name('m')\n"
            ),
            "tests/imaginary/rig.py": (
                "import numpy\nfrom tests.imaginary.machine import MACHINE\n\nRIG = numpy, 1\n"
            ),
        }
        made = self.bundle({**FORGE, **tree}, "tests.imaginary.rig")
        self.assertEqual(
            made.modules,
            ("forge.parts.ground.names", "tests.imaginary.machine", "tests.imaginary.rig"),
        )
        self.assertEqual(made.third_party, ("numpy",))
        self.assertIn("# ── imaginary / machine ──", made.render())

    def test_folders_within_a_section(self) -> None:
        tree = {
            "forge/parts/planes/aws/ec2.py": "EC2 = 1\n",
            "forge/rigs/demo.py": "from forge.parts.planes.aws.ec2 import EC2\n\nRIG = EC2\n",
        }
        self.assertIn("# ── planes / aws / ec2 ──", self.bundle(tree).render())

    def test_names_with_dashes(self) -> None:
        made = self.bundle({"forge/rigs/gce-vllm-l4.py": "A = 1\n"}, "forge.rigs.gce-vllm-l4")
        self.assertIn("# ── rigs / gce-vllm-l4 ──", made.render())


class Text(TreeCase):
    """The text of the result."""

    def test_whole(self) -> None:
        expected = '''
            """The demo's server.

            Its docstring is the file's.
            """

            from __future__ import annotations

            import os.path
            import re
            import sys
            from dataclasses import asdict, dataclass

            import numpy as np

            # ── ground / names ─────
            # Names of things.
            #
            # Knows nothing else:
            #     - an indented line

            # A comment that stands alone.


            @dataclass(frozen=True)
            class Name:
                """A name."""

                text: str  # as it was given


            NAME = re.compile(r"[a-z]+")


            # ── ground / alpha ─────
            # Uses names, so it stands after them in spite of its own.


            def parse(text: str) -> Name:
                if not NAME.fullmatch(text):
                    raise ValueError(text)
                return Name(text)


            # ── planes / cloud ─────
            # A plane.


            @dataclass
            class Cloud:
                name: Name


            def make(text: str) -> dict[str, object]:
                import boto3.session
                from botocore import config  # slow to import

                del boto3, config
                return asdict(Cloud(parse(os.path.basename(text))))


            # ── rigs / demo ─────

            HERE = __file__


            def main() -> str:
                """Runs."""
                return Cloud(Name(f"é {len(sys.argv) > 0}")).name.text + np.__name__


            if __name__ == "__main__":
                print(main())
            '''
        text = self.bundle(FORGE).render()
        for line in text.split("\n"):
            if line.startswith("# ──"):
                self.assertEqual(len(line), 100)
        short = re.sub("─{6,}", "─────", text)
        self.assertEqual(short, textwrap.dedent(expected).lstrip("\n"))

    def test_contents_name_the_line_of_every_banner(self) -> None:
        made = self.bundle(FORGE)
        lines = made.render(contents=True).split("\n")
        begin = lines.index("# Contents, by line:")
        listed = [line for line in lines[begin + 1 : begin + 5]]
        self.assertEqual(lines[begin + 5], "")
        self.assertLess(begin, lines.index("from __future__ import annotations"))
        banners = [n for n, line in enumerate(lines, 1) if line.startswith("# ── ")]
        self.assertEqual(len(listed), len(banners))
        for line, number in zip(listed, banners, strict=True):
            self.assertEqual(int(line[2:7]), number)
            title = line[8:].partition(":")[0]
            self.assertTrue(lines[number - 1].startswith(f"# ── {title} ─"), line)
            self.assertLessEqual(len(line), 100)
        self.assertEqual(listed[0][8:], "ground / names: Names of things.")
        without = [line for n, line in enumerate(lines) if not begin <= n <= begin + 5]
        self.assertEqual("\n".join(without), made.render())

    def test_head_stays_first_and_can_be_read(self) -> None:
        made = self.bundle(FORGE)
        text = made.render(PEP_723)
        self.assertTrue(text.startswith(PEP_723 + '\n"""The demo\'s server.'), text[:400])
        self.assertEqual(text.removeprefix(PEP_723 + "\n"), made.render())
        # The pattern of PEP 723 itself.
        block = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
        found = re.findall(block, text)
        self.assertEqual([kind for kind, *_ in found], ["script"])
        self.assertIn("zebra>=1,<2", found[0][1])

    def test_head_stays_first_without_a_docstring(self) -> None:
        text = self.bundle({"forge/rigs/demo.py": "import os\n\nA = os\n"}).render(PEP_723)
        self.assertTrue(text.startswith(PEP_723 + "\nfrom __future__ import annotations\n"), text)

    def test_an_entry_of_its_own(self) -> None:
        text = self.bundle({"forge/rigs/demo.py": "A = 1\n"}).render()
        self.assertRegex(
            text, r"\Afrom __future__ import annotations\n\n# ── rigs / demo ─+\n\nA = 1\n\Z"
        )

    def test_future_import_stands_once(self) -> None:
        text = self.bundle(FORGE).render()
        self.assertEqual(text.count("from __future__"), 1)
        self.assertEqual(ast.dump(ast.parse(text).body[1]).count("__future__"), 1)

    def test_the_same_alias_twice_and_submodules_of_one_package(self) -> None:
        tree = {
            "forge/parts/ground/one.py": "import numpy as np\nimport os.path\n\nA = np, os\n",
            "forge/parts/ground/two.py": "import os\nimport google.auth\nimport numpy as np\nB = 1",
            "forge/rigs/demo.py": (
                "import google.cloud.storage\n"
                "from forge.parts.ground.one import A\n"
                "from forge.parts.ground.two import B\n"
            ),
        }
        made = self.bundle(tree)
        text = made.render()
        self.assertEqual(text.count("import numpy as np"), 1)
        self.assertIn("import google.auth\nimport google.cloud.storage\nimport numpy as np\n", text)
        self.assertEqual(made.third_party, ("google", "numpy"))

    def test_comments_survive(self) -> None:
        body = self.body("""
            # before the imports
            import os

            # above a constant
            SIZES = {
                "one": 1,  # of one
                # between
                "two": 2,  # of two
            }  # at its end


            def f() -> object:
                # first in the body
                return os  # last in the body
                # below the body


            # behind all
            """)
        for comment in re.findall("# .*", textwrap.dedent(body)):
            self.assertIn(comment, body)
        self.assertEqual(body.count("#"), 10, body)
        self.assertIn(
            '    "one": 1,  # of one\n    # between\n    "two": 2,  # of two\n}  # at', body
        )

    def test_decorators_async_and_dataclasses_survive(self) -> None:
        source = '''
            from contextlib import asynccontextmanager
            from dataclasses import dataclass, field


            @asynccontextmanager
            async def opened(name: str, /, *, wait_s: float = 1.0):
                """Opens."""
                async with other(name) as it:
                    yield [i async for i in it]


            async def other(name):
                await opened(name)


            @dataclass(frozen=True, kw_only=True)
            class Thing:
                items: list[int] = field(default_factory=list)  # indices

                @property
                def first(self) -> int:
                    return self.items[0]

                @staticmethod
                async def later() -> None: ...
            '''
        definitions = textwrap.dedent(source).partition("field\n")[2].strip()
        self.assertIn(definitions, self.body(source))

    def test_strings_survive_to_the_letter(self) -> None:
        strange = "ümläut \u2028 line separator \x0c form feed \x85 next \u200b, trailing   "
        source = f'''
SCRIPT = """#!/bin/bash
  odd indentation
\tand a tab
import not_an_import
from forge.parts.gone import not_one_either
   trailing spaces   \n
"""
RAW = r"\\d+\\n"
STRANGE = """{strange}
{strange}"""
F = f"""{{RAW!r:>10}}
    {{SCRIPT}}"""
BYTES = b"\\x00\\xff"


def f() -> str:
    text = """
  less indented than the code
"""
    return text
'''
        namespace: dict[str, object] = {}
        exec(source, namespace)
        tree = {
            "forge/parts/ground/part.py": source,
            "forge/rigs/demo.py": "from forge.parts.ground.part import RAW\n\nRIG = RAW\n",
        }
        result: dict[str, object] = {}
        exec(self.bundle(tree).render(), result)
        for name in ("SCRIPT", "RAW", "STRANGE", "F", "BYTES"):
            self.assertEqual(result[name], namespace[name])
        self.assertIn(strange, str(result["STRANGE"]))
        found, wanted = result["f"], namespace["f"]
        assert callable(found) and callable(wanted)
        self.assertEqual(found(), wanted())

    def test_carriage_returns_and_a_missing_last_newline(self) -> None:
        write(self.root, {"forge/rigs/demo.py": ""})
        path = self.root / "forge/rigs/demo.py"
        path.write_bytes(b'"""Demo."""\r\nimport os\r\n\r\nA = os\r\nB = """x\r\ny"""')
        text = bundle("forge.rigs.demo", self.root).render()
        self.assertNotIn("\r", text)
        self.assertIn('B = """x\ny"""\n', text)

    def test_docstrings_in_need_of_format(self) -> None:
        body = self.body('''
            def f() -> None:
                """  Padded.

                      Deep, with spaces at the end.   \t
                """
            ''')
        self.assertIn('    """Padded.\n\n    Deep, with spaces at the end.\n    """\n', body)

    def test_imports_within_functions_stay_where_they_are(self) -> None:
        source = """
            def f() -> object:
                import ast  # slow
                import zlib

                import numpy

                return zlib, ast, numpy
            """
        self.assertIn(textwrap.dedent(source).strip(), self.body(source))

    def test_unsorted_imports_within_functions_are_refused(self) -> None:
        source = "def f() -> None:\n    import zlib\n    import ast\n"
        with self.assertRaisesRegex(BundleError, r"sorted\?\): forge/parts/ground/part\.py:1"):
            self.body(source)

    def test_long_docstring_lines_fit(self) -> None:
        words = "word " * 18 + "and more."  # 99 columns: too long behind "# "
        body = self.body(f'"""Part.\n\n  - {words[:-1]}x\n"""\n')
        lines = body.split("\n")
        self.assertLessEqual(max(map(len, lines)), 100)
        self.assertEqual(lines[2], ("# - " + words)[: len(lines[2])])

    def test_the_result_is_formatted_and_sorted(self) -> None:
        text = self.bundle(FORGE).render(PEP_723)
        options = ["--isolated", "--line-length", "100", "--target-version", "py311", "-"]
        for command in (
            ["format", "--check"],
            ["check", "--select", "I,UP,B,E,F", "--config", "src = []"],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "ruff", *command, *options],
                input=text,
                text=True,
                capture_output=True,
                cwd=self.root,
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_result_runs(self) -> None:
        tree = {**FORGE, "numpy.py": ""}  # a stand-in beside the server, so that it imports
        text = self.bundle(tree).render(PEP_723)
        server = self.root / "server.py"
        server.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(server)],
            capture_output=True,
            encoding="utf-8",
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": "", "PYTHONIOENCODING": "utf-8"},
        )
        self.assertEqual((done.stdout, done.stderr), ("é Truenumpy\n", ""))


class Same(TreeCase):
    """The same text every time, in every folder, on every Python."""

    def test_twice(self) -> None:
        first = self.bundle(FORGE)
        again = self.bundle(FORGE)
        self.assertEqual(first, again)
        self.assertEqual(first.render(PEP_723), first.render(PEP_723))
        self.assertEqual(first.render(PEP_723), again.render(PEP_723))

    def test_a_changed_file_is_read_again(self) -> None:
        self.assertIn("[a-z]+", self.bundle(FORGE).render())
        names = FORGE["forge/parts/ground/names.py"].replace("[a-z]+", "[a-f]+")
        self.assertIn(
            "[a-f]+", self.bundle({**FORGE, "forge/parts/ground/names.py": names}).render()
        )

    def test_in_a_folder_with_other_ideas(self) -> None:
        made = self.bundle(FORGE)
        expected = made.render()
        trap = self.root / "numpy"  # a package named like an import, with settings of its own
        write(
            trap,
            {
                "__init__.py": "",
                "numpy/__init__.py": "",
                "src/numpy/__init__.py": "",
                "ruff/__init__.py": "raise SystemExit('not ruff')\n",
                "pyproject.toml": "[tool.ruff]\nline-length = 40\nsrc = ['.']\n",
            },
        )
        with contextlib.chdir(trap):
            self.assertEqual(made.render(), expected)

    def test_relative_root(self) -> None:
        expected = self.bundle(FORGE).render()
        with contextlib.chdir(self.root):
            self.assertEqual(bundle("forge.rigs.demo", Path("."), sections=HERE).render(), expected)

    def test_on_another_python(self) -> None:
        others = list(other_pythons())
        if not others:
            self.skipTest("no Python 3.11 to 3.13 besides this one, in which forge and ruff import")
        expected = self.bundle(FORGE).render(PEP_723)
        code = (
            "import sys; from pathlib import Path; from forge.bundle import bundle\n"
            "made = bundle(sys.argv[1], Path(sys.argv[2]))\n"
            "sys.stdout.buffer.write(made.render(sys.argv[3]).encode())"
        )
        for python in others:
            with self.subTest(python):
                done = subprocess.run(
                    [python, "-c", code, "forge.rigs.demo", str(self.root), PEP_723],
                    capture_output=True,
                    cwd=self.root.parent,
                    env=other_environment(),
                )
                self.assertEqual(done.stdout.decode(), expected, done.stderr.decode())


def other_environment() -> dict[str, str]:
    """The environment in which another Python finds forge, and the ruff that runs here."""
    import ruff  # type: ignore[import-untyped]

    assert ruff.__file__
    paths = [str(ROOT), str(Path(ruff.__file__).parent.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def other_pythons() -> list[str]:
    """One interpreter for each other version of 3.11 to 3.13 that imports forge and runs ruff."""
    found: dict[str, str] = {}
    folders = [Path(name) for name in os.environ.get("PATH", "").split(os.pathsep) if name]
    folders += sorted(Path.home().glob(".pyenv/versions/*/bin"))
    for folder in folders:
        for name in ("python3.11", "python3.12", "python3.13"):
            if not (folder / name).exists():
                continue
            done = subprocess.run(  # a shim may stand for a version that is not there
                [folder / name, "-m", "ruff", "--version"],
                capture_output=True,
                env=other_environment(),
                cwd=folder,
            )
            if done.returncode == 0:
                found.setdefault(name, str(folder / name))
    found.pop("python{}.{}".format(*sys.version_info), None)
    return list(found.values())


class Proof(TreeCase):
    """The proof at the end sees each way to lose something."""

    def spoil(self, change: Callable[[str], str]) -> str:
        """Renders with a formatter that changes the text as well; returns the refusal."""
        made = self.bundle(FORGE)
        real = bundler._ruff

        def spoiled(command: str, text: str, *options: str) -> str:
            result = real(command, text, *options)
            changed = change(result) if command == "format" else result
            self.assertTrue(command != "format" or changed != result, "nothing was spoiled")
            return changed

        with mock.patch.object(bundler, "_ruff", spoiled):
            with self.assertRaises(BundleError) as caught:
                made.render()
        return str(caught.exception)

    def test_statement_lost(self) -> None:
        message = self.spoil(lambda text: text.replace('NAME = re.compile(r"[a-z]+")\n', ""))
        self.assertIn("forge/parts/ground/names.py:22", message)

    def test_last_statement_lost(self) -> None:
        message = self.spoil(lambda text: text.partition("if __name__")[0])
        self.assertIn("lost", message)
        self.assertIn("forge/rigs/demo.py:22", message)

    def test_statement_added(self) -> None:
        self.assertIn("added: result:", self.spoil(lambda text: text + "\nMORE = 1\n"))

    def test_statement_changed(self) -> None:
        message = self.spoil(lambda text: text.replace("[a-z]+", "[a-z]*"))
        self.assertIn("forge/parts/ground/names.py:22", message)

    def test_lazy_import_lost(self) -> None:
        message = self.spoil(lambda text: text.replace("    import boto3.session\n", ""))
        self.assertIn("forge/parts/planes/cloud.py", message)

    def test_import_lost_or_added(self) -> None:
        self.assertIn("import lost", self.spoil(lambda text: text.replace("import sys\n", "")))
        added = self.spoil(lambda text: text.replace("import sys\n", "import sys\nimport json\n"))
        self.assertIn("import lost or added", added)

    def test_string_changed(self) -> None:
        self.assertIn("lost or changed", self.spoil(lambda text: text.replace("é ", "e ")))

    def test_order_changed(self) -> None:
        def move(text: str) -> str:
            return text.replace("HERE = __file__\n", "").replace(
                'if __name__ == "__main__":', 'HERE = __file__\n\n\nif __name__ == "__main__":'
            )

        self.assertIn("forge/rigs/demo.py", self.spoil(move))

    def test_every_statement_of_the_sources_is_there(self) -> None:
        """Counted anew, without the bundler's own proof."""
        text = self.bundle(FORGE).render()
        kept = {ast.unparse(node) for node in ast.parse(text).body}
        for name in self.bundle(FORGE).modules:
            source = (self.root / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8")
            for node in ast.parse(source).body[1:]:
                if not isinstance(node, (ast.Import, ast.ImportFrom)):
                    self.assertIn(ast.unparse(node), kept)


class Source(unittest.TestCase):
    """The bundler itself."""

    def test_it_imports_the_standard_library_only(self) -> None:
        text = Path(bundler.__file__).read_text(encoding="utf-8")
        names = re.findall(r"(?m)^(?:from|import) (\w+)", text)
        self.assertLessEqual(set(names), sys.stdlib_module_names)

    def test_it_never_runs_what_it_bundles(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), {"forge/rigs/demo.py": "A = print('ran')\n"})
            with contextlib.redirect_stdout(io.StringIO()) as said:
                bundle("forge.rigs.demo", Path(folder)).render()
        self.assertEqual(said.getvalue(), "")


if __name__ == "__main__":
    unittest.main()
