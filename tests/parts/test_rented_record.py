"""The record of a rig's machine: written before it is asked for, and told when it is damaged."""

from __future__ import annotations

import json
import tempfile
import threading
import unittest
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.knowledge.sweep_plan import SweepBook, SweepFound, SweepRequest
from forge.parts.planes.rented_record import (
    MACHINE_FILE,
    SWEEP_FOLDER,
    MachineBook,
    MachineRecord,
)

ASKED = MachineRecord("rig-0a1b2c", "us-east5-b", "create-1", "spot")
SEEN = replace(ASKED, provider_id="77", created_at="2026-11-30T10:00:00Z")
# What a torn write, an editor, a bad disk or another version leaves. None of it is a machine.
DAMAGED: dict[str, str] = {
    "half": '{"name": "rig-0a1b2c", "zone": "us-ea',
    "empty": "",
    "no object": '["rig-0a1b2c"]',
    "a word": "null",
    "no text": "\x00\x01\x02",
    "nested beyond reading": "[" * 100_000,
    "nothing in it": "{}",
    "without its zone": '{"name": "rig-0a1b2c", "intent": "create-1"}',
    "a field more": json.dumps({**asdict(ASKED), "colour": "red"}),
    "a number for a name": json.dumps({**asdict(ASKED), "name": 7}),
    "null for a zone": json.dumps({**asdict(ASKED), "zone": None}),
    "a list for an id": json.dumps({**asdict(ASKED), "provider_id": ["77"]}),
    "no name": json.dumps({**asdict(ASKED), "name": ""}),
}


def request(name: str, zone: str = "europe-west4-a") -> SweepRequest:
    return SweepRequest(
        name=name,
        zone=zone,
        market="flex-start",
        project="p",
        machine="TPU VM",
        intent=f"sweep-of-{name}",
        asked_unix=1.8e9,
        patience_s=60,
        valid_s=120,
        life_s=3600,
    )


def found(name: str) -> SweepFound:
    return SweepFound(request(name), "88", "2026-11-30T11:00:00Z", 1.8e9 + 30)


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="record-")
        self.addCleanup(folder.cleanup)
        self.state = Path(folder.name) / "state"
        self.book = MachineBook(self.state)
        self.path = self.state / MACHINE_FILE

    def swept(self, **what: Any) -> None:
        """A sweep left that behind."""
        SweepBook(self.state / SWEEP_FOLDER / "sweep.json").save(project="p", machine="m", **what)

    def damage(self, text: str) -> None:
        self.state.mkdir(exist_ok=True)
        self.path.write_text(text, encoding="latin-1")

    def assert_unknown(self) -> RigError:
        with self.assertRaises(RigError) as caught:
            self.book.read()
        self.assertEqual(caught.exception.error_class, "UNKNOWN")
        return caught.exception


class WriteTest(Case):
    def test_nothing_is_on_record_where_nothing_was_written(self) -> None:
        self.assertIsNone(self.book.read())
        self.assertFalse(self.state.exists(), "a look made a folder")

    def test_what_was_written_is_read_by_another_book(self) -> None:
        for record in (ASKED, SEEN):
            self.book.write(record)
            self.assertEqual(MachineBook(self.state).read(), record)

    def test_it_is_this_users_alone(self) -> None:
        self.book.write(SEEN)
        self.assertEqual(self.path.stat().st_mode & 0o077, 0)
        self.assertEqual(self.state.stat().st_mode & 0o077, 0)

    def test_what_cannot_be_written_is_refused_and_changes_nothing(self) -> None:
        """No record, no machine: the caller asks for none."""
        self.book.write(ASKED)
        (self.state / "elsewhere").mkdir()
        blocked = self.state / "elsewhere" / "state"
        blocked.write_text("a file where the folder should be")
        with self.assertRaises(RigError) as caught:
            MachineBook(blocked).write(SEEN)
        self.assertEqual(caught.exception.error_class, "DENIED")
        self.assertEqual(self.book.read(), ASKED)

    def test_a_reader_beside_a_writer_sees_one_whole_record_or_the_other(self) -> None:
        self.book.write(ASKED)
        seen: set[MachineRecord | None] = set()
        ends = threading.Event()

        def look() -> None:
            while not ends.is_set():
                seen.add(MachineBook(self.state).read())

        reader = threading.Thread(target=look)
        reader.start()
        try:
            for _ in range(150):
                self.book.write(SEEN)
                self.book.write(ASKED)
        finally:
            ends.set()
            reader.join()
        self.assertLessEqual(seen, {ASKED, SEEN})


