"""Runs one unittest module and writes down what became of each test: the child of tests/run.py.

    python3 one_module.py MODULE RESULTS.json
    python3 one_module.py MODULE.CLASS,MODULE.CLASS RESULTS.json

The module is imported from the working folder. Needs nothing but the standard library, because it
also runs the rigs' suites on Pythons that have a server's packages and no more.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import unittest
from pathlib import Path
from typing import Any

_REASON_LIMIT = 600  # characters
_UNITTEST = f"{os.sep}unittest{os.sep}"


class Recorder(unittest.TextTestResult):
    """Keeps, beside the text, each test's outcome (passed, failed, skipped), seconds and reason.

    A test with several failed subtests counts once; a skipped subtest counts for itself.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.records: dict[str, dict[str, Any]] = {}
        self._begun = time.monotonic()

    def _record(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        known = self.records.get(test.id())
        if known is None or known["outcome"] != "failed":
            self.records[test.id()] = {"outcome": outcome, "seconds": 0.0, "reason": reason}

    def startTest(self, test: unittest.TestCase) -> None:
        self._begun = time.monotonic()
        super().startTest(test)

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        if test.id() in self.records:
            self.records[test.id()]["seconds"] = round(time.monotonic() - self._begun, 3)

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._record(test, "passed")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._record(test, "failed", _last_line(err))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._record(test, "failed", _last_line(err))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._record(test, "skipped", reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._record(test, "passed")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        super().addUnexpectedSuccess(test)
        self._record(test, "failed")

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._record(test, "failed", _last_line(err))


def _last_line(err: Any) -> str:
    """What an exception says, in one line, and where it was raised: the report ends with it."""
    error = err[1]
    while nested := getattr(error, "exceptions", None):  # a task group's words name none of its own
        error = nested[0]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _UNITTEST not in f.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    return " ".join(f"{place}{type(error).__name__}: {error}".split())[:_REASON_LIMIT]


def main(names: str, results: Path) -> int:
    """Run what `names` (by comma) name, write the records; 0 if no test failed and one ran."""
    sys.path[0] = os.getcwd()  # instead of this file's folder
    suite = unittest.defaultTestLoader.loadTestsFromNames(names.split(","))
    runner = unittest.TextTestRunner(resultclass=Recorder, verbosity=2)
    result = runner.run(suite)
    assert isinstance(result, Recorder)
    results.write_text(json.dumps(result.records), encoding="utf-8")
    return 0 if result.records and result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
