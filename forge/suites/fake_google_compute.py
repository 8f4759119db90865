"""Compute Engine of the fake Google: instances with their disks, operations, zones, quotas.

Things live by the world's clock: a flex-start waits, a machine ends at its hard stop. Knows the
REST API v1 as far as gcloud asks for it; machines are never really there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forge.suites.fake_google_places import (
    MACHINE_TYPES,
    SYSTEM_MESSAGES,
    image_entry,
    machine_types,
    quota_error,
    region_entry,
    serial_output,
    stockout_error,
    zone_entry,
)
from forge.suites.fake_google_world import GoogleRefusal, GoogleWorld, seconds_of, zone_region

Place = tuple[str, str]  # zone, name

_COMPUTE_PATH = re.compile(r"/compute/(?:v1|beta|alpha)/projects/([^/]+)(/.*)?")


class FakeCompute:
    """The instances, disks and operations of one project."""

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.instances: dict[Place, dict[str, Any]] = {}
        self.disks: dict[Place, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.metadata: list[dict[str, str]] = []
        self.serial = "boot ok\n"  # of every machine that has written nothing of its own
        self.caller = "user@example.com"  # who makes the requests, as operations name them
        self._ready: dict[Place, float] = {}  # when a queued machine gets its hardware
        self._done: dict[str, tuple[float, dict[str, Any] | None]] = {}

    # -- the life of things, by the clock

    def settle(self) -> None:
        """Brings everything to what it is at the world's present moment."""
        for place, machine in list(self.instances.items()):
            self._settle_machine(place, machine)
        self._settle_operations()

    def _settle_operations(self) -> None:
        for name, (at, error) in list(self._done.items()):
            if self.world.now >= at:
                self._finish(self.operations[name], error, at)
                del self._done[name]

    def _settle_machine(self, place: Place, machine: dict[str, Any]) -> None:
        now, born = self.world.now, machine["_born"]
        if "_gone" in machine:  # its delete was accepted
            if now >= machine["_gone"]:
                self._remove(place)
            return
        ready = self._ready.get(place, born)
        valid = seconds_of(machine.get("params", {}).get("requestValidForDuration"))
        if machine["status"] == "PENDING":
            if place[0] in self.world.script.never or now < ready:
                if valid and now >= born + valid:
                    self._remove(place)  # the provider withdraws a request that waited too long
                return
            machine["status"] = "RUNNING"
            machine["lastStartTimestamp"] = self.world.stamp(ready)
        life = seconds_of(machine.get("scheduling", {}).get("maxRunDuration"))
        if machine["status"] == "RUNNING" and life and now >= ready + life:
            self._end(place, "compute.instances.automaticallyTerminate")

    def _end(self, place: Place, why: str) -> None:
        """The provider ends a machine on its own: deleted or only stopped, as it was ordered."""
        machine = self.instances[place]
        action = machine.get("scheduling", {}).get("instanceTerminationAction", "STOP")
        self._operation(place[0], why, machine["selfLink"], None, machine["id"])
        if action == "DELETE":
            self._remove(place)
        else:
            machine["status"] = "TERMINATED"

    def _remove(self, place: Place) -> None:
        machine = self.instances.pop(place)
        self._ready.pop(place, None)
        for disk in machine.get("disks", []):
            if disk.get("autoDelete"):
                self.disks.pop((place[0], disk["_name"]), None)

    def preempt(self, name: str) -> None:
        """Takes a spot machine back."""
        for place in [p for p in self.instances if p[1] == name]:
            self._end(place, "compute.instances.preempted")

    def shut_down(self, name: str) -> None:
        """The machine goes down from within: it stays, stopped, whatever its order says."""
        for place in [p for p in self.instances if p[1] == name]:
            machine, kind = self.instances[place], "compute.instances.guestTerminate"
            self._operation(place[0], kind, machine["selfLink"], None, machine["id"])
            machine["status"] = "TERMINATED"

    def write_serial(self, name: str, text: str) -> None:
        """Puts `text` at the end of what the machine wrote to its first serial port."""
        for machine in [one for place, one in self.instances.items() if place[1] == name]:
            machine["_serial"] = machine.get("_serial", "") + text

    # -- operations

    def link(self, path: str) -> str:
        return f"{self.world.base}/compute/v1/projects/{self.world.project}/{path}"

    def _operation(
        self,
        zone: str,
        kind: str,
        target: str,
        error: dict[str, Any] | None,
        target_id: str = "",
    ) -> dict[str, Any]:
        number = self.world.serial()
        name = f"operation-{int(self.world.now)}-{number[-6:]}"
        scope = f"zones/{zone}" if zone else "global"
        operation: dict[str, Any] = {
            "kind": "compute#operation",
            "id": number,
            "name": name,
            "operationType": kind,
            "targetLink": target,
            "targetId": target_id or number,
            "status": "RUNNING",
            "progress": 0,
            "user": "system" if kind.startswith("compute.") else self.caller,
            "insertTime": self.world.stamp(),
            "startTime": self.world.stamp(),
            "selfLink": self.link(f"{scope}/operations/{name}"),
        }
        if kind in SYSTEM_MESSAGES:
            operation["statusMessage"] = SYSTEM_MESSAGES[kind]
        if zone:  # a global one must have none: gcloud crashes over it
            operation["zone"] = self.link(f"zones/{zone}")
        self.operations[name] = operation
        self._done[name] = (self.world.now + self.world.script.operation_s, error)
        self._settle_operations()
        return operation

    def _finish(self, operation: dict[str, Any], error: dict[str, Any] | None, at: float) -> None:
        operation.update(status="DONE", progress=100, endTime=self.world.stamp(at))
        if error:
            operation["error"] = {"errors": [error]}
            quota = error["code"] == "QUOTA_EXCEEDED"
            operation["httpErrorStatusCode"] = 403 if quota else 503
            operation["httpErrorMessage"] = "FORBIDDEN" if quota else "SERVICE UNAVAILABLE"

    # -- requests

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """What Compute Engine says to one request. Raises GoogleRefusal."""
        matched = _COMPUTE_PATH.fullmatch(path)
        if not matched:
            raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}", "notFound")
        project, rest = matched[1], (matched[2] or "").strip("/")
        if rest.startswith(("global/images", "zones/-/imageFamilyViews")):
            return image_entry(self.world.base, project, rest)
        self.world.check("compute", project)
        parts = rest.split("/") if rest else []
        if parts[:1] == ["aggregated"]:
            return self._aggregated(parts[1], query)
        if parts[:1] == ["zones"] and len(parts) >= 3:
            return self._in_zone(method, parts[1], parts[2:], query, body)
        return self._about_project(method, parts, body)

    def _about_project(self, method: str, parts: list[str], body: dict[str, Any]) -> dict[str, Any]:
        script = self.world.script
        if not parts:
            return {
                "kind": "compute#project",
                "name": self.world.project,
                "commonInstanceMetadata": {"items": self.metadata},
                "defaultServiceAccount": "default@example.com",
                "selfLink": self.link("").rstrip("/"),
                "quotas": [],
            }
        if method == "POST" and parts == ["setCommonInstanceMetadata"]:
            self.metadata = body.get("items", [])
            return self._operation("", "setMetadata", self.link("").rstrip("/"), None)
        if parts[:2] == ["global", "operations"] and len(parts) >= 3:
            return self._one_operation(parts[2])
        if parts == ["zones"]:
            return {"items": [zone_entry(self.link, zone) for zone in script.zones]}
        if parts[0] == "zones" and len(parts) == 2 and parts[1] in script.zones:
            return zone_entry(self.link, parts[1])
        regions = {zone_region(zone) for zone in script.zones}
        if parts[0] == "regions" and len(parts) == 2 and parts[1] in regions:
            return region_entry(self.world, self.link, parts[1])
        raise self._missing("/".join(parts))

    def _one_operation(self, name: str) -> dict[str, Any]:
        if name not in self.operations:
            raise self._missing(f"operations/{name}")
        return self.operations[name]

    def _missing(self, path: str) -> GoogleRefusal:
        what = f"The resource 'projects/{self.world.project}/{path}' was not found"
        return GoogleRefusal(404, "NOT_FOUND", what, "notFound")

    def _of(self, kind: str, zone: str) -> list[dict[str, Any]]:
        if kind == "machineTypes":
            return [] if zone in self.world.script.unlisted else machine_types(self.link, zone)
        if kind == "operations":
            ours = self.link(f"zones/{zone}")
            return [one for one in self.operations.values() if one.get("zone") == ours]
        things = {"instances": self.instances, "disks": self.disks}.get(kind)
        if things is None:
            raise self._missing(f"aggregated/{kind}")
        here = (thing for place, thing in things.items() if place[0] == zone)
        return [_shown(thing) for thing in here if self.world.seen(thing)]

    def _aggregated(self, kind: str, query: Mapping[str, str]) -> dict[str, Any]:
        """All zones at once. One that cannot be read is there with a warning, and not absent."""
        items: dict[str, Any] = {}
        pairs = [
            {"zone": zone, "thing": thing}
            for zone in self.world.script.zones
            if zone not in self.world.script.unreachable
            for thing in self._of(kind, zone)
        ]
        page, more = self.world.paged(pairs, query)
        for pair in page:
            items.setdefault(f"zones/{pair['zone']}", {kind: []})[kind].append(pair["thing"])
        for zone in self.world.script.zones:
            code, message = "NO_RESULTS_ON_PAGE", f"There are no results for scope 'zones/{zone}'."
            if zone in self.world.script.unreachable:
                code, message = "UNREACHABLE", f"The zone 'zones/{zone}' is currently unreachable."
            items.setdefault(f"zones/{zone}", {"warning": {"code": code, "message": message}})
        return {"kind": f"compute#{kind}AggregatedList", "items": items, **more}

    def _in_zone(
        self,
        method: str,
        zone: str,
        parts: list[str],
        query: Mapping[str, str],
        body: dict[str, Any],
    ) -> dict[str, Any]:
        if zone not in self.world.script.zones:
            raise self._missing(f"zones/{zone}")
        kind, name, verb = (*parts, "", "")[:3]
        if kind == "operations" and name:
            return self._one_operation(name)
        if kind == "instances" and method == "POST" and not name:
            return self._insert(zone, body)
        if method == "GET" and not name:
            page, more = self.world.paged(self._of(kind, zone), query)
            return {"items": page, **more}
        if kind == "machineTypes" and name in MACHINE_TYPES:
            offered = [one for one in self._of(kind, zone) if one["name"] == name]
            if not offered:
                raise self._missing(f"zones/{zone}/machineTypes/{name}")
            return offered[0]
        things = {"instances": self.instances, "disks": self.disks}.get(kind, {})
        found = things.get((zone, name))
        if found is None or (method == "GET" and not self.world.seen(found)):
            raise self._missing(f"zones/{zone}/{kind}/{name}")
        return self._on_thing(method, (zone, name), kind, verb, query, body)

    def _on_thing(
        self,
        method: str,
        place: Place,
        kind: str,
        verb: str,
        query: Mapping[str, str],
        body: dict[str, Any],
    ) -> dict[str, Any]:
        thing = (self.instances if kind == "instances" else self.disks)[place]
        if method == "GET" and verb == "serialPort":
            if thing["status"] == "PENDING":
                what = f"The resource '{thing['selfLink'].partition('/v1/')[2]}' is not ready"
                raise GoogleRefusal(400, "FAILED_PRECONDITION", what, "resourceNotReady")
            return serial_output(thing.get("_serial", self.serial), int(query.get("start") or 0))
        if method == "GET" and not verb:
            return _shown(thing)
        if method == "DELETE":
            if place[1] not in self.world.script.stubborn:
                if kind == "instances":
                    thing.update(status="STOPPING")
                    thing["_gone"] = self.world.now + self.world.script.operation_s
                    self._settle_machine(place, thing)
                else:
                    del self.disks[place]
            return self._operation(place[0], "delete", thing["selfLink"], None, thing["id"])
        if method == "POST" and verb in ("stop", "start"):
            thing["status"] = {"stop": "TERMINATED", "start": "RUNNING"}[verb]
        elif method == "POST" and verb == "setLabels":
            thing["labels"] = body.get("labels", {})
        elif method == "POST" and verb == "setMetadata":
            thing["metadata"] = body
        else:
            raise self._missing(f"zones/{place[0]}/{kind}/{place[1]}/{verb}")
        return self._operation(place[0], verb, thing["selfLink"], None, thing["id"])

    def _insert(self, zone: str, body: dict[str, Any]) -> dict[str, Any]:
        name, script = str(body.get("name", "")), self.world.script
        place, link = (zone, name), self.link(f"zones/{zone}/instances/{name}")
        path = f"projects/{self.world.project}/zones/{zone}/instances/{name}"
        if zone in script.denied:
            what = f"Required 'compute.instances.create' permission for '{path}'"
            raise GoogleRefusal(403, "PERMISSION_DENIED", what, "forbidden")
        if place in self.instances:
            what = f"The resource '{path}' already exists"
            raise GoogleRefusal(409, "ALREADY_EXISTS", what, "alreadyExists")
        if zone in script.quota:
            return self._operation(zone, "insert", link, quota_error(zone))
        short = zone in script.stockout
        if not short or script.half_made:
            self._make_disks(zone, name, body)
        if short:
            return self._operation(zone, "insert", link, stockout_error(self.world, zone, body))
        self._make(place, body, link)
        return self._operation(zone, "insert", link, None, self.instances[place]["id"])

    def _make_disks(self, zone: str, name: str, body: dict[str, Any]) -> None:
        for number, disk in enumerate(body.get("disks", [])):
            wanted = disk.get("initializeParams", {})
            own = str(wanted.get("diskName") or (name if number == 0 else f"{name}-{number}"))
            link = self.link(f"zones/{zone}/disks/{own}")
            self.disks[zone, own] = {
                "kind": "compute#disk",
                "id": self.world.serial(),
                "name": own,
                "sizeGb": str(wanted.get("diskSizeGb", "10")),
                "status": "READY",
                "type": wanted.get("diskType", ""),
                "zone": self.link(f"zones/{zone}"),
                "selfLink": link,
                "labels": dict(wanted.get("labels", {})),
                "description": wanted.get("description", ""),
                "creationTimestamp": self.world.stamp(),
            }
            disk.update(source=link, _name=own)

    def _make(self, place: Place, body: dict[str, Any], link: str) -> None:
        script, flexible = self.world.script, False
        flexible = body.get("scheduling", {}).get("provisioningModel") == "FLEX_START"
        waits = flexible and (script.queue_s > 0 or place[0] in script.never)
        for number, card in enumerate(body.get("networkInterfaces") or []):
            card.update(name=f"nic{number}", networkIP="10.0.0.2")
            for access in card.get("accessConfigs", []):
                access["natIP"] = "203.0.113.7"  # of a range kept for documents, RFC 5737
        self.instances[place] = {
            **body,
            "_born": self.world.now,
            "kind": "compute#instance",
            "id": self.world.serial(),
            "status": "PENDING" if waits else "RUNNING",
            "creationTimestamp": self.world.stamp(),
            "zone": self.link(f"zones/{place[0]}"),
            "selfLink": link,
        }
        self._ready[place] = self.world.now + (script.queue_s if flexible else 0.0)
        for disk in body.get("disks", []):
            self.disks[place[0], disk["_name"]]["users"] = [link]


def _shown(thing: dict[str, Any]) -> dict[str, Any]:
    """A thing as it is answered: what the fake itself notes begins with an underscore."""
    shown = {key: value for key, value in thing.items() if not key.startswith("_")}
    if "disks" in shown:
        shown["disks"] = [_shown(disk) for disk in shown["disks"]]
    return shown
