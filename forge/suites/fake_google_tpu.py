"""Cloud TPU of the fake Google: nodes, queued resources, accelerator types (v1, v2, v2alpha1).

A queued resource goes its way by the world's clock and stays in the queue, dead or alive, until it
is deleted. Knows the REST API as far as gcloud asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forge.suites.fake_google_world import GoogleRefusal, GoogleWorld, seconds_of

_TPU_PATH = re.compile(
    r"/tpu/(v1|v2|v2alpha1)/(projects/([^/]+)/locations)(?:/([^/]+)(?:/(\w+)(?:/([^/:]+))?)?)?"
    r"(?::(\w+))?"
)
_TPU_TYPES = {
    "us-west4-a": ("v5litepod-1", "v5litepod-4"),
    "us-central1-a": ("v5litepod-1", "v5litepod-8"),
    "us-south1-a": ("v5litepod-1",),
    "us-west1-c": ("v5litepod-1",),
    "europe-west4-b": ("v5litepod-1",),
    "us-east5-a": ("v6e-1", "v6e-4"),
    "us-east5-b": ("v6e-1", "v6e-4"),
}
_TPU_RUNTIMES = ("v2-alpha-tpuv5-lite", "v2-alpha-tpuv6e")
_TYPE_ROOT = "type.googleapis.com/google.cloud.tpu.v2"
# Seconds of the clock from one state of a queued resource to the next, beside the wait itself.
_STEP_S = 1.0
_ENDED = ("FAILED", "SUSPENDED", "DELETING")
_PREEMPTIBLE_QUOTA = "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI"
_STANDARD_QUOTA = "TPUV5sLitepodPerProjectPerZoneForTPUAPI"
# What the released API, v2, does not show of a queued resource.
_ALPHA_FIELDS = ("provisioningModel", "runDuration", "bestEffort")


class FakeTpu:
    """The nodes, queued resources and operations of one project, each under its full name.

    `fixed` are the names of queued resources that the clock leaves as they are, `silent` those of
    nodes that have not reported to the provider yet: no tunnel through IAP finds them.
    """

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.nodes: dict[str, dict[str, Any]] = {}
        self.queue: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.fixed: set[str] = set()
        self.silent: set[str] = set()
        self._answers: dict[str, tuple[float, dict[str, Any]]] = {}

    # -- the life of things, by the clock

    def settle(self) -> None:
        """Brings everything to what it is at the world's present moment."""
        for things in (self.queue, self.nodes):
            for name, thing in list(things.items()):
                if self.world.now >= thing.get("_gone", float("inf")):
                    del things[name]
        for name, resource in list(self.queue.items()):
            short = name.rsplit("/", 1)[-1]
            if resource["state"]["state"] not in _ENDED and short not in self.fixed:
                self._settle_queued(name, resource)
        self._settle_operations()

    def _settle_operations(self) -> None:
        for name, (at, answer) in list(self._answers.items()):
            if self.world.now >= at:
                self.operations[name].update(done=True, **answer)
                del self._answers[name]

    def _settle_queued(self, name: str, resource: dict[str, Any]) -> None:
        zone, script = name.split("/")[3], self.world.script
        age, state = self.world.now - resource["_born"], resource["state"]
        if state["state"] == "ACTIVE":
            life = seconds_of(resource.get("runDuration", {}).get("maxRunDuration"))
            if life and self.world.now >= resource["_active"] + life:
                self._suspend(resource)
            return
        if zone in script.quota or resource["_over"]:
            limit = _quota_of(resource)
            most = 0 if zone in script.quota else script.quotas[limit]
            what = f"Quota limit '{limit}' has been exceeded. Limit: {most} in zone {zone}."
            return self._fail(resource, 8, what)
        valid = seconds_of(resource.get("queueingPolicy", {}).get("validUntilDuration"))
        kept = zone in script.never or zone in script.stockout
        ready = script.queue_s + 2 * _STEP_S if script.queue_s else 0.0
        if valid and age >= valid and (kept or ready > valid):
            what = "The queued resource request has expired before it could be fulfilled."
            return self._fail(resource, 4, what)
        if not kept and age >= ready:
            state.update(state="ACTIVE")
            resource["_active"] = resource["_born"] + ready
            run = resource.get("runDuration", {})
            if run.get("maxRunDuration"):
                over = resource["_active"] + seconds_of(run["maxRunDuration"])
                resource["runDuration"] = {**run, "terminationTime": self.world.stamp(over)}
            for spec in resource["tpu"]["nodeSpec"]:
                parent = f"{name.split('/queuedResources/')[0]}/nodes/"
                self._make_node(parent + spec["nodeId"], spec["node"], name)
            self._settle_queued(name, resource)  # its life may be over already
        elif not kept and age >= ready - _STEP_S:
            state.update(state="PROVISIONING")
        elif age >= _STEP_S or kept:
            state.update(state="WAITING_FOR_RESOURCES")

    def _fail(self, resource: dict[str, Any], code: int, message: str) -> None:
        error = {"code": code, "message": message}
        by = {"stateInitiator": "SERVICE"}
        resource["state"] = {"state": "FAILED", "failedData": {"error": error}, **by}

    def _suspend(self, resource: dict[str, Any], by: str = "SERVICE") -> None:
        """The machines are gone, the request stays in the queue and keeps its name."""
        resource["state"] = {"state": "SUSPENDED", "suspendedData": {}, "stateInitiator": by}
        for name in [n for n, node in self.nodes.items() if node.get("_of") == resource["name"]]:
            del self.nodes[name]

    def preempt(self, name: str, keeps: bool = False) -> None:
        """Takes a node back: alone it stays as PREEMPTED, of a queued resource it is gone, or, with
        `keeps`, is still to be seen beside its suspended request."""
        for path, node in list(self.nodes.items()):
            if path.rsplit("/", 1)[-1] == name:
                if node.get("_of") in self.queue:
                    self._suspend(self.queue[node["_of"]])
                if keeps or node.get("_of") not in self.queue:
                    self.nodes[path] = {**node, "state": "PREEMPTED"}

    # -- requests

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """What Cloud TPU says to one request. Raises GoogleRefusal."""
        matched = _TPU_PATH.fullmatch(path)
        if not matched:
            raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}")
        version, parent, project, zone, kind, name, verb = matched.groups()
        self.world.check("tpu", project)
        zones = self.world.script.zones
        if zone is None:
            return {"locations": [{"name": f"{parent}/{z}", "locationId": z} for z in zones]}
        if zone != "-" and zone not in zones:
            what = f"Location {zone} is not found or access is unauthorized."
            raise GoogleRefusal(403, "PERMISSION_DENIED", what)
        place = f"{parent}/{zone}"
        if kind is None:
            return {"name": place, "locationId": zone}
        if kind in ("acceleratorTypes", "runtimeVersions"):
            return self._catalogue(place, kind, zone)
        answer = self._on_kind(method, (place, kind, name or "", verb or ""), query, body)
        return answer if version == "v2alpha1" else _released(answer)

    def _catalogue(self, place: str, kind: str, zone: str) -> dict[str, Any]:
        field = {"acceleratorTypes": "type", "runtimeVersions": "version"}[kind]
        types = _TPU_TYPES.get(zone, ())
        values = types if kind == "acceleratorTypes" else _TPU_RUNTIMES
        return {kind: [{"name": f"{place}/{kind}/{value}", field: value} for value in values]}

    def _on_kind(
        self,
        method: str,
        where: tuple[str, str, str, str],
        query: Mapping[str, str],
        body: dict[str, Any],
    ) -> dict[str, Any]:
        place, kind, short, verb = where
        name = f"{place}/{kind}/{short}"
        things = {"nodes": self.nodes, "queuedResources": self.queue}.get(kind)
        if kind == "operations":
            things = self.operations
        if things is None:
            raise GoogleRefusal(404, "NOT_FOUND", f"no such collection: {kind}")
        if method == "POST" and not short:
            if kind == "nodes":
                return self._create_node(place, query.get("nodeId", ""), body)
            return self._create_queued(place, query.get("queuedResourceId", ""), body)
        if method == "GET" and not short:
            return self._list(place, kind, things, query)
        if name not in things or (method == "GET" and not self.world.seen(things[name])):
            raise GoogleRefusal(404, "NOT_FOUND", f"Resource '{name}' was not found")
        if method == "DELETE":
            return self._delete(name, kind, query)
        if method == "PATCH" and kind == "nodes":
            things[name].update(body)
            return self._operation(name, {"@type": f"{_TYPE_ROOT}.Node", **_public(things[name])})
        if verb == "getGuestAttributes":
            return {"guestAttributes": self._guest_attributes(things[name])}
        return _public(things[name])

    def _list(
        self, place: str, kind: str, things: dict[str, Any], query: Mapping[str, str]
    ) -> dict[str, Any]:
        """One zone's things, or with `-` all that can be read, the other zones named apart."""
        unread = self.world.script.unreachable
        parent, zone = place.rsplit("/", 1)
        if zone in unread:
            raise GoogleRefusal(503, "UNAVAILABLE", f"The zone {zone} cannot be reached.")
        seen = [
            _public(thing)
            for name, thing in things.items()
            if (name.startswith(f"{place}/") or (zone == "-" and name.split("/")[3] not in unread))
            and self.world.seen(thing)
        ]
        page, more = self.world.paged(seen, query)
        lacking = {"unreachable": [f"{parent}/{z}" for z in sorted(unread)]} if zone == "-" else {}
        return {kind: page, **more, **({k: v for k, v in lacking.items() if v})}

    def _create_node(self, place: str, short: str, body: dict[str, Any]) -> dict[str, Any]:
        zone, name = place.rsplit("/", 1)[-1], f"{place}/nodes/{short}"
        self._refuse(zone, "tpu.nodes.create", name, name in self.nodes)
        if zone in self.world.script.quota:
            what = "Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. "
            what += f"Limit: 0 in zone {zone}."
            raise GoogleRefusal(429, "RESOURCE_EXHAUSTED", what)
        if zone in self.world.script.stockout:
            what = f'There is no more capacity in the zone "{zone}"; you can try in another zone '
            what += "where Cloud TPU Nodes are offered "
            what += "(see https://cloud.google.com/tpu/docs/regions) [EID: 0x2a]"
            return self._operation(name, error={"code": 8, "message": what})
        node = self._make_node(name, body, "")
        return self._operation(name, {"@type": f"{_TYPE_ROOT}.Node", **_public(node)})

    def _create_queued(self, place: str, short: str, body: dict[str, Any]) -> dict[str, Any]:
        zone, name = place.rsplit("/", 1)[-1], f"{place}/queuedResources/{short}"
        self._refuse(zone, "tpu.queuedresources.create", name, name in self.queue)
        first = "CREATING" if self.world.script.operation_s else "ACCEPTED"
        over = self._over_quota(zone, body)
        self.queue[name] = {
            **body,
            "_over": over,
            "name": name,
            "createTime": self.world.stamp(),
            "state": {"state": first, "stateInitiator": "SERVICE"},
            "_born": self.world.now,
        }
        resource = {"@type": f"{_TYPE_ROOT}alpha1.QueuedResource", "name": name}
        return self._operation(name, resource)

    def _over_quota(self, zone: str, body: dict[str, Any]) -> bool:
        """Whether a new request finds the zone's chips held by others. The dead hold theirs too."""
        quota = _quota_of(body)
        held = [
            one
            for name, one in self.queue.items()
            if name.split("/")[3] == zone and _quota_of(one) == quota and not one["_over"]
        ]
        most = self.world.script.quotas.get(quota)
        return most is not None and sum(map(_chips_of, [*held, body])) > most

    def _refuse(self, zone: str, permission: str, name: str, there: bool) -> None:
        if zone in self.world.script.denied:
            what = f"Permission '{permission}' denied on '{name}' (or it may not exist)."
            raise GoogleRefusal(403, "PERMISSION_DENIED", what)
        if there:
            raise GoogleRefusal(409, "ALREADY_EXISTS", f"Resource '{name}' already exists")

    def _make_node(self, name: str, spec: dict[str, Any], queued: str) -> dict[str, Any]:
        outside = spec.get("networkConfig", {}).get("enableExternalIps", True)
        access = {"externalIp": "203.0.113.9"} if outside else {}
        end = {"ipAddress": "10.0.0.3", "port": 8470, "accessConfig": access}
        self.nodes[name] = {
            **spec,
            "name": name,
            "id": self.world.serial(),
            "state": "READY",
            "health": "HEALTHY",
            "createTime": self.world.stamp(),
            "networkEndpoints": [end],
            "_born": self.world.now,
            **({"queuedResource": queued, "_of": queued} if queued else {}),
        }
        return self.nodes[name]

    def _guest_attributes(self, node: dict[str, Any]) -> list[dict[str, Any]]:
        """What a node's agent reported of its one worker; nothing before it came up."""
        if node["state"] != "READY" or node["name"].rsplit("/", 1)[-1] in self.silent:
            return []
        host = f"t1v-n-{node['id'][-8:]}-w-0"
        item = {"namespace": "guestInventory", "key": "hostname", "value": host}
        return [{"queryPath": "", "queryValue": {"items": [item]}}]

    def _delete(self, name: str, kind: str, query: Mapping[str, str]) -> dict[str, Any]:
        if name.rsplit("/", 1)[-1] in self.world.script.stubborn:
            return self._operation(name)
        gone = self.world.now + self.world.script.operation_s
        if kind == "nodes":
            self.nodes[name].update(state="DELETING", _gone=gone)
            request = self.queue.get(self.nodes[name].get("_of", ""))
            if request is not None:  # the request outlives what a user took from it
                done = {"suspendedData": {}, "stateInitiator": "USER"}
                request["state"] = {"state": "SUSPENDED", **done}
            self.settle()
            return self._operation(name)
        resource, state = self.queue[name], self.queue[name]["state"]["state"]
        if state in ("ACTIVE", "PROVISIONING") and query.get("force", "").lower() != "true":
            what = f"Resource {name} is in state {state}: delete its node first, or use force"
            raise GoogleRefusal(400, "FAILED_PRECONDITION", what)
        self._suspend(resource)
        resource.update(state={"state": "DELETING"}, _gone=gone)
        self.settle()
        return self._operation(name)

    def _operation(
        self,
        target: str,
        response: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """An operation. Its target must be the whole path, or gcloud cannot read it."""
        place = "/".join(target.split("/")[:4])
        name = f"{place}/operations/operation-{self.world.serial()}"
        data = {"@type": f"{_TYPE_ROOT}.OperationMetadata", "target": target, "apiVersion": "v2"}
        data["createTime"] = self.world.stamp()
        self.operations[name] = {"name": name, "done": False, "metadata": data}
        nothing = {"@type": "type.googleapis.com/google.protobuf.Empty"}
        answer = {"error": error} if error else {"response": response or nothing}
        self._answers[name] = (self.world.now + self.world.script.operation_s, answer)
        self._settle_operations()
        return self.operations[name]


def _quota_of(resource: Mapping[str, Any]) -> str:
    """On which of the two quotas a request draws."""
    taken_back = "spot" in resource or resource.get("provisioningModel") in ("SPOT", "FLEX_START")
    return _PREEMPTIBLE_QUOTA if taken_back else _STANDARD_QUOTA


def _chips_of(resource: Mapping[str, Any]) -> int:
    specs = resource.get("tpu", {}).get("nodeSpec", [])
    return sum(int(spec["node"]["acceleratorType"].rpartition("-")[2]) for spec in specs)


def _released(answer: dict[str, Any]) -> dict[str, Any]:
    """What the released API makes of an answer: queued resources without alpha's fields."""
    if "queuedResources" in answer:
        return {**answer, "queuedResources": [_released(r) for r in answer["queuedResources"]]}
    return {key: value for key, value in answer.items() if key not in _ALPHA_FIELDS}


def _public(thing: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in thing.items() if not key.startswith("_")}
