"""The plots as pictures: their pixels are read back; nothing of the drawing code is replaced."""

from __future__ import annotations

import io
import os
import struct
import sys
import tempfile
import unittest
from typing import Any
from unittest import mock

from forge.parts.ground.errors import RigError
from forge.parts.knowledge.report_schema import BenchCell, BenchReport, health_of_client
from forge.parts.toolsets.report_plots import plot_curves, plot_heatmap
from tests.parts.report_samples import cell, lost_cell, report

BLUE, ORANGE, GREEN = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the header."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def pixels(png: bytes) -> Any:
    """The picture as an array of height x width x 3, 0 to 255."""
    import matplotlib.image

    floats = matplotlib.image.imread(io.BytesIO(png), format="png")
    return (floats[:, :, :3] * 255).round().astype(int)


def count_of(png: bytes, colour: tuple[int, int, int]) -> int:
    """How many pixels have exactly that colour."""
    return int((pixels(png) == list(colour)).all(axis=2).sum())


def sweep(more: list[BenchCell] | None = None, **sections: Any) -> BenchReport:
    cells = [
        cell(c, i, output_tps=140 * c**0.7 / (1 + i / 8192), ttft_ms=20 + i / 20, tpot_ms=6)
        for i in (128, 1024)
        for c in (1, 8, 32)
    ]
    return report([*cells, *(more or [])], **sections)


class PlotCase(unittest.TestCase):
    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        patch = mock.patch.dict(os.environ, {"MPLCONFIGDIR": scratch.name})
        patch.start()
        self.addCleanup(patch.stop)


class TestCurves(PlotCase):
    def test_each_context_has_its_own_colour(self) -> None:
        png = plot_curves(sweep())
        width, height = size_of(png)
        self.assertTrue(1000 <= width <= 2200 and 400 <= height <= 1200, (width, height))
        self.assertLess(len(png), 400_000)
        self.assertGreater(min(count_of(png, BLUE), count_of(png, ORANGE)), 300)
        self.assertEqual(count_of(png, GREEN), 0)

    def test_a_failed_context_shows_though_it_has_no_figures(self) -> None:
        lost = [lost_cell(c, 65536, "infeasible", "too long") for c in (1, 8, 32)]
        png = plot_curves(sweep(lost))
        self.assertGreater(count_of(png, GREEN), 100)

    def test_a_doubtful_point_is_hollow(self) -> None:
        tired = health_of_client(0.99, 1.0, 0.0)
        firm = plot_curves(report([cell(1, output_tps=150), cell(8)]))
        doubt = plot_curves(report([cell(1, output_tps=150), cell(8, client=tired)]))
        self.assertLess(count_of(doubt, BLUE), 0.7 * count_of(firm, BLUE))
        self.assertGreater(count_of(doubt, BLUE), 50)

    def test_more_contexts_than_colours_are_thinned_out(self) -> None:
        cells = [cell(c, 2**n) for c in (8, 16) for n in range(4, 14)]
        self.assertGreater(count_of(plot_curves(report(cells)), BLUE), 50)

    def test_figures_that_nobody_took_are_said_to_be_missing(self) -> None:
        cells = []
        for c in (8, 16):
            one = cell(c)
            assert one.metrics is not None
            bare = one.metrics.model_copy(update={"ttft_ms": None, "tpot_ms": None})
            cells.append(one.model_copy(update={"metrics": bare}))
        png = plot_curves(report(cells))
        grid = pixels(png)
        dark = (grid.sum(axis=2) < 120).any(axis=0)
        self.assertTrue(dark[size_of(png)[0] // 2 :].any(), "the empty panels hold words")

    def test_an_open_loop_has_no_curve(self) -> None:
        opened = cell().model_dump() | {
            "mode": "open",
            "concurrency": None,
            "rate_rps": 9.0,
            "id": "r9-i1024-o128",
        }
        made = report([BenchCell.model_validate(opened)])
        for draw in (plot_curves, plot_heatmap):
            with self.subTest(draw=draw.__name__), self.assertRaises(RigError) as caught:
                draw(made)
            self.assertEqual(caught.exception.error_class, "NOT_FOUND")


class TestHeatmap(PlotCase):
    def test_tiles_grow_with_the_grid_and_the_picture_stays_bounded(self) -> None:
        small = size_of(plot_heatmap(sweep()))
        cells = [cell(c, i) for c in range(8, 68) for i in range(100, 120)]
        large = size_of(plot_heatmap(report(cells)))
        self.assertGreater(large[0], small[0])
        self.assertLessEqual(max(large), 2200)

    def test_a_failed_tile_is_neither_blank_nor_a_value(self) -> None:
        whole = sweep([cell(8, 4096, output_tps=600), cell(32, 4096, output_tps=900)])
        lost = sweep([lost_cell(8, 4096, "failed", "x"), lost_cell(32, 4096, "infeasible", "x")])
        blank = sweep([lost_cell(32, 4096, "infeasible", "x")])
        grey = (0xF2, 0xF2, 0xF2)
        counts = [count_of(plot_heatmap(made), grey) for made in (whole, blank, lost)]
        self.assertLess(counts[0], 100)  # blended edges
        self.assertGreater(counts[1], 300)
        self.assertGreater(counts[2], 1.7 * counts[1])

    def test_a_doubtful_tile_is_struck_through(self) -> None:
        tired = health_of_client(0.99, 1.0, 0.0)
        self.assertEqual(count_of(plot_heatmap(report([cell(1), cell(8)])), ORANGE), 0)
        doubt = report([cell(1, output_tps=150), cell(8, client=tired)])
        self.assertGreater(count_of(plot_heatmap(doubt), ORANGE), 20)

    def test_a_grid_without_one_success_is_drawn(self) -> None:
        made = report([lost_cell(c, 128, "failed", "refused") for c in (1, 8)])
        for draw in (plot_curves, plot_heatmap):
            with self.subTest(draw=draw.__name__):
                self.assertGreater(size_of(draw(made))[0], 300)


class TestWithoutThePackage(unittest.TestCase):
    def test_the_answer_says_what_is_missing(self) -> None:
        with mock.patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None}):
            with self.assertRaises(RigError) as caught:
                plot_curves(sweep())
        self.assertEqual(caught.exception.error_class, "NOT_FOUND")
        self.assertIn("matplotlib", caught.exception.what)


if __name__ == "__main__":
    unittest.main()
