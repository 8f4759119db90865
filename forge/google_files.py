"""What a rig on Google Cloud ships besides: init.sh, and first_hour.md filled in with its words.

Knows the two planes and the values of a rig's tpu.env.
"""

from __future__ import annotations

from pathlib import Path

from dotenv import dotenv_values

from forge.naming import parse_rig_name
from forge.parts.assembly.rig import Rig
from forge.parts.planes.capacity_plane import RentalMarket, listed
from forge.parts.planes.cloud_tpu import CloudTpu
from forge.parts.planes.compute_catalogue import compute_price
from forge.parts.planes.compute_engine import ComputeEngine
from forge.parts.planes.compute_order import ComputeEngineSettings
from forge.parts.planes.tpu_catalogue import tpu_price
from forge.parts.planes.tpu_order import CloudTpuSettings

_FORGE = Path(__file__).resolve().parent
_HOURS = 1.25
_LIMIT_USD = 2
_DESCRIBE = "gcloud alpha compute tpus queued-resources describe NAME --zone={zone}"
_SSH = "gcloud alpha compute tpus tpu-vm ssh NAME --zone={zone} --tunnel-through-iap"


def google_files(rig: Rig, settings_file: Path) -> dict[str, str]:
    """The files by name; none for a rig on another plane. `settings_file` is its tpu.env."""
    if not issubclass(rig.settings, ComputeEngineSettings | CloudTpuSettings):
        return {}
    values = {key: value or "" for key, value in dotenv_values(settings_file).items()}
    words = first_hour_words(rig, values)
    text = (_FORGE / _first_hour(rig)).read_text(encoding="utf-8")
    script = (_FORGE / "programs" / "init.sh").read_text(encoding="utf-8")
    return {"first_hour.md": text.format_map(words), "init.sh": script}


def _first_hour(rig: Rig) -> str:
    """The file that the script of the first hour is made from: by what serves on the machine."""
    return "first_hour_jax.md" if _runtime(rig) == "jax" else "first_hour_google.md"


def _runtime(rig: Rig) -> str:
    return parse_rig_name(rig.name).runtime


def first_hour_words(rig: Rig, values: dict[str, str]) -> dict[str, str]:
    """What differs between the rigs in the script of the first hour. `values`: their tpu.env's."""
    compute = issubclass(rig.settings, ComputeEngineSettings)
    zone, market = listed(values["ZONES"])[0], _market(listed(values["MARKETS"])[0])
    if compute:
        price, source = compute_price(values["CHIP"], values["MACHINE_TYPE"], zone, market)
    else:
        price, source = tpu_price(values["CHIP"], values["ACCELERATOR_TYPE"], zone, market)
    if price is None or price * _HOURS > _LIMIT_USD:
        raise ValueError(f"{rig.name}: {_HOURS} h in {zone} are not within {_LIMIT_USD} USD")
    plane = ComputeEngine.vocabulary if compute else CloudTpu.vocabulary
    return {
        "rig": rig.name,
        "machine": f"a TPU {values['CHIP']}",
        "hardware": parse_rig_name(rig.name).hardware,
        "zone": zone,
        "market": market,
        "price": f"{price:.2f}",
        "price_source": source,
        "hours": f"{_HOURS:g}",
        "minutes": f"{_HOURS * 60:.0f}",
        "limit_usd": str(_LIMIT_USD),
        "find": f"find_{plane['hardware']}",
        "list": f"list_{plane['rental']}s",
        "config": f"get_{_runtime(rig)}_deployment_config",
        "boot_log": f"$CALL get_{plane['console']}",
        **(_compute_words(zone) if compute else _tpu_words(zone)),
    }


def _compute_words(zone: str) -> dict[str, str]:
    instances = "gcloud compute instances"
    return {
        "boot_source": "They come through the serial port.",
        "gcloud_describe": f"{instances} describe NAME --zone={zone}",
        "gcloud_ssh": f"gcloud compute ssh NAME --zone={zone} --tunnel-through-iap",
        "gcloud_left": f"{instances} list --filter=labels.managed-by=gemma4-rigs; "
        "gcloud compute disks list --filter=description~gemma4-rigs",
        "gcloud_delete": f"{instances} delete NAME --zone={zone}",
        "idle_question": "is a stopped machine's disk billed on, and its chip not?",
    }


def _tpu_words(zone: str) -> dict[str, str]:
    queued = "gcloud compute tpus queued-resources"
    return {
        "boot_source": "They come over ssh: a TPU node has no serial port to read.",
        "gcloud_describe": _DESCRIBE.format(zone=zone),
        "gcloud_ssh": _SSH.format(zone=zone),
        "gcloud_left": f"{queued} list --zone={zone}; "
        f"gcloud compute tpus tpu-vm list --zone={zone}",
        "gcloud_delete": f"{queued} delete NAME --zone={zone} --force",
        "idle_question": "is a node that was shut down from within billed on?",
    }


def _market(word: str) -> RentalMarket:
    known: tuple[RentalMarket, ...] = ("flex-start", "spot", "on-demand", "reserved")
    for market in known:
        if market == word:
            return market
    raise ValueError(f"{word} is no way of renting")
