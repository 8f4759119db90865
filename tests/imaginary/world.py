"""The imaginary provider: a cloud in one JSON file, shared by every process that opens it.

Its faults have their side effects: a create that times out has created. Knows nothing of rigs.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROJECT = "imaginary-project"


class ProviderError(Exception):
    """What the provider's client library would raise: an HTTP status, or 0 when nothing came."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message


def new_world(path: Path, *, hard_stop: bool = True) -> ImaginaryWorld:
    """A world with three zones in two regions, a machine free in each, and nothing rented."""
    zones = {
        "us-east5-b": {"price": 1.2, "stock": 1, "quota": [1, 0], "readable": True},
        "us-east5-c": {"price": 1.5, "stock": 1, "quota": [1, 0], "readable": True},
        "europe-west4-a": {"price": None, "stock": 1, "quota": [1, 0], "readable": True},
    }
    empty: dict[str, Any] = {
        "zones": zones,
        "rentals": [],
        "calls": [],
        "faults": {},
        "next_id": 4001,
        "hard_stop": hard_stop,
    }
    path.write_text(json.dumps(empty))
    return ImaginaryWorld(path)


class ImaginaryWorld:
    """The provider's side. Every method is one call, atomic across processes.

    `faults["create"]` is one of: timeout before, timeout after, error after, refused after, denied,
    expired, garbled. `faults["delete"]`: kept, stopping, timeout after, denied.
    `faults["show_after_s"]`: a new machine is invisible to reads for so many seconds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """The world as a value; what it is at the end is what it becomes."""
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            world = json.load(file)
            try:
                yield world
            finally:
                file.seek(0)
                file.truncate()
                json.dump(world, file)

    def look(self) -> dict[str, Any]:
        """The world as it is now."""
        with self.changing() as world:
            return dict(world)

    def machines(self) -> list[dict[str, Any]]:
        """What is rented, all kinds, as the provider's own books have it."""
        return list(self.look()["rentals"])

    def calls(self, verb: str) -> list[dict[str, Any]]:
        """The mutating calls that reached the provider: verb, name, zone, id."""
        return [call for call in self.look()["calls"] if call["verb"] == verb]

    def set_fault(self, verb: str, fault: Any) -> None:
        with self.changing() as world:
            world["faults"][verb] = fault

    def set_zone(self, zone: str, **values: Any) -> None:
        with self.changing() as world:
            world["zones"][zone].update(values)

    def add(self, name: str, zone: str, labels: dict[str, str], **values: Any) -> str:
        """Somebody rents something behind the rig's back; returns its id."""
        with self.changing() as world:
            return _add(world, name, zone, labels, **values)

    def recreate(self, name: str, zone: str) -> str:
        """Somebody replaces a machine by another of the same name and labels; returns its id."""
        with self.changing() as world:
            old = next(r for r in world["rentals"] if (r["name"], r["zone"]) == (name, zone))
            world["rentals"].remove(old)
            return _add(world, name, zone, old["labels"])

    # The provider's interface

    def offers(self) -> dict[str, dict[str, Any]]:
        return dict(self.look()["zones"])

    def create(self, name: str, zone: str, labels: dict[str, str], life_s: int) -> None:
        with self.changing() as world:
            world["calls"].append(
                {"verb": "create", "name": name, "zone": zone, "labels": labels, "life_s": life_s}
            )
            fault = world["faults"].get("create", "")
            known = {"denied": 403, "expired": 401, "timeout before": 0}
            if fault in known:
                raise ProviderError(known[fault], f"create: {fault}")
            if any((r["name"], r["zone"]) == (name, zone) for r in world["rentals"]):
                raise ProviderError(409, f"{name} already exists")
            if world["zones"][zone]["stock"] < 1:
                raise ProviderError(503, f"no capacity in {zone}")
            world["zones"][zone]["stock"] -= 1
            _add(world, name, zone, labels)
            known = {"timeout after": 0, "error after": 500, "refused after": 503}
            if fault in known:
                raise ProviderError(known[fault], f"create: {fault}")

    def get(self, name: str, zone: str) -> dict[str, Any]:
        for rental in self.list_zone(zone):
            if rental["name"] == name:
                return rental
        raise ProviderError(404, f"{name} not found in {zone}")

    def list_zone(self, zone: str) -> list[dict[str, Any]]:
        world = self.look()
        if not world["zones"].get(zone, {"readable": True})["readable"]:
            raise ProviderError(0, f"{zone} does not answer")
        now = datetime.now(UTC).timestamp()
        hidden = float(world["faults"].get("show_after_s", 0))
        return [
            rental
            for rental in world["rentals"]
            if rental["zone"] == zone and now - rental["created_unix"] >= hidden
        ]

    def delete(self, provider_id: str) -> None:
        with self.changing() as world:
            world["calls"].append({"verb": "delete", "id": provider_id})
            fault = world["faults"].get("delete", "")
            if fault == "denied":
                raise ProviderError(403, "delete: denied")
            found = [r for r in world["rentals"] if r["provider_id"] == provider_id]
            if not found:
                raise ProviderError(404, f"{provider_id} not found")
            if fault == "stopping":
                found[0]["state"] = "stopping"
            elif fault != "kept":
                world["rentals"].remove(found[0])
                if found[0]["zone"] in world["zones"]:
                    world["zones"][found[0]["zone"]]["stock"] += 1
            if fault == "timeout after":
                raise ProviderError(0, "delete: timeout after")


def _add(world: dict[str, Any], name: str, zone: str, labels: dict[str, str], **values: Any) -> str:
    now = datetime.now(UTC)
    provider_id = str(world["next_id"])
    world["next_id"] += 1
    world["rentals"].append(
        {
            "kind": "machine",
            "name": name,
            "zone": zone,
            "project": PROJECT,
            "provider_id": provider_id,
            "created_at": now.isoformat(),
            "created_unix": now.timestamp(),
            "state": "running",
            "labels": labels,
            **values,
        }
    )
    return provider_id
