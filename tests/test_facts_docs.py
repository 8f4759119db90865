"""HARDWARE.md and MODELS.md are what the data says today, with a source for every figure."""

from __future__ import annotations

import re
import unittest
from pathlib import Path

from forge.facts_docs import render_hardware, render_models
from forge.parts.knowledge.hardware import ACCELERATORS
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.prices import PRICES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {"HARDWARE.md": render_hardware, "MODELS.md": render_models}


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, its head and rule left out."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


class TestDocuments(unittest.TestCase):
    def test_the_files_are_fresh(self) -> None:
        for name, render in DOCUMENTS.items():
            found = (ROOT / name).read_text(encoding="utf-8")
            self.assertEqual(found, render(), f"{name}: run python -m forge.facts_docs")

    def test_rendering_twice_gives_the_same(self) -> None:
        for render in DOCUMENTS.values():
            self.assertEqual(render(), render())

    def test_notes_and_marks_belong_together(self) -> None:
        for name, render in DOCUMENTS.items():
            text = render()
            body, _, sources = text.partition("\n## Sources\n")
            marks = [int(mark) for mark in re.findall(r"\[\^(\d+)\]", body)]
            notes = [int(note) for note in re.findall(r"^\[\^(\d+)\]: \S", sources, re.M)]
            self.assertEqual(sorted(set(marks)), notes, name)
            self.assertEqual(notes, list(range(1, len(notes) + 1)), name)
            first_uses = sorted(set(marks), key=marks.index)
            self.assertEqual(first_uses, notes, name)

    def test_no_two_notes_say_the_same(self) -> None:
        for render in DOCUMENTS.values():
            notes = re.findall(r"^\[\^\d+\]: (.+)$", render(), re.M)
            self.assertEqual(len(set(notes)), len(notes))

    def test_tables_are_rectangular(self) -> None:
        for name, render in DOCUMENTS.items():
            width = 0
            for line in render().split("\n"):
                if not line.startswith("|"):
                    width = 0
                    continue
                width = width or line.count("|")
                self.assertEqual(line.count("|"), width, f"{name}: {line}")

    def test_every_number_about_a_chip_is_marked_or_unmeasured(self) -> None:
        text = render_hardware()
        chips = rows(text, "Chips")
        self.assertEqual([row[0].strip("`") for row in chips], list(ACCELERATORS))
        for row in chips:
            for cell in row[2:]:
                self.assertRegex(cell, r"\[\^\d+\]$|^unmeasured$")
        prices = rows(text, "Prices")
        self.assertEqual(len(prices), len(PRICES))
        for row in prices:
            self.assertRegex(row[-1], r"^\d+(\.\d+)?\[\^\d+\]$")

    def test_each_note_of_a_value_has_kind_and_date(self) -> None:
        # A mark behind a digit cites a figure; one behind "unmeasured" only explains.
        for render in DOCUMENTS.values():
            text = render()
            notes = dict(re.findall(r"^\[\^(\d+)\]: (.+)$", text, re.M))
            for mark in re.findall(r"\d\[\^(\d+)\]", text):
                self.assertRegex(notes[mark], r", 20\d\d(-\d\d)*; (measured|imported|derived)")

    def test_unmeasured_is_written_out_where_the_data_has_none(self) -> None:
        missing = sum(
            figure.value is None
            for chip in ACCELERATORS.values()
            for figure in (chip.visible_memory, chip.bandwidth, chip.compute)
        )
        chips = [cell for row in rows(render_hardware(), "Chips") for cell in row]
        self.assertEqual(sum(cell.startswith("unmeasured") for cell in chips), missing)
        self.assertGreater(missing, 0)
        self.assertNotIn("None", render_hardware() + render_models())

    def test_chips_without_a_price_are_named(self) -> None:
        sentence = next(line for line in render_hardware().split("\n") if "No price" in line)
        unpriced = set(re.findall(r"`(\w+)`", sentence))
        self.assertEqual(unpriced | {price.chip for price in PRICES}, set(ACCELERATORS))
        self.assertFalse(unpriced & {price.chip for price in PRICES})

    def test_the_models_table_has_the_published_figures(self) -> None:
        table = {row[0]: row[1:] for row in rows(render_models(), "Memory")}
        # GB and KiB as the capacity notes of 2026-11-29 print them, E2B to 31B
        self.assertEqual(
            table["weights, bf16"], ["9.26 GB", "14.93 GB", "23.81 GB", "50.47 GB", "61.39 GB"]
        )
        self.assertEqual(
            table["cache per token, uniform, 16 bit"],
            ["18 KiB", "56 KiB", "336 KiB", "220 KiB", "880 KiB"],
        )
        self.assertEqual(
            table["cache per token, ring, 16 bit"],
            ["6 KiB", "16 KiB", "16 KiB", "20 KiB", "80 KiB"],
        )

    def test_checkpoints_that_do_not_exist_say_so(self) -> None:
        listed = {row[1].strip("`"): row[2] for row in rows(render_models(), "Checkpoints")}
        every = {c.repo: c.exists for m in GEMMA4.values() for c in m.checkpoints}
        self.assertEqual(set(listed), set(every))
        for repo, exists in every.items():
            self.assertEqual(listed[repo], "yes" if exists else "**no**", repo)


if __name__ == "__main__":
    unittest.main()
