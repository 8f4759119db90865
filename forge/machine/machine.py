"""A machine as its program sees it: the cloud that rented it out, the server that it is there for.

The two meet in these protocols and in the boot document, one JSON object that is checked here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forge.machine.console import HOME, ROOT, Failure, Progress, run

Document = dict[str, Any]
DOCUMENT = HOME / "document.json"  # that of the latest boot, checked
LOCAL = r"http://127\.0\.0\.1:\d+/[\w/.?=&%:-]*"
FORMS = {  # what the strings of every document may be
    "rig": r"[a-z0-9_-]{1,63}",
    "health": LOCAL,
    "metrics": LOCAL,
    "secret": r"[\w-]{0,255}",
    "folder": r"/var/lib/gemma4/[\w-]+(/[\w-]+)*",
    "bucket": r"([a-z0-9][a-z0-9._-]{1,221})?",
}


class Cloud(Protocol):
    """Who rented the machine out. Every verb may raise Failure, with the remedy where there is one.

    `forms` are those of its documents' further strings, `acts` its own words. `boots_again`: its
    agent runs this program at every start. `check` sees whether the machine is what the document is
    for, before anything is fetched. `token` is the named secret's payload, in `seen_secrets` by
    then; empty where none is named. `copy_cache` brings the document's `folder` from the bucket
    ("restore") or there ("save"), where one is named, and only notes what fails. `leave` asks the
    provider to delete the machine, where a shutdown does not.
    """

    forms: Mapping[str, str]
    acts: Sequence[str]
    boots_again: bool

    def document(self) -> str: ...
    def check(self, document: Document, progress: Progress) -> None: ...
    def token(self, document: Document) -> str: ...
    def copy_cache(self, document: Document, way: str, progress: Progress) -> None: ...
    def act(self, word: str) -> str: ...
    def leave(self, document: Document) -> None: ...


class Serving(Protocol):
    """The model server. Every verb may raise Failure.

    `kind` is its name in a status: container or server. `forms` as a cloud's; `acts` are logs,
    start, stop, restart, rm and maybe more. A boot of more than `ready_minutes` has failed. `rules`
    tells by key whether the rest of a document holds; it may add to it, and raise what reading a
    wrong one raises. `get` has the server of this document running, `follow` marks what it tells
    until it is ready, that too. `act` is given `lines` of a log and `limit` in bytes. `status` has
    state, exit_code, restarts, started_at; None where nothing is there.
    """

    kind: str
    forms: Mapping[str, str]
    acts: Sequence[str]
    ready_minutes: int

    def rules(self, document: Document) -> Mapping[str, object]: ...
    def get(self, document: Document, progress: Progress) -> None: ...
    def follow(self, document: Document, progress: Progress) -> None: ...
    def act(self, word: str, document: Document, given: Mapping[str, int]) -> str: ...
    def status(self, document: Document) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class Machine:
    """The two of them, and the phase that a boot begins with."""

    cloud: Cloud
    serving: Serving
    first: str


def checked(text: str, machine: Machine) -> Document:
    """The boot document. Raises Failure with the first field that is not as it has to be."""
    forms = {**FORMS, **machine.cloud.forms, **machine.serving.forms}
    try:
        document: Document = json.loads(text)
        for key in ("folder", "bucket"):
            document[key] = document["cache"][key]
        served = machine.serving.rules(document)
        rules = {
            "v": document["v"] == 1,
            **{k: re.fullmatch(form, document[k], re.ASCII) for k, form in forms.items()},
            **served,
            "used": all(isinstance(metric, str) for metric in document["used"]),
        }
        for key, least in (("idle_minutes", 0), ("life_s", 1)):
            rules[key] = type(document[key]) is int and least <= document[key] <= 10**6
    except (ValueError, TypeError, LookupError, AttributeError, re.error) as error:
        raise Failure(f"the boot document is not valid: {type(error).__name__}: {error}") from None
    for key, holds in rules.items():
        if not holds:
            raise Failure(f"the boot document is not valid: {key}")
    return document


def copy_by(
    document: Document, way: str, progress: Progress, scheme: str, program: Sequence[str]
) -> None:
    """Cloud.copy_cache by a program that takes the two ends as its last arguments."""
    if not document["bucket"]:
        return
    near = ROOT / document["folder"][1:]
    far = f"{scheme}://{document['bucket']}/{document['rig']}"
    ends = (far, str(near)) if way == "restore" else (str(near), far)
    try:
        near.mkdir(parents=True, exist_ok=True)
        run(*program, *ends, minutes=10)
        progress.tell("note", f"cache {way}d: {far}")
    except (Failure, OSError) as error:
        progress.tell("note", f"cache not {way}d: {far}: {error}")
