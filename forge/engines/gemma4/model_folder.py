"""Finds the files of a model folder and reads its small JSON files.

Knows no key, no tensor and no tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

from forge.engines.gemma4.refusal import ModelRefused

_FOLDER_JSON_LIMIT = 64_000_000  # bytes; an index of the largest size has about 100 kB


def model_file(folder: Path, name: str) -> Path:
    """The real path of the file `name` in `folder`.

    A link may stay in the folder, or lead where Hugging Face's cache keeps what its snapshots link
    to: from `<repo>/snapshots/<revision>/NAME` to `<repo>/blobs/`. Any other way out is refused, so
    that a folder from elsewhere cannot bring a file of this computer into the model.
    Raises ModelRefused for a missing file, another link and what is no plain file.
    """
    try:
        if not (folder / name).exists():
            raise ModelRefused(f"{folder} has no {name[:200]}")
        here, real = folder.resolve(), (folder / name).resolve()
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise ModelRefused(f"{folder}: {name[:200]!r} cannot be read: {error.strerror}") from None
    allowed = [here]
    if here.parent.name == "snapshots":
        allowed.append(here.parent.parent / "blobs")
    if real.parent not in allowed:
        raise ModelRefused(f"{folder / name} leads out of the folder, to {real}")
    if not real.is_file():
        raise ModelRefused(f"{folder / name} is no plain file")
    return real


def has_model_file(folder: Path, name: str) -> bool:
    """Whether there is a `name` in `folder`, be it a good one or not."""
    return (folder / name).is_symlink() or (folder / name).exists()


def folder_json(folder: Path, name: str) -> dict[str, object]:
    """The JSON object in the file `name` of `folder`.

    Raises ModelRefused where it cannot be read, is no object or names a key twice.
    """
    path = model_file(folder, name)
    try:
        size = path.stat().st_size
        if size > _FOLDER_JSON_LIMIT:
            raise ModelRefused(f"{folder / name} has {size} bytes: no settings file is so large")
        return json_object(path.read_bytes(), str(folder / name))
    except OSError as error:
        raise ModelRefused(f"{folder / name} cannot be read: {error.strerror}") from None


def json_object(text: bytes, where: str) -> dict[str, object]:
    """`text` as a JSON object; ModelRefused that names `where` otherwise."""

    def checked_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
        read = dict(pairs)
        if len(read) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ModelRefused(f"{where} names {twice[:80]!r} twice")
        return read

    try:
        read = json.loads(text, object_pairs_hook=checked_pairs)
    except (ValueError, RecursionError):  # ValueError: also bytes that are no UTF-8
        raise ModelRefused(f"{where} is no JSON") from None
    if not isinstance(read, dict):
        raise ModelRefused(f"{where} is no JSON object")
    return read
