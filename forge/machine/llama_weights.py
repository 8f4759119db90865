"""Fetches one GGUF file from the model hub: of one commit, resumed, its size and hash compared.

Speaks the Hub's HTTP interface as huggingface_hub 2.4 does. Knows no model server and no cloud.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from forge.machine.console import (
    HOME,
    MINUTE_S,
    Failure,
    Progress,
    clean,
    stored,
    transient,
    tried,
)
from forge.machine.llama_build import file_hash

HUB = os.environ.get("GEMMA4_HUB_URL", "https://huggingface.co")
MODEL = HOME / "weights/model.gguf"  # under this name whatever the repository calls it
WEIGHT_FORMS = {  # what the document's words about the weights may be
    "repository": r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}",
    "revision": r"([0-9a-f]{40})?",
    "file": r"(\w[\w.-]{0,200}\.gguf)?",
    "sha256": r"([0-9a-f]{64})?",
}
BESIDE = re.compile(r"mmproj|mtp|draft|imatrix", re.I)  # other files than the text model's
SPARE_DISK = 500_000_000  # bytes that stay free
LICENCE = "accept the model's licence on the Hub, and save_hf_token with a token of that account"
HUB_REMEDIES = {401: LICENCE, 403: LICENCE, 404: "check MODEL_NAME and MODEL_REVISION"}


def get_weights(wanted: dict[str, str], token: str, progress: Progress) -> None:
    """The file as MODEL: the one that is there already, or fetched. Raises Failure."""
    folder, record = MODEL.parent, MODEL.with_name("weights.json")
    known = stored(record, {})
    if known.get("wanted") == wanted and MODEL.exists() and MODEL.stat().st_size == known["size"]:
        return progress.tell("done", f"{known['file']} is here already")
    found = found_file(wanted, token)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{found['sha256'][:16]}.part"
    for old in folder.iterdir():
        if old != part:
            old.unlink()
    part.touch()
    size, free = found["size"], shutil.disk_usage(folder).free + part.stat().st_size
    if size + SPARE_DISK > free:
        raise Failure(f"no space: {size / 1e9:.2f} GB of weights, {free / 1e9:.2f} are free")
    url = f"{HUB}/{found['repository']}/resolve/{found['commit']}/{quote(found['file'])}"
    tried(30, lambda: receive(url, token, part, size, progress), transient)
    if part.stat().st_size != size or file_hash(part) != found["sha256"]:
        part.unlink()
        raise Failure(f"{found['file']} came, and is not the file of that size and hash")
    part.rename(MODEL)
    record.write_text(json.dumps({"wanted": wanted, **found}))
    progress.tell("done", f"{found['file']}, {size / 1e9:.2f} GB, of the right hash")


def found_file(wanted: dict[str, str], token: str) -> dict[str, Any]:
    """The one file that is meant: its name, commit, size in bytes and SHA-256, by the Hub's word.

    A hash that the document gives goes before the Hub's. Raises Failure.
    """
    repository = wanted["repository"]
    place = f"{HUB}/api/models/{repository}/revision/{wanted['revision'] or 'main'}?blobs=true"
    try:
        told = json.loads(tried(6, lambda: hub_text(place, token), transient))
        files, commit = {one["rfilename"]: one for one in told["siblings"]}, told["sha"]
    except (ValueError, LookupError, TypeError):
        raise Failure(f"what the Hub says of {repository} cannot be read") from None
    fit = [name for name in files if name.endswith(".gguf") and not BESIDE.search(name)]
    names = [wanted["file"]] if wanted["file"] in files else [] if wanted["file"] else fit
    if len(names) != 1:
        listed = ", ".join(names or files)
        raise Failure(f"{repository} has no one such file ({clean(listed)}): set MODEL_FILE")
    about = files[names[0]]
    size, digest = about.get("size"), wanted["sha256"] or (about.get("lfs") or {}).get("sha256")
    if type(size) is not int or not re.fullmatch("[0-9a-f]{64}", str(digest)):
        raise Failure(f"the Hub tells no size and hash of {names[0]}: set MODEL_SHA256")
    return {"repository": repository, "file": names[0], "commit": commit, "size": size} | {
        "sha256": digest
    }


def receive(url: str, token: str, part: Path, size: int, progress: Progress) -> str:
    """Appends to `part` what it lacks, and tells how far it is every half minute."""
    have = part.stat().st_size
    if have >= size:
        return ""
    link, answer = opened(url, token, have)
    told = time.monotonic()
    with closing(link), part.open("ab") as file:
        if answer.status == 200:  # all of it, whatever was asked for
            file.truncate(0)
            have = 0
        try:
            while have < size and (piece := answer.read(min(1 << 20, size - have))):
                have += file.write(piece)
                if time.monotonic() - told > MINUTE_S / 2:
                    told = time.monotonic()
                    progress.tell("note", f"{have / 1e9:.2f} of {size / 1e9:.2f} GB")
        except (HTTPException, TimeoutError, ConnectionError) as error:
            raise Failure(f"the transfer broke off: {error}", 0) from None
    if have < size:
        raise Failure("the transfer broke off", 0)
    return ""


def hub_text(url: str, token: str) -> str:
    link, answer = opened(url, token)
    try:
        with closing(link):
            return answer.read(8_000_000).decode("utf-8", "replace")
    except (OSError, HTTPException) as error:
        raise Failure(f"no whole answer: {error}", 0) from None


def opened(url: str, token: str, begin: int = 0) -> tuple[HTTPConnection, HTTPResponse]:
    """The connection and an answer from byte `begin` on, redirections followed; the token goes to
    the Hub and to nobody whom it points to. Raises Failure."""
    hub = urlsplit(HUB)
    for _ in range(5):
        parts = urlsplit(url)
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        if token and parts[:2] == hub[:2]:
            headers["Authorization"] = f"Bearer {token}"
        connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        if parts.scheme not in ("https", hub.scheme):
            raise Failure(f"the Hub points to {clean(parts.scheme, 20)}:, without encryption")
        link = connect(parts.netloc, timeout=60)
        try:
            link.request("GET", urlunsplit(("", "", *parts[2:])), headers=headers)
            answer = link.getresponse()
        except (OSError, HTTPException) as error:
            link.close()
            raise Failure(f"no answer from {parts.netloc}: {error}", 0) from None
        if answer.status in (200, 206):
            return link, answer
        link.close()
        target, remedy = answer.headers.get("Location"), HUB_REMEDIES.get(answer.status, "")
        if not 300 < answer.status < 400 or not target:
            words = f"{parts.netloc} answers {answer.status} {clean(answer.reason, 80)}"
            raise Failure(f"{words}. Remedy: {remedy}" if remedy else words, answer.status)
        url = urljoin(url, target)
    raise Failure("the Hub points from one address to the next without end")
