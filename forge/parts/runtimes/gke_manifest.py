"""A serving container for a Kubernetes cluster of GKE with TPU nodes: documents, and their YAML.

Applies nothing and composes no argument. Checked against Kubernetes' schema, never on a cluster.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.names import checked_name

TOKEN_KEY = "HF_TOKEN"  # of the cluster's secret, and the variable's name
# Twice the longest cold start on record (857 s until the server answered, gemma4-dev, 2026-08):
# until then nothing restarts the pod, although most of that time is one long compilation.
_STARTUP_PERIOD_S, _STARTUP_TRIES = 10, 180
# Waiting requests of a replica that call for another one. vLLM counts none before its slots are
# full, and a replica takes minutes to come: taken over from public set-ups, not measured.
_WAITING_PER_REPLICA = 5
_WAITING_METRIC = "prometheus.googleapis.com|vllm:num_requests_waiting|gauge"
_REPLICAS_LIMIT = 100
# E2B's files are 10.25 GB. A pod that asks for no disk may be put where there is none.
_DISK_REQUEST = "40Gi"
_SHARED_MEMORY_LIMIT = "16Gi"
_PLAIN_YAML = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")


@dataclass(frozen=True)
class ClusterServing:
    """What is to be served: `argv` in `image`, listening on `port`, with its `environment`.

    `secret` names the Hugging Face token, empty where none is needed. `accelerator` is GKE's word
    for the chip and `topology` how the chips of one host lie (`1x1`), which its nodes are known by:
    tpu-v6e-slice for ct6e-standard-1t (Google's pages), tpu-v5-lite-podslice for ct5lp-hightpu-1t
    (as xprilion/gemma3-vllm-tpu-gke-autoscaling ran vLLM there, 2026-04).
    """

    name: str
    container: str
    image: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    secret: str
    port: int
    accelerator: str
    topology: str


def gke_manifest(serving: ClusterServing, replicas: int = 1) -> list[dict[str, Any]]:
    """The documents: a Deployment; beyond one replica also a Service, PodMonitoring and autoscaler.

    Raises RigError INVALID for a name that Kubernetes does not take, for nodes that are not told,
    and for other than 1 to 100 replicas.
    """
    if not serving.accelerator:
        raise RigError(
            "INVALID",
            "which nodes of GKE have this rig's chip is not told",
            "set GKE_ACCELERATOR in tpu.env",
        )
    if not 1 <= replicas <= _REPLICAS_LIMIT:
        raise invalid_parameter("replicas", f"must be 1 to {_REPLICAS_LIMIT}")
    name = checked_name("resource", "name", serving.name)
    documents = [_deployment(serving, scaled=replicas > 1)]
    if replicas > 1:
        documents += [_service(name, serving.port), _pod_monitoring(name)]
        documents.append(_autoscaler(name, replicas))
    return documents


def manifest_notes(serving: ClusterServing, replicas: int = 1) -> list[str]:
    """What the documents need of the cluster, and what they were not checked against."""
    notes = ["Checked against Kubernetes' schema; never applied to a cluster by this project."]
    if serving.secret:
        secret = cluster_secret(serving.secret)
        notes.append(
            f"Needs a Secret {secret} with the key {TOKEN_KEY}; from a file that ends without a "
            f"newline: kubectl create secret generic {secret} --from-file={TOKEN_KEY}=FILE"
        )
    if replicas > 1:
        notes.append(
            "The autoscaler needs managed Prometheus and the Custom Metrics Stackdriver Adapter; "
            "each replica is a TPU node that is billed while it stands."
        )
    notes.append("The caches last as long as the pod; a new one downloads and compiles again.")
    return notes


def manifest_yaml(documents: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> str:
    """The documents as YAML for `kubectl apply -f -`, the notes above them as comments.

    Mappings, lists, strings, whole numbers and booleans only: a string that YAML could read as
    anything else is quoted as JSON does, which YAML reads alike.
    """
    head = "".join(f"# {note}\n" for note in notes)
    return head + "---\n".join("".join(_yaml_lines(document, 0)) for document in documents)


def cluster_secret(secret: str) -> str:
    """The name of the cluster's Secret for that of `secret`, in letters that Kubernetes takes."""
    return re.sub(r"[^a-z0-9]+", "-", secret.lower()).strip("-") or "hf-token"


def _deployment(serving: ClusterServing, *, scaled: bool) -> dict[str, Any]:
    labels = {"app": serving.name}
    spec: dict[str, Any] = {} if scaled else {"replicas": 1}  # else the autoscaler has the number
    spec |= {
        "selector": {"matchLabels": labels},
        # One pod less, then one more: nobody has a spare TPU node for the time of a change.
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "template": {
            "metadata": {"labels": labels},
            "spec": {
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,  # a Service named vllm would set VLLM_PORT
                "nodeSelector": {
                    "cloud.google.com/gke-tpu-accelerator": serving.accelerator,
                    "cloud.google.com/gke-tpu-topology": serving.topology,
                },
                "containers": [_container(serving)],
                "volumes": [
                    {"name": "cache", "emptyDir": {}},
                    {
                        "name": "shared-memory",
                        "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY_LIMIT},
                    },
                ],
            },
        },
    }
    return _document("apps/v1", "Deployment", serving.name, spec)


def _container(serving: ClusterServing) -> dict[str, Any]:
    environment: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in serving.environment.items()
    ]
    if serving.secret:
        reference = {"name": cluster_secret(serving.secret), "key": TOKEN_KEY}
        environment.append({"name": TOKEN_KEY, "valueFrom": {"secretKeyRef": reference}})
    health = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5}
    chips = math.prod(int(side) for side in serving.topology.split("x"))
    # GKE's device plugin hands the chips over: all of the node, or the pod is never scheduled.
    tpu = {"google.com/tpu": str(chips)}
    return {
        "name": serving.container,
        "image": serving.image,
        "command": list(serving.argv[:1]),
        "args": list(serving.argv[1:]),
        "env": environment,
        "ports": [{"name": "http", "containerPort": serving.port}],
        "resources": {"requests": {"ephemeral-storage": _DISK_REQUEST, **tpu}, "limits": tpu},
        "startupProbe": health
        | {"periodSeconds": _STARTUP_PERIOD_S, "failureThreshold": _STARTUP_TRIES},
        "readinessProbe": health | {"periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": health | {"periodSeconds": 10, "failureThreshold": 6},
        # Without privileges, as the deployment that ClusterServing names ran on v5e.
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": "cache", "mountPath": "/cache"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def _service(name: str, port: int) -> dict[str, Any]:
    ports = [{"name": "http", "port": port, "targetPort": "http"}]
    # Within the cluster only: vLLM asks for no key here.
    spec = {"type": "ClusterIP", "selector": {"app": name}, "ports": ports}
    return _document("v1", "Service", name, spec)


def _pod_monitoring(name: str) -> dict[str, Any]:
    endpoints = [{"port": "http", "path": "/metrics", "interval": "15s"}]
    spec = {"selector": {"matchLabels": {"app": name}}, "endpoints": endpoints}
    return _document("monitoring.googleapis.com/v1", "PodMonitoring", name, spec)


def _autoscaler(name: str, replicas: int) -> dict[str, Any]:
    waiting = {
        "metric": {"name": _WAITING_METRIC},
        "target": {"type": "AverageValue", "averageValue": str(_WAITING_PER_REPLICA)},
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": 1,
        "maxReplicas": replicas,
        "metrics": [{"type": "Pods", "pods": waiting}],
        # A replica that goes is a cold start away: it stays through a pause of that length.
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 900}},
    }
    return _document("autoscaling/v2", "HorizontalPodAutoscaler", name, spec)


def _document(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _yaml_lines(value: Mapping[str, Any] | Sequence[Any], depth: int) -> list[str]:
    """Block style, two blanks a level; a list's items stand below the list's own key."""
    pad, lines = "  " * depth, []
    if isinstance(value, Mapping):
        for key, item in value.items():
            lines += _yaml_entry(f"{pad}{_yaml_scalar(key)}:", item, depth)
    else:
        for item in value:
            if isinstance(item, Mapping) and item:
                first, *rest = _yaml_lines(item, depth + 1)
                lines += [f"{pad}- {first.lstrip()}", *rest]
            else:
                lines += _yaml_entry(f"{pad}-", item, depth)
    return lines


def _yaml_entry(start: str, item: Any, depth: int) -> list[str]:
    if isinstance(item, Mapping | list | tuple):
        if not item:
            return [f"{start} {'{}' if isinstance(item, Mapping) else '[]'}\n"]
        return [f"{start}\n", *_yaml_lines(item, depth + 1)]
    return [f"{start} {_yaml_scalar(item)}\n"]


def _yaml_scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    plain = _PLAIN_YAML.fullmatch(value) and value.lower() not in _YAML_WORDS
    return value if plain else json.dumps(value)