class DamagedTest(Case):
    def test_a_damaged_record_is_told_and_never_called_none(self) -> None:
        for what, text in DAMAGED.items():
            with self.subTest(what):
                self.damage(text)
                error = self.assert_unknown()
                self.assertIn(MACHINE_FILE.replace(".json", ".damaged"), error.what)
                self.assertTrue(error.next_step)
                self.assert_unknown()  # and again, although it was set aside
                self.path.with_suffix(".damaged").unlink()
                self.assertIsNone(self.book.read())

    def test_what_was_damaged_is_kept_for_people(self) -> None:
        for what in ("half", "a field more"):
            self.damage(DAMAGED[what])
            self.assert_unknown()
            kept = self.path.with_suffix(".damaged").read_text()
            self.assertEqual(kept, DAMAGED[what])
            self.assertFalse(self.path.exists())

    def test_an_older_search_does_not_stand_in_for_it(self) -> None:
        self.swept(found=found("old"))
        self.damage(DAMAGED["half"])
        self.assert_unknown()

    def test_the_next_record_is_believed(self) -> None:
        self.damage(DAMAGED["half"])
        self.assert_unknown()
        self.book.write(ASKED)
        self.assertEqual(self.book.read(), ASKED)
        self.book.forget(ASKED.name)
        self.assertIsNone(self.book.read(), "the old damage came back")

    def test_a_record_that_cannot_be_read_is_no_missing_one(self) -> None:
        self.state.mkdir()
        self.path.mkdir()
        with self.assertRaises(RigError) as caught:
            self.book.read()
        self.assertEqual(caught.exception.error_class, "DENIED")


class SweepTest(Case):
    """What a search left stands in where nothing else is on record."""

    def test_what_it_found(self) -> None:
        self.swept(found=found("got"))
        one = request("got")
        expected = MachineRecord(
            "got", one.zone, one.intent, "flex-start", "88", "2026-11-30T11:00:00Z"
        )
        self.assertEqual(self.book.read(), expected)

    def test_what_a_killed_one_had_asked_for(self) -> None:
        self.swept(live=request("out"), phase="waiting")
        record = self.book.read()
        assert record is not None
        self.assertEqual((record.name, record.intent), ("out", "sweep-of-out"))
        self.assertEqual((record.provider_id, record.created_at), ("", ""))

    def test_neither(self) -> None:
        self.swept()
        self.assertIsNone(self.book.read())

    def test_a_damaged_search_is_told(self) -> None:
        self.swept(found=found("got"))
        (self.state / SWEEP_FOLDER / "sweep.json").write_text('{"v": 1, "live": 7}')
        self.assert_unknown()

    def test_a_record_of_its_own_wins(self) -> None:
        self.swept(found=found("got"))
        self.book.write(SEEN)
        self.assertEqual(self.book.read(), SEEN)

    def test_what_was_found_before_does_not_come_back_after_it(self) -> None:
        self.swept(found=found("got"))
        self.book.write(SEEN)
        self.book.forget(SEEN.name)
        self.assertIsNone(self.book.read())

    def test_what_was_found_is_noted_a_second_time(self) -> None:
        """The end of a search: its own record stays whole, or the next one would ask again."""
        self.swept(found=found("got"))
        self.book.write(replace(SEEN, name="got"))
        book = SweepBook(self.state / SWEEP_FOLDER / "sweep.json")
        book.load()
        self.assertEqual(book.record.found, found("got"))


class ForgetTest(Case):
    def test_the_named_one_goes(self) -> None:
        self.book.write(SEEN)
        self.book.forget(SEEN.name)
        self.assertIsNone(self.book.read())
        self.book.forget(SEEN.name)  # gone twice is no fault

    def test_another_one_stays(self) -> None:
        """A disk or an older machine was destroyed: the present one is still the rig's."""
        self.book.write(SEEN)
        for name in ("rig-0a1b2", "rig-0a1b2c-2", "", "got"):
            self.book.forget(name)
            self.assertEqual(self.book.read(), SEEN)

    def test_it_is_forgotten_in_both_places(self) -> None:
        self.swept(found=found("got"))
        self.book.write(replace(SEEN, name="got"))
        self.book.forget("got")
        self.assertIsNone(self.book.read())

    def test_the_request_of_a_killed_search(self) -> None:
        self.swept(live=request("out"), phase="waiting")
        self.book.forget("out")
        self.assertIsNone(self.book.read())
        book = SweepBook(self.state / SWEEP_FOLDER / "sweep.json")
        book.load()
        self.assertIsNone(book.record.live)
        self.assertIsNone(book.record.phase)

    def test_a_damaged_one_stays_and_does_not_hinder(self) -> None:
        self.damage(DAMAGED["half"])
        self.book.forget(SEEN.name)
        self.assert_unknown()

    def test_all_that_is_known_to_be_gone(self) -> None:
        """A search that begins has seen that no machine exists."""
        self.swept(found=found("old"))
        self.book.write(SEEN)
        self.book.forget_gone()
        self.assertIsNone(self.book.read())
        self.book.forget_gone()

    def test_of_a_damaged_record_too(self) -> None:
        self.damage(DAMAGED["a number for a name"])
        self.assert_unknown()
        self.book.forget_gone()
        self.assertIsNone(self.book.read())

    def test_not_what_a_killed_search_may_still_get(self) -> None:
        self.swept(live=request("out"), phase="asking")
        self.book.write(SEEN)
        self.book.forget_gone()
        record = self.book.read()
        assert record is not None
        self.assertEqual(record.name, "out")

    def test_nor_a_damaged_search(self) -> None:
        self.swept(found=found("old"))
        path = self.state / SWEEP_FOLDER / "sweep.json"
        path.write_text("{half")
        self.book.forget_gone()
        self.assert_unknown()


if __name__ == "__main__":
    unittest.main()
