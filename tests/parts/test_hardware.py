"""Chips, slots and prices: whole, sourced, and consistent with figures from elsewhere."""

from __future__ import annotations

import dataclasses
import re
import unittest

from forge.parts.knowledge.figures import Figure
from forge.parts.knowledge.hardware import ACCELERATORS, HARDWARE_SLOTS, accelerator_for_slot
from forge.parts.knowledge.memory import step_bytes
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.prices import PRICES, prices_for

FIGURES = ("visible_memory", "bandwidth", "compute")
UNITS = {"visible_memory": "GiB", "bandwidth": "GB/s", "compute": "TFLOP/s"}
PRIVATE = re.compile(r"(^|\s)~?/\w+/|\bseeds?\b|localhost|127\.0\.0\.1", re.IGNORECASE)


class TestAccelerators(unittest.TestCase):
    def test_the_table_of_figures(self) -> None:
        # GiB, GB/s, dense TFLOP/s: typed in a second time from the capacity notes of 2026-11-29.
        expected = {
            "v5e": (15.75, 819, 197),
            "v5p": (95, 2765, 459),
            "v6e": (31.24, 1638, 918),
            "l4": (22.03, 300, 121),
            "t4": (14.56, 320, 65),
            "t4g": (14.56, 320, 65),
            "a10g": (22.06, 600, 70),
            "mi300x": (191.69, 5300, 1307),
            "h100": (79.1, 3350, 989),
            "h200": (139.8, 4800, 989),
            "inf2": (16, 410, 95),
        }
        for chip, values in expected.items():
            found = tuple(getattr(ACCELERATORS[chip], field).value for field in FIGURES)
            self.assertEqual(found, values, chip)

    def test_every_figure_has_its_unit_and_its_key_its_chip(self) -> None:
        for key, chip in ACCELERATORS.items():
            self.assertEqual(key, chip.chip)
            for field, unit in UNITS.items():
                figure = getattr(chip, field)
                self.assertEqual(figure.unit, unit, (key, field))
                if figure.value is not None:
                    self.assertRegex(figure.date, r"^20\d\d(-\d\d){0,2}$", (key, field))
            self.assertTrue(chip.native_dtypes and chip.dtypes_source and chip.dtypes_date)

    def test_the_disagreement_about_v5e_is_kept_with_the_figure(self) -> None:
        self.assertIn("859", ACCELERATORS["v5e"].bandwidth.note)
        # 800 GiB/s in GB/s is where the other figure comes from
        self.assertEqual(round(800 * 2**30 / 1e9), 859)

    def test_nothing_is_claimed_about_a_processor_but_one_laptops_rate(self) -> None:
        cpu = ACCELERATORS["cpu"]
        self.assertIsNone(cpu.visible_memory.value)
        self.assertIsNone(cpu.compute.value)
        # 4.853 tokens per second, each reading E2B's bf16 step
        rate = 4.853 * step_bytes(GEMMA4["E2B"].geometry, "bf16") / 1e9
        self.assertAlmostEqual(rate, cpu.bandwidth.known("cpu bandwidth"), delta=0.1)
        self.assertEqual(cpu.bandwidth.kind, "derived")

    def test_types_that_a_chip_lacks(self) -> None:
        for chip in ("t4", "t4g", "1650ti"):  # Turing
            self.assertNotIn("bf16", ACCELERATORS[chip].native_dtypes)
        for chip in ("v5e", "v6e", "v5p", "t4", "a10g"):
            self.assertNotIn("fp8", ACCELERATORS[chip].native_dtypes)
        for chip in ("l4", "h100", "h200", "mi300x"):
            self.assertLessEqual({"bf16", "fp8"}, set(ACCELERATORS[chip].native_dtypes))

    def test_measured_speeds_stay_below_the_peak(self) -> None:
        # Reported single-stream tokens per second (xbill9/gemma4-dev): none may imply more
        # bandwidth than the chip has.
        for chip, size, encoding, rate in (
            ("v5e", "E2B", "bf16", 123.7),
            ("v6e", "E2B", "bf16", 213),
            ("v6e", "E4B", "bf16", 111),
            ("v6e", "12B", "bf16", 45.2),
            ("l4", "E2B", "bf16", 48.5),
            ("t4g", "E2B", "bf16", 43.1),
            ("1650ti", "E2B", "q4_0", 73.75),
            ("inf2", "E2B", "bf16", 47.3),
        ):
            read = rate * step_bytes(GEMMA4[size].geometry, encoding) / 1e9
            peak = ACCELERATORS[chip].bandwidth.known(chip)
            self.assertLess(read, peak, (chip, size))
            self.assertGreater(read, 0.4 * peak, (chip, size))

    def test_data_cannot_be_changed(self) -> None:
        with self.assertRaises(dataclasses.FrozenInstanceError):
            ACCELERATORS["v5e"].chip = "x"  # type: ignore[misc]


