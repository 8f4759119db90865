"""A GGUF file from the Hugging Face Hub: the text model's, one file out of a repository.

Knows the Hub and its local cache, and no model server.
"""

from __future__ import annotations

import errno
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.planes.plane import Room
from forge.parts.runtimes.hub_snapshot import cached_snapshot
from forge.parts.runtimes.runtime import Need, PhaseReport


def hub_package_need() -> Need:
    """Whether the package that speaks to the Hub is there."""
    present = importlib.util.find_spec("huggingface_hub") is not None
    return Need(
        "package huggingface_hub",
        present,
        "there" if present else "not installed",
        "run `python3 launch.py install` in the rig's folder and start this MCP server anew",
        only_for="models by their Hub id",
    )


def text_model_of(repository: str, names: Sequence[str]) -> str:
    """The one file of `names` that is the text model. Raises RigError INVALID where none is.

    A projector for pictures and sound (mmproj) and a draft model for guessing ahead (mtp, draft)
    are other files of such a repository.
    """
    beside = ("mmproj", "mtp", "draft", "imatrix")
    models = [
        name
        for name in sorted(names)
        if name.endswith(".gguf") and not any(word in name.lower() for word in beside)
    ]
    if len(models) == 1:
        return models[0]
    listed = ", ".join(models[:6]) or "none"
    raise RigError(
        "INVALID",
        f"{repository} has {len(models)} GGUF files that could be the model ({listed})",
        "download the one that you want and set MODEL_NAME to its absolute path",
    )


def cached_gguf(repository: str) -> Path | None:
    """The text model's file in the Hub's local cache; None if it is not there or not whole yet."""
    snapshot = cached_snapshot(repository)
    names = [path.name for path in snapshot.glob("*.gguf")] if snapshot is not None else []
    if snapshot is None or not names:
        return None
    path = snapshot / text_model_of(repository, names)
    return path if path.is_file() else None


def download_gguf(repository: str, room: Room, report: PhaseReport) -> Path:
    """Download the text model's file of `repository`; returns its path in the Hub's local cache.

    Its size is asked first, so that a full disk is refused and not met. A download that was broken
    off goes on where it stopped. Raises RigError.
    """
    if not hub_package_need().present:
        need = hub_package_need()
        raise RigError("NOT_FOUND", "huggingface_hub is not installed here", need.remedy)
    import httpx2
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(repository, files_metadata=True, timeout=30)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        name = text_model_of(repository, list(sizes))
        if sizes[name] > room.disk_free:
            raise RigError(
                "CAPACITY",
                f"{name} takes {sizes[name] / 1e9:.2f} GB of disk, "
                f"and {room.disk_free / 1e9:.2f} GB are free",
                "free some disk space, or set HF_HOME to a larger disk",
            )
        report(0.1, f"downloading {name} ({sizes[name] / 1e9:.2f} GB)")
        return Path(hf_hub_download(repository, name, revision=info.sha))
    except GatedRepoError:
        step = "accept its licence on the Hub, then run: hf auth login"
        raise RigError("AUTH", f"{repository} is gated", step) from None
    except RepositoryNotFoundError:
        what = f"the Hub has no {repository}, or it is private"
        raise RigError("NOT_FOUND", what, "check MODEL_NAME") from None
    except (httpx2.HTTPError, HfHubHTTPError, OSError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RigError(
                "CAPACITY",
                f"the disk was full before all of {repository} came",
                "free some disk space, or set HF_HOME to a larger disk; it resumes there",
            ) from None
        raise RigError(
            "UNREACHABLE",
            f"the Hub could not be read: {type(error).__name__}",
            "check the network, or serve a local file (MODEL_NAME=/path.gguf) or "
            "MODEL_NAME=embedded",
        ) from None
