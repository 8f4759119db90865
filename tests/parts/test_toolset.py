"""Toolsets: which methods become tools, under which words, and what a subclass may not hide."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from forge.parts.assembly.rig import AssembledRig
from forge.parts.ground.errors import RigError
from forge.parts.toolsets.toolset import RigContext, ToolMethod, Toolset, rig_tool
from forge.rigs.local_pytorch_cpu_2b import RIG

WORDS = {"engine": "vLLM", "ready": "vllm", "place": "a TPU", "cost": "It costs 1 USD an hour"}


class Base(Toolset):
    toolset_name = "base"

    @rig_tool(title="Start {engine}", effect="changes")
    async def start(self, model: str = "x") -> str:
        """Start {engine} on {place}. {cost}; a set is written {{so}}.

        A second paragraph
        over two lines.
        """
        return f"started {model} for {self.context.rig}"

    @rig_tool(name="wait_for_{ready}_ready", title="Wait", effect="reads", structured=False)
    def wait(self) -> str:
        """Wait."""
        return "waited"

    @rig_tool(title="End", effect="destroys")
    async def end(self) -> str:
        """End."""
        return "ended"

    @property
    def costly(self) -> str:
        raise AssertionError("a property was evaluated to look for a mark")

    async def helper(self) -> str:
        """Not marked, so no tool."""
        return "helped"


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        places = {
            "XDG_STATE_HOME": str(self.folder / "s"),
            "XDG_CACHE_HOME": str(self.folder / "c"),
        }
        patch = mock.patch.dict(os.environ, {"PATH": os.environ["PATH"], **places}, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.server_file = self.folder / "rig" / "server.py"
        self.server_file.parent.mkdir()
        self.server_file.write_text("")

    def context(self, **words: str) -> RigContext:
        """A real rig's context, with the words of another."""
        context = AssembledRig(RIG, self.server_file).context
        return dataclasses.replace(context, vocabulary={**WORDS, **words})

    def tools(self, kind: type[Toolset], **words: str) -> dict[str, ToolMethod]:
        return {method.name: method for method in kind(self.context(**words)).tool_methods()}


class MarksTest(Case):
    def test_marked_methods_are_the_tools_in_their_order(self) -> None:
        self.assertEqual(list(self.tools(Base)), ["start", "wait_for_vllm_ready", "end"])

    def test_each_has_what_its_mark_says(self) -> None:
        tools = self.tools(Base)
        self.assertEqual(
            [(t.effect, t.structured) for t in tools.values()],
            [("changes", True), ("reads", False), ("destroys", True)],
        )

    async def test_the_function_is_bound_to_the_toolset(self) -> None:
        self.assertEqual(
            await self.tools(Base)["start"].function(model="m"),
            "started m for local-pytorch-cpu-2b",
        )

    def test_the_bare_toolset_has_none_and_runs_no_jobs(self) -> None:
        self.assertEqual(self.tools(Toolset), {})
        self.assertEqual(Toolset(self.context()).job_runners(), {})


class WordsTest(Case):
    def test_names_titles_and_descriptions_speak_of_this_rig(self) -> None:
        tool = self.tools(Base)["start"]
        self.assertEqual(tool.title, "Start vLLM")
        self.assertEqual(
            tool.description,
            "Start vLLM on a TPU. It costs 1 USD an hour; a set is written {so}.\n\n"
            "A second paragraph over two lines.",
        )
        other = self.tools(Base, engine="JAX", ready="jax", place="a GPU")
        self.assertEqual(other["start"].title, "Start JAX")
        self.assertIn("wait_for_jax_ready", other)

    def test_two_rigs_of_one_process_do_not_share_words(self) -> None:
        first, second = Base(self.context(engine="one")), Base(self.context(engine="two"))
        self.assertEqual(first.tool_methods()[0].title, "Start one")
        self.assertEqual(second.tool_methods()[0].title, "Start two")

    def test_a_word_that_no_vocabulary_has_is_no_silent_gap(self) -> None:
        class Unknown(Toolset):
            @rig_tool(title="X", effect="reads")
            async def look(self) -> str:
                """Look at the {unheard_of}."""
                return ""

        with self.assertRaises(KeyError) as caught:
            self.tools(Unknown)
        self.assertIn("unheard_of", str(caught.exception))


class InheritanceTest(Case):
    def test_a_subclass_adds_its_own_after_the_inherited_ones(self) -> None:
        class More(Base):
            @rig_tool(title="More", effect="reads")
            async def more(self) -> str:
                """More."""
                return ""

        self.assertEqual(list(self.tools(More)), ["start", "wait_for_vllm_ready", "end", "more"])

    async def test_a_tool_may_be_replaced_by_one_that_is_marked_again(self) -> None:
        class Other(Base):
            @rig_tool(title="Other", effect="destroys")
            async def start(self, model: str = "x") -> str:
                """Other."""
                return "other"

        tools = self.tools(Other)
        self.assertEqual(list(tools), ["start", "wait_for_vllm_ready", "end"])
        self.assertEqual((tools["start"].title, tools["start"].effect), ("Other", "destroys"))
        self.assertEqual(await tools["start"].function(), "other")

    def test_hiding_a_tool_by_an_unmarked_method_is_refused_at_once(self) -> None:
        with self.assertRaises(TypeError) as caught:

            class Hides(Base):
                async def end(self) -> str:
                    return "not a tool"

        self.assertIn("Hides.end hides a tool", str(caught.exception))

    def test_hiding_it_by_anything_else_is_refused_too(self) -> None:
        for thing in (None, 7, property(lambda self: 1), staticmethod(print)):
            with self.subTest(thing=thing), self.assertRaises(TypeError):
                type("Hides", (Base,), {"end": thing})

    def test_hiding_it_through_another_parent_is_refused_too(self) -> None:
        class Mixin:
            async def end(self) -> str:
                return "not a tool"

        with self.assertRaises(TypeError):
            type("Hides", (Mixin, Base), {})
        type("Fine", (Base, Mixin), {})  # the marked one comes first

    def test_two_steps_down_it_is_still_refused(self) -> None:
        class Middle(Base):
            pass

        with self.assertRaises(TypeError):
            type("Hides", (Middle,), {"end": lambda self: None})

    def test_a_helper_may_be_replaced_freely(self) -> None:
        class Other(Base):
            async def helper(self) -> str:
                return "other"

        self.assertNotIn("helper", self.tools(Other))


class ContextTest(Case):
    def test_settings_are_read_when_asked_and_a_fault_is_told_until_it_is_mended(self) -> None:
        context = self.context()
        with self.assertRaises(RigError) as caught:
            _ = context.settings
        self.assertEqual(caught.exception.error_class, "INVALID")
        values: Any
        for port in (2000, 3000):
            path = self.server_file.parent / "tpu.env"
            path.write_text(f"MODEL_NAME=embedded\nPORT={port}\n")
            os.utime(path, (port, port))  # a stamp of its own, however fast the test is
            values = context.settings
            self.assertEqual(values.port, port)


if __name__ == "__main__":
    unittest.main()
