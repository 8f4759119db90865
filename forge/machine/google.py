"""A machine of Google Cloud: its metadata server, its secret, its bucket, its own deletion.

Knows no model server.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Mapping, Sequence

from forge.machine.console import (
    MINUTE_S,
    Failure,
    Progress,
    ask,
    mark,
    seen_secrets,
    transient,
    tried,
)
from forge.machine.machine import LOCAL, Document, copy_by

SECRETS = os.environ.get("GEMMA4_SECRETS_URL", "https://secretmanager.googleapis.com")
METADATA_HOST = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
REMEDIES = {  # for what Secret Manager answers
    403: "let the machine's service account read it (roles/secretmanager.secretAccessor on this "
    "secret; the machine needs the scope cloud-platform)",
    404: "save_hf_token makes the secret and its version",
}


class Google:
    """Its start-up agent runs this program at each start, with the document in the metadata."""

    forms: Mapping[str, str] = {
        "project": r"[a-z][a-z0-9:.-]{1,62}",
        # The machine's own credentials go there: to Google, or to this computer in tests.
        "leave": rf"|https://(compute|tpu|www)\.googleapis\.com/[\w/.?=&%:-]+|{LOCAL}",
    }
    acts: Sequence[str] = ()
    boots_again = True

    def document(self) -> str:
        return tried(30, lambda: metadata("attributes/gemma4-boot"), transient)

    def check(self, document: Document, progress: Progress) -> None:
        """Nothing: the container finds the chip or says that it does not."""

    def token(self, document: Document) -> str:
        secret, project = document["secret"], document["project"]
        if not secret:
            return ""
        url = f"{SECRETS}/v1/projects/{project}/secrets/{secret}/versions/latest:access"
        try:
            answer = json.loads(tried(6, lambda: as_the_machine(url), transient))
            token = base64.b64decode(answer["payload"]["data"]).decode("ascii").strip()
        except Failure as failure:
            remedy = REMEDIES.get(failure.code, "see to it and start the container")
            raise Failure(f"secret {secret} of {project}: {failure}. Remedy: {remedy}") from None
        except (ValueError, LookupError, TypeError):
            token = ""
        if not re.fullmatch(r"[!-~]+", token):
            raise Failure(f"secret {secret} of {project} does not hold one plain word")
        seen_secrets.add(token)
        return token

    def copy_cache(self, document: Document, way: str, progress: Progress) -> None:
        program = ("gcloud", "storage", "rsync", "--recursive")
        copy_by(document, way, progress, "gs", program)

    def act(self, word: str) -> str:
        raise Failure(f"no such act: {word}")

    def leave(self, document: Document) -> None:
        if not document.get("leave"):
            return
        try:
            as_the_machine(document["leave"], "DELETE")
            mark("idle", "done", "the provider deletes this machine")
            time.sleep(10 * MINUTE_S)
        except Failure as failure:
            mark("idle", "note", f"the provider does not delete this machine: {failure}")


def metadata(path: str) -> str:
    """A value that the metadata server has for this machine."""
    url = f"http://{METADATA_HOST}/computeMetadata/v1/instance/{path}"
    try:
        return ask(url, **{"Metadata-Flavor": "Google"})
    except Failure as failure:
        raise Failure(f"metadata {path}: {failure}", failure.code) from None


def as_the_machine(url: str, method: str = "GET") -> str:
    """A request to Google in the name of the machine's service account."""
    try:
        token = str(json.loads(metadata("service-accounts/default/token"))["access_token"])
    except Failure as failure:
        if failure.code != 404:
            raise
        raise Failure("this machine has no service account: create it with one") from None
    seen_secrets.add(token)
    return ask(url, method, Authorization=f"Bearer {token}")
