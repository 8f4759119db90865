"""Errors and results: the class is the first word, both halves of a result say the same."""

from __future__ import annotations

import pickle
import typing
import unittest
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from forge.parts.ground.errors import ErrorClass, RigError, invalid_parameter
from forge.parts.ground.results import Outcome, outcome_as_text


class Part(BaseModel):
    name: str
    size: float


class Example(Outcome):
    state: str = ""
    count: int | None = None
    ratio: float = 0.0
    ready: bool = False
    names: list[str] = Field(default_factory=list)
    parts: list[Part] = Field(default_factory=list)
    sizes: dict[str, float] = Field(default_factory=dict)


class ErrorTest(unittest.TestCase):
    def test_the_class_is_the_first_word_of_each(self) -> None:
        classes = typing.get_args(ErrorClass)
        self.assertEqual(len(classes), 14)
        for name in classes:
            self.assertRegex(name, r"\A[A-Z_]+\Z")
            self.assertEqual(str(RigError(name, "it happened")), f"{name} it happened.")

    def test_the_next_step_stands_at_the_end(self) -> None:
        error = RigError("CAPACITY", "no room", "stop_model()")
        self.assertEqual(str(error), "CAPACITY no room. Next: stop_model()")
        self.assertEqual(error.next_step, "stop_model()")

    def test_a_full_stop_is_never_doubled(self) -> None:
        self.assertEqual(str(RigError("INVALID", "why.", "x")), "INVALID why. Next: x")

    def test_it_travels_between_processes_whole(self) -> None:
        error = pickle.loads(pickle.dumps(RigError("BUSY", "what", "then")))
        self.assertEqual((error.error_class, error.what, error.next_step), ("BUSY", "what", "then"))

    def test_a_parameters_refusal_names_it(self) -> None:
        error = invalid_parameter("zone", "must be a zone")
        self.assertEqual(str(error), "INVALID zone: must be a zone; nothing was started.")


class OutcomeTest(unittest.TestCase):
    def test_the_text_begins_with_the_summary_and_ends_with_the_next_step(self) -> None:
        text = outcome_as_text(Example(summary="It runs.", next_step="stop()", state="ready"))
        self.assertEqual(text.split("\n")[0], "It runs.")
        self.assertEqual(text.split("\n")[-1], "Next: stop()")

    def test_every_field_that_says_something_is_in_the_text(self) -> None:
        outcome = Example(
            summary="s",
            state="ready",
            count=0,
            ready=False,
            names=["a", "b"],
            parts=[Part(name="w", size=1.5)],
            sizes={"w": 2.0},
        )
        lines = outcome_as_text(outcome).split("\n")
        # A count of zero and a no are statements; what was never measured is not.
        self.assertEqual(
            lines,
            [
                "s",
                "state: ready",
                "count: 0",
                "ready: False",
                "names:",
                "  - a",
                "  - b",
                "parts:",
                "  - name: w; size: 1.5",
                "sizes:",
                "  w: 2.0",
            ],
        )

    def test_what_is_nested_is_told_in_one_line_without_what_is_empty(self) -> None:
        class Nested(Outcome):
            rows: list[dict[str, Any]]
            load: dict[str, Any]

        rows: list[dict[str, Any]] = [{"a": 1, "b": None, "c": ["x", "y"], "d": {"e": "f"}}]
        text = outcome_as_text(Nested(summary="s", rows=rows, load={"gone": None, "kept": 0}))
        self.assertEqual(
            text.split("\n"), ["s", "rows:", "  - a: 1; c: x, y; d: e: f", "load:", "  kept: 0"]
        )
        nothing = outcome_as_text(Nested(summary="s", rows=[], load={"gone": None}))
        self.assertEqual(nothing, "s")

    def test_what_is_empty_is_left_out(self) -> None:
        lines = outcome_as_text(Example(summary="s")).split("\n")
        self.assertEqual(lines, ["s", "ready: False"])

    def test_a_summary_is_required_and_nothing_unknown_is_taken(self) -> None:
        with self.assertRaises(ValidationError):
            Example()  # type: ignore[call-arg]
        with self.assertRaises(ValidationError):
            Example(summary="s", staet="ready")  # type: ignore[call-arg]

    def test_the_schema_tells_clients_about_both(self) -> None:
        properties = Example.model_json_schema()["properties"]
        self.assertTrue(properties["summary"]["description"])
        self.assertTrue(properties["next_step"]["description"])


if __name__ == "__main__":
    unittest.main()
