"""What renting an accelerator costs, per provider, region and way of renting, with dates.

Knows no budgets and no live catalogue: prices move, and an estimate must name the date it used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge.parts.knowledge.figures import Figure

Provisioning = Literal["on-demand", "spot", "flex-start"]


@dataclass(frozen=True, slots=True)
class Price:
    """One price: `rate` in USD per hour for one `machine` in `region`.

    provider: google, aws or digitalocean. machine: a machine type, or "chip" where the price is
    per chip, or "gpu only" where the container's CPU and memory are billed on top.
    provisioning: how it was rented, that is, how the provider may take it back.
    """

    chip: str
    provider: str
    machine: str
    region: str
    provisioning: Provisioning
    rate: Figure


def _google_chip(
    chip: str,
    region: str,
    provisioning: Provisioning,
    rate: float,
    source: str,
    date: str,
    note: str = "",
) -> Price:
    figure = Figure(rate, "USD/h", source, date, note=note)
    return Price(chip, "google", "chip", region, provisioning, figure)


def _aws_machine(
    chip: str,
    machine: str,
    region: str,
    provisioning: Provisioning,
    rate: float,
    source: str,
    date: str,
    note: str = "",
) -> Price:
    figure = Figure(rate, "USD/h", source, date, note=note)
    return Price(chip, "aws", machine, region, provisioning, figure)


_SKY_GCP = "SkyPilot catalogue v8, gcp (version 006059e)"
_SKY_AWS = "SkyPilot catalogue v7, aws (version 001367d)"
_SKY_AWS_8 = "SkyPilot catalogue v8, aws (version 00148f2)"
_FLEX_V5E = "two public repositories quoting Google's published rate"
_FLEX_V6E = "Google's DWS prices, quoted by dev.to, Self-Hosted Gemma 4 on TPU v6e"
_RUN_L4 = "Cloud Run price table, as quoted in public"
_RIGS_README = "xbill9/gemma4-dev, README"
_AWS_QUOTED = "AWS price, as several public repositories quote it"
_DO_LIST = "DigitalOcean API list price"
_RECALLED = "vendor price, as recalled; not checked against a live page"
_READ_ON = "2026-11-29"  # the day a figure without a date of its own was taken down

PRICES: tuple[Price, ...] = (
    _google_chip("v5e", "us-central1", "on-demand", 1.20, _SKY_GCP, "2026"),
    _google_chip("v5e", "us-central1", "spot", 0.245, _SKY_GCP, "2026"),
    _google_chip("v5e", "us-central1", "flex-start", 0.60, _FLEX_V5E, "2026"),
    _google_chip("v5e", "us-west1", "on-demand", 1.20, _SKY_GCP, "2026"),
    _google_chip("v5e", "us-west1", "spot", 0.245, _SKY_GCP, "2026"),
    _google_chip("v5e", "us-west1", "flex-start", 0.60, _FLEX_V5E, "2026"),
    _google_chip("v5e", "us-west4", "on-demand", 1.20, _SKY_GCP, "2026"),
    _google_chip(
        "v5e", "us-west4", "spot", 0.48, _SKY_GCP, "2026", "gemma4-dev: 0.5779 in 2026-08"
    ),
    _google_chip("v5e", "us-west4", "flex-start", 0.60, _FLEX_V5E, "2026"),
    _google_chip("v5e", "us-south1", "on-demand", 1.416, _SKY_GCP, "2026"),
    _google_chip("v5e", "us-south1", "spot", 0.566, _SKY_GCP, "2026"),
    _google_chip("v5e", "europe-west4", "on-demand", 1.56, _SKY_GCP, "2026"),
    _google_chip("v5e", "europe-west4", "spot", 0.445, _SKY_GCP, "2026"),
    _google_chip("v5p", "unstated", "on-demand", 4.20, _RECALLED, _READ_ON),
    _google_chip("v6e", "us-central1", "on-demand", 2.70, _SKY_GCP, "2026"),
    _google_chip("v6e", "us-central1", "spot", 0.544, _SKY_GCP, "2026"),
    _google_chip("v6e", "us-east1", "on-demand", 2.70, _SKY_GCP, "2026"),
    _google_chip("v6e", "us-east1", "spot", 0.544, _SKY_GCP, "2026"),
    _google_chip("v6e", "us-east1", "flex-start", 1.35, _FLEX_V6E, "2026-07-25"),
    _google_chip("v6e", "us-east5", "on-demand", 2.70, _SKY_GCP, "2026"),
    _google_chip(
        "v6e", "us-east5", "spot", 1.215, _SKY_GCP, "2026", "gemma4-dev: 1.4033 in 2026-08"
    ),
    _google_chip("v6e", "us-east5", "flex-start", 1.35, _FLEX_V6E, "2026-07-25"),
    _google_chip("v6e", "europe-west4", "on-demand", 2.97, _SKY_GCP, "2026"),
    _google_chip(
        "v6e", "europe-west4", "spot", 1.037, _SKY_GCP, "2026", "gemma4-dev: 1.782 in 2026-08"
    ),
    _google_chip("v6e", "europe-west4", "flex-start", 1.35, _FLEX_V6E, "2026-07-25"),
    _google_chip("v6e", "asia-northeast1", "on-demand", 3.24, _SKY_GCP, "2026"),
    _google_chip("v6e", "asia-northeast1", "spot", 0.944, _SKY_GCP, "2026"),
    _google_chip("v6e", "asia-northeast1", "flex-start", 1.35, _FLEX_V6E, "2026-07-25"),
    Price(
        "l4",
        "google",
        "gpu only",
        "us-east4",
        "on-demand",
        Figure(
            0.672,
            "USD/h",
            _RUN_L4,
            "2026-08",
            note="Cloud Run without zonal redundancy (1.047 with); 8 vCPU and 32 GiB add 0.75",
        ),
    ),
    _aws_machine("l4", "g6.xlarge", "us-east-1", "on-demand", 0.8048, _SKY_AWS, "2026"),
    _aws_machine("l4", "g6.xlarge", "us-east-1", "spot", 0.42, _SKY_AWS, "2026", "0.39 to 0.42"),
    _aws_machine("l4", "g6.xlarge", "us-east-2", "on-demand", 0.8048, _SKY_AWS, "2026"),
    _aws_machine("l4", "g6.xlarge", "us-east-2", "spot", 0.32, _SKY_AWS, "2026", "0.30 to 0.32"),
    _aws_machine("l4", "g6.xlarge", "us-west-2", "on-demand", 0.8048, _SKY_AWS, "2026"),
    _aws_machine("t4", "g4dn.xlarge", "us-east-1", "on-demand", 0.526, _AWS_QUOTED, "2026"),
    _aws_machine(
        "t4", "g4dn", "us-east-1", "spot", 0.3678, _RIGS_README, "2026-08", "average; size unstated"
    ),
    _aws_machine("t4g", "g5g.xlarge", "us-east-1", "on-demand", 0.42, _SKY_AWS_8, "2026-11-30"),
    _aws_machine("t4g", "g5g.xlarge", "us-west-2", "on-demand", 0.42, _SKY_AWS_8, "2026-11-30"),
    _aws_machine("t4g", "g5g.2xlarge", "us-east-1", "on-demand", 0.556, _SKY_AWS, "2026"),
    _aws_machine("t4g", "g5g.2xlarge", "us-west-2", "on-demand", 0.556, _SKY_AWS_8, "2026-11-30"),
    _aws_machine("t4g", "g5g.2xlarge", "us-east-1", "spot", 0.31, _SKY_AWS, "2026", "0.18 to 0.31"),
    _aws_machine(
        "t4g", "g5g", "us-east-1", "spot", 0.3996, _RIGS_README, "2026-08", "average; size unstated"
    ),
    _aws_machine("inf2", "inf2.xlarge", "us-east-1", "on-demand", 0.7582, _AWS_QUOTED, "2026"),
    _aws_machine(
        "inf2", "inf2.xlarge", "us-east-1", "spot", 0.1417, _RIGS_README, "2026-08", "average"
    ),
    _aws_machine("a10g", "g5.xlarge", "us-east-1", "on-demand", 1.006, _RECALLED, _READ_ON),
    Price(
        "mi300x",
        "digitalocean",
        "gpu-mi300x1-192gb",
        "atl1",
        "on-demand",
        Figure(
            2.59,
            "USD/h",
            _DO_LIST,
            "2026-10-08",
            note="1.99 was quoted for AMD Developer Cloud; often offered in no region",
        ),
    ),
)


def prices_for(
    chip: str, *, region: str | None = None, provisioning: Provisioning | None = None
) -> tuple[Price, ...]:
    """The rows for a chip, narrowed by what is given; empty when nothing is known."""
    return tuple(
        price
        for price in PRICES
        if price.chip == chip
        and region in (None, price.region)
        and provisioning in (None, price.provisioning)
    )
