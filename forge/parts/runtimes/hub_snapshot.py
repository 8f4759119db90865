"""A checkpoint from the Hugging Face Hub: safetensors, tokenizer and configuration, no pickles.

Knows the Hub and its local cache, and no model server.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.planes.plane import Room
from forge.parts.runtimes.runtime import Need, PhaseReport


def hub_token_need() -> Need:
    """Whether a Hugging Face token is at hand. Its value is looked at by nobody."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    present = bool(os.environ.get("HF_TOKEN")) or os.path.exists(os.path.join(home, "token"))
    return Need(
        "credential for the Hugging Face Hub",
        present,
        "there" if present else "none; get one with: hf auth login",
        only_for="gated models",
    )


def cached_snapshot(repository: str) -> Path | None:
    """The newest snapshot of `repository` in the Hub's local cache, whole or not; None if none."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    root = cache / f"models--{repository.replace('/', '--')}"
    if any(root.glob("blobs/*.incomplete")):
        return None
    snapshots = sorted(root.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
    return snapshots[-1] if snapshots else None


def download_snapshot(repository: str, room: Room, report: PhaseReport) -> Path:
    """Download the safetensors, tokenizer and configuration of `repository`; returns the folder.

    Sizes are asked first, so that a full disk is refused and not met; pickles are never fetched.
    A download that was broken off goes on where it stopped. Raises RigError.
    """
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
    try:
        info = HfApi().model_info(repository, files_metadata=True, timeout=30)
        sizes = [s.size or 0 for s in info.siblings or [] if s.rfilename.endswith(".safetensors")]
        if not sizes:
            raise RigError("DENIED", f"{repository} offers no safetensors, and others are refused")
        if sum(sizes) > room.disk_free:
            raise RigError(
                "CAPACITY",
                f"{repository} takes {sum(sizes) / 1e9:.2f} GB of disk, "
                f"and {room.disk_free / 1e9:.2f} GB are free",
                "free some disk space, or set HF_HOME to a larger disk",
            )
        report(0.1, f"downloading {sum(sizes) / 1e9:.2f} GB of {repository}")
        return Path(snapshot_download(repository, revision=info.sha, allow_patterns=wanted))
    except GatedRepoError:
        raise RigError(
            "AUTH",
            f"{repository} is gated",
            "accept its licence on the Hub, then run: hf auth login",
        ) from None
    except RepositoryNotFoundError:
        raise RigError(
            "NOT_FOUND", f"the Hub has no {repository}, or it is private", "check MODEL_NAME"
        ) from None
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
            "check the network, or serve a local folder (MODEL_NAME=/path) or MODEL_NAME=embedded",
        ) from None