class TestSlots(unittest.TestCase):
    def test_every_slot_leads_to_a_chip(self) -> None:
        for key, slot in HARDWARE_SLOTS.items():
            self.assertEqual(key, slot.slot)
            self.assertEqual(accelerator_for_slot(key).chip, slot.chip)
            self.assertGreaterEqual(slot.devices, 1)

    def test_tpu_slots_end_with_their_chips(self) -> None:
        for key, slot in HARDWARE_SLOTS.items():
            match = re.fullmatch(r"(v\d[ep])(\d)", key)
            if match:
                self.assertEqual((slot.chip, slot.devices), (match[1], int(match[2])))

    def test_families_and_cards_are_the_same_chip(self) -> None:
        self.assertIs(accelerator_for_slot("g6"), accelerator_for_slot("l4"))
        self.assertIs(accelerator_for_slot("g4dn"), accelerator_for_slot("t4"))
        self.assertEqual(accelerator_for_slot("g5g").chip, "t4g")

    def test_an_unknown_slot_is_refused_with_the_known_ones(self) -> None:
        with self.assertRaisesRegex(ValueError, "'v5e-1'.*v5e1.*cpu"):
            accelerator_for_slot("v5e-1")


class TestPrices(unittest.TestCase):
    def test_rows_are_sourced_positive_and_unique(self) -> None:
        keys = [(p.provider, p.machine, p.chip, p.region, p.provisioning) for p in PRICES]
        self.assertEqual(len(set(keys)), len(keys))
        for price in PRICES:
            self.assertIn(price.chip, ACCELERATORS)
            self.assertEqual(price.rate.unit, "USD/h")
            self.assertGreater(price.rate.known("price"), 0)
            self.assertTrue(price.region)

    def test_the_way_of_renting_orders_the_price(self) -> None:
        # Spot and flex-start are never dearer than on demand, in any one place.
        for price in PRICES:
            if price.provisioning == "on-demand":
                continue
            for dear in prices_for(price.chip, region=price.region, provisioning="on-demand"):
                if dear.machine == price.machine:
                    self.assertLess(price.rate.known("spot"), dear.rate.known("on demand"))

    def test_prices_are_narrowed_by_what_is_given(self) -> None:
        everywhere = prices_for("v6e")
        flex = prices_for("v6e", provisioning="flex-start")
        # Google's list of 2026-07: one flex-start price in four regions
        self.assertEqual(
            {p.region for p in flex}, {"europe-west4", "us-east1", "us-east5", "asia-northeast1"}
        )
        self.assertEqual({p.rate.value for p in flex}, {1.35})
        self.assertLess(set(flex), set(everywhere))
        (one,) = prices_for("v5e", region="us-west4", provisioning="flex-start")
        self.assertEqual(one.rate.value, 0.60)
        self.assertEqual(prices_for("cpu"), ())
        self.assertEqual(prices_for("v6e", region="us-west4"), ())

    def test_known_bills_come_out(self) -> None:
        # dev.to, 2026-07-25: four hours of v6e flex-start cost 5.40 dollars
        (rate,) = prices_for("v6e", region="europe-west4", provisioning="flex-start")
        self.assertAlmostEqual(4 * rate.rate.known("rate"), 5.40)
        # Cloud Run bills the L4 per second
        (gpu,) = (p for p in prices_for("l4") if p.provider == "google")
        self.assertAlmostEqual(gpu.rate.known("rate"), 0.0001867 * 3600, delta=0.001)


class TestSources(unittest.TestCase):
    def test_no_source_names_anything_private(self) -> None:
        for figure in self.figures():
            for text in (figure.source, figure.note):
                self.assertIsNone(PRIVATE.search(text), text)

    def figures(self) -> list[Figure]:
        found = [getattr(chip, field) for chip in ACCELERATORS.values() for field in FIGURES]
        found += [price.rate for price in PRICES]
        for model in GEMMA4.values():
            found += [model.vision_tower, model.audio_tower, *(c.file for c in model.checkpoints)]
        return found


if __name__ == "__main__":
    unittest.main()
