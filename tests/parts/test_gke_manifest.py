"""The cluster's form of the serving: Kubernetes' own schema, what that leaves open, and the YAML.

The schema is that of the package kubernetes-validate, strict. It takes any text for a quantity and
knows no documents of others (PodMonitoring), so both are looked at here.
"""

from __future__ import annotations

import copy
import os
import re
import unittest
import warnings
from typing import Any
from unittest import mock

import kubernetes_validate
import yaml

from forge.parts.ground.errors import RigError
from forge.parts.runtimes.gke_manifest import (
    TOKEN_KEY,
    ClusterServing,
    cluster_secret,
    gke_manifest,
    manifest_notes,
    manifest_yaml,
)
from forge.parts.runtimes.vllm_docker import serve_argv
from forge.parts.runtimes.vllm_tpu_docker import (
    TPU_ENVIRONMENT,
    VllmTpuDocker,
    VllmTpuDockerSettings,
    tpu_container,
)

SLUG = "tpu-vllm-v5e1-2b-q4-0"
TAGGED = "vllm/vllm-tpu:nightly"
BY_DIGEST = f"vllm/vllm-tpu@sha256:{'0123456789abcdef' * 4}"
VERSION = kubernetes_validate.latest_version()  # of Kubernetes
# apimachinery/pkg/api/resource: a number, then a binary or decimal suffix, or an exponent.
QUANTITY = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?"
)
DNS_LABEL = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
OTHERS = {"PodMonitoring": {"selector", "endpoints"}}  # the keys of its spec that are used
WHOLE_ONLY = ("google.com/tpu",)


V5E, V6E = "tpu-v5-lite-podslice", "tpu-v6e-slice"


def settings(**values: Any) -> VllmTpuDockerSettings:
    """The settings of a rig, with these of its values changed."""
    known = {"model_name": "google/gemma-4-E2B-it", "gke_accelerator": V5E}
    return VllmTpuDockerSettings(**(known | values))


def serving(**values: Any) -> ClusterServing:
    """What is to be served, as the runtime says it; with these of its fields changed."""
    known: dict[str, Any] = {
        "name": SLUG,
        "container": "vllm",
        "image": TAGGED,
        "argv": serve_argv(settings()),
        "environment": TPU_ENVIRONMENT,
        "secret": "hf-token",
        "port": 8000,
        "accelerator": V5E,
        "topology": "1x1",
    }
    return ClusterServing(**(known | values))


def runtime_text(replicas: int = 1, image: str = TAGGED, **values: Any) -> str:
    """The manifest as the runtime of a rig with these settings gives it."""
    return VllmTpuDocker(lambda: settings(**values), SLUG).manifest(image, replicas)


def faults(document: Any) -> list[str]:
    """What Kubernetes would refuse in `document`; also quantities and names that are none."""
    found = []
    if document.get("kind") in OTHERS:
        known = {"apiVersion", "kind", "metadata", "spec"}
        found += [f"unknown key {key}" for key in set(document) - known]
        found += [f"unknown key {key}" for key in set(document["spec"]) - OTHERS[document["kind"]]]
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                kubernetes_validate.validate(document, VERSION, strict=True)
        except (
            kubernetes_validate.ValidationError,
            kubernetes_validate.SchemaNotFoundError,
            UserWarning,
        ) as error:
            found.append(str(getattr(error, "message", error)))
    if not DNS_LABEL.fullmatch(document.get("metadata", {}).get("name", "")):
        found.append("metadata.name is no name")
    for container in containers(document):
        found += resource_faults(container.get("resources", {}))
        found += [
            f"{probe} has no such port"
            for probe in ("startupProbe", "readinessProbe", "livenessProbe")
            if container[probe]["httpGet"]["port"] not in {p["name"] for p in container["ports"]}
        ]
    return found


def resource_faults(resources: dict[str, dict[str, str]]) -> list[str]:
    """Quantities that are none, parts of a chip, and chips asked for otherwise than limited."""
    found = []
    for kind, quantities in resources.items():
        for name, amount in quantities.items():
            if not isinstance(amount, str) or not QUANTITY.fullmatch(amount):
                found.append(f"{kind}.{name} is no quantity: {amount!r}")
            elif name in WHOLE_ONLY and not amount.isdigit():
                found.append(f"{kind}.{name} is no whole number: {amount!r}")
    for name in WHOLE_ONLY:
        asked, limit = (resources.get(kind, {}).get(name) for kind in ("requests", "limits"))
        if not asked or asked != limit:
            found.append(f"{name}: {asked!r} asked for, {limit!r} allowed")
    return found


def containers(document: Any) -> list[Any]:
    """The containers of a document, none where it has no pods."""
    pod = document.get("spec", {}).get("template", {}).get("spec", {})
    return list(pod.get("containers", []))


class Case(unittest.TestCase):
    def setUp(self) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "HF_", "IMAGE_"))}
        patch = mock.patch.dict(os.environ, kept, clear=True)
        patch.start()
        self.addCleanup(patch.stop)

    def made(self, replicas: int = 1, **values: Any) -> dict[str, Any]:
        """The runtime's documents by kind, read back from their text."""
        documents = list(yaml.safe_load_all(runtime_text(replicas, **values)))
        return {document["kind"]: document for document in documents}

    def container(self, **values: Any) -> Any:
        """The one container of the one Deployment."""
        (only,) = containers(self.made(**values)["Deployment"])
        return only


class SchemaTest(Case):
    def test_every_form_is_valid(self) -> None:
        for accelerator in (V5E, V6E):
            for replicas in (1, 3):
                for values in ({}, {"vision": True, "model_revision": "a" * 40}, {"hf_secret": ""}):
                    made = self.made(replicas, gke_accelerator=accelerator, **values)
                    self.assertEqual(len(made), 1 if replicas == 1 else 4)
                    for kind, document in made.items():
                        with self.subTest(accelerator, replicas=replicas, kind=kind):
                            self.assertEqual(faults(document), [])

    def test_the_check_finds_what_is_wrong(self) -> None:
        good = self.made()["Deployment"]
        self.assertEqual(faults(good), [])
        for path, value in (
            (("spec", "replicas"), "1"),
            (("spec", "replica"), 1),
            (("spec", "template", "spec", "nodeSelector"), ["x"]),
            (("spec", "selector"), "app"),
            (("metadata", "name"), "Bad_Name"),
            (("apiVersion",), "apps/v9"),
        ):
            bad = copy.deepcopy(good)
            place = bad
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            with self.subTest(path):
                self.assertNotEqual(faults(bad), [])

    def test_the_check_finds_a_wrong_container(self) -> None:
        for path, value in (
            (("containerPort",), 8000),
            (("args",), [8000]),
            (("resources", "limits", "google.com/tpu"), "1.5"),
            (("resources", "limits", "google.com/tpu"), "2"),
            (("resources", "limits", "google.com/tpu"), "one"),
            (("resources", "limits"), {}),
            (("resources", "requests", "ephemeral-storage"), "40GiB"),
            (("resources", "requests", "ephemeral-storage"), "lots"),
            (("startupProbe", "httpGet", "port"), "metrics"),
            (("env",), {"HF_HOME": "/cache"}),
        ):
            bad = copy.deepcopy(self.made()["Deployment"])
            place = containers(bad)[0]
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            with self.subTest(path):
                self.assertNotEqual(faults(bad), [])

    def test_autoscaling_documents_are_checked_too(self) -> None:
        for kind in ("Service", "PodMonitoring", "HorizontalPodAutoscaler"):
            bad = copy.deepcopy(self.made(2)[kind])
            bad["spec"]["minReplica"] = 1
            self.assertNotEqual(faults(bad), [], kind)


class ServingTest(Case):
    """The cluster serves what the machine serves."""

    def test_the_argument_list_is_the_containers(self) -> None:
        for values in ({}, {"vision": True}, {"max_model_len": 4096, "model_revision": "b" * 40}):
            container = self.container(**values)
            served = container["command"] + container["args"]
            self.assertEqual(served, serve_argv(settings(**values)))
            docker = tpu_container(settings(**values)).docker_argv(TAGGED)
            self.assertEqual(served, docker[docker.index(TAGGED) + 1 :])
            self.assertTrue(all(isinstance(word, str) for word in served))

    def test_kubernetes_expands_nothing_in_it(self) -> None:
        # $(NAME) in an argument or a value would be replaced by a variable.
        container = self.container(vision=True)
        words = [*container["command"], *container["args"]]
        words += [entry.get("value", "") for entry in container["env"]]
        self.assertFalse([word for word in words if "$" in word])

    def test_the_environment_is_the_containers_and_the_token_comes_from_a_secret(self) -> None:
        *plain, token = self.container()["env"]
        self.assertEqual({e["name"]: e["value"] for e in plain}, dict(TPU_ENVIRONMENT))
        self.assertEqual(
            token,
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": TOKEN_KEY}},
            },
        )
        names = [entry["name"] for entry in self.container(hf_secret="")["env"]]
        self.assertNotIn("HF_TOKEN", names)

    def test_a_secrets_name_is_one_that_kubernetes_takes(self) -> None:
        for given, name in (
            ("hf-token", "hf-token"),
            ("HF_Token", "hf-token"),
            ("_x_", "x"),
            ("___", "hf-token"),
        ):
            self.assertEqual(cluster_secret(given), name)

    def test_the_chip_and_its_node(self) -> None:
        for accelerator in (V5E, V6E):
            deployment = self.made(gke_accelerator=accelerator)["Deployment"]
            self.assertEqual(
                deployment["spec"]["template"]["spec"]["nodeSelector"],
                {
                    "cloud.google.com/gke-tpu-accelerator": accelerator,
                    "cloud.google.com/gke-tpu-topology": "1x1",
                },
            )
            resources = containers(deployment)[0]["resources"]
            self.assertEqual(resources["requests"]["google.com/tpu"], "1")
            self.assertEqual(resources["limits"], {"google.com/tpu": "1"})

    def test_all_chips_of_a_larger_node(self) -> None:
        (document,) = gke_manifest(serving(topology="2x4"))
        resources = containers(document)[0]["resources"]
        self.assertEqual(resources["limits"], {"google.com/tpu": "8"})
        self.assertEqual(faults(document), [])

    def test_nothing_is_killed_before_the_longest_known_start_is_over(self) -> None:
        container = self.container()
        startup = container["startupProbe"]
        self.assertGreaterEqual(startup["periodSeconds"] * startup["failureThreshold"], 2 * 857)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            self.assertEqual(container[probe]["httpGet"], {"path": "/health", "port": "http"})
        self.assertEqual(container["ports"], [{"name": "http", "containerPort": 8000}])

    def test_caches_and_shared_memory_are_mounted_where_they_are_used(self) -> None:
        deployment = self.made()["Deployment"]
        volumes = {v["name"]: v for v in deployment["spec"]["template"]["spec"]["volumes"]}
        mounts = {m["mountPath"]: m["name"] for m in self.container()["volumeMounts"]}
        self.assertEqual(set(mounts.values()), set(volumes))
        self.assertEqual(volumes[mounts["/dev/shm"]]["emptyDir"]["medium"], "Memory")
        self.assertRegex(volumes[mounts["/dev/shm"]]["emptyDir"]["sizeLimit"], QUANTITY)
        for name in ("HF_HOME", "VLLM_XLA_CACHE_PATH"):
            self.assertTrue(TPU_ENVIRONMENT[name].startswith("/cache/"))
        self.assertIn("/cache", mounts)

    def test_no_privilege_no_identity_and_no_foreign_variables(self) -> None:
        pod = self.made()["Deployment"]["spec"]["template"]["spec"]
        self.assertIs(pod["automountServiceAccountToken"], False)
        self.assertIs(pod["enableServiceLinks"], False)  # a Service `vllm` would set VLLM_PORT
        self.assertEqual(self.container()["securityContext"], {"allowPrivilegeEscalation": False})
        for word in ("hostNetwork", "hostPID", "hostIPC", "hostPath", "privileged"):
            self.assertNotIn(f'"{word}":', str(pod).replace("'", '"'))

    def test_an_image_by_digest(self) -> None:
        (document,) = yaml.safe_load_all(runtime_text(image=BY_DIGEST))
        self.assertEqual(containers(document)[0]["image"], BY_DIGEST)
        for image in ("other/name:1", "vllm/vllm-tpu", "vllm/vllm-tpu@sha256:1", ""):
            with self.subTest(image), self.assertRaises(RigError) as caught:
                runtime_text(image=image)
            self.assertEqual(caught.exception.error_class, "INVALID")

    def test_what_cannot_be_made_is_refused(self) -> None:
        for replicas, values, words in (
            (1, {"accelerator": ""}, "GKE_ACCELERATOR"),
            (0, {}, "replicas"),
            (101, {}, "replicas"),
            (1, {"name": "Bad Name"}, "name"),
            (1, {"name": ""}, "name"),
            (1, {"name": "x" * 64}, "name"),
        ):
            with self.subTest(values, replicas=replicas), self.assertRaises(RigError) as caught:
                gke_manifest(serving(**values), replicas)
            self.assertEqual(caught.exception.error_class, "INVALID")
            self.assertIn(words, str(caught.exception))
        for settings_at_fault in ({"model_name": "/models/x"}, {"gke_accelerator": ""}):
            with self.subTest(settings_at_fault), self.assertRaises(RigError) as caught:
                runtime_text(**settings_at_fault)
            self.assertEqual(caught.exception.error_class, "INVALID")


class ReplicasTest(Case):
    """More than one: a Service in front and an autoscaler on vLLM's queue."""

    def test_one_replica_is_one_document(self) -> None:
        self.assertEqual(list(self.made(1)), ["Deployment"])
        self.assertEqual(self.made(1)["Deployment"]["spec"]["replicas"], 1)

    def test_more_come_with_service_metrics_and_autoscaler(self) -> None:
        made = self.made(3)
        self.assertEqual(
            list(made), ["Deployment", "Service", "PodMonitoring", "HorizontalPodAutoscaler"]
        )
        # A number here would undo the autoscaler's at each apply.
        self.assertNotIn("replicas", made["Deployment"]["spec"])

    def test_all_mean_the_same_pods(self) -> None:
        made = self.made(3)
        template = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
        for labels in (
            made["Deployment"]["spec"]["selector"]["matchLabels"],
            made["Service"]["spec"]["selector"],
            made["PodMonitoring"]["spec"]["selector"]["matchLabels"],
        ):
            self.assertTrue(labels)
            self.assertLessEqual(labels.items(), template.items())
        self.assertEqual({d["metadata"]["name"] for d in made.values()}, {SLUG})

    def test_the_autoscaler_follows_the_queue_of_this_deployment(self) -> None:
        spec = self.made(3)["HorizontalPodAutoscaler"]["spec"]
        self.assertEqual((spec["minReplicas"], spec["maxReplicas"]), (1, 3))
        self.assertEqual(
            spec["scaleTargetRef"], {"apiVersion": "apps/v1", "kind": "Deployment", "name": SLUG}
        )
        (metric,) = spec["metrics"]
        self.assertEqual(
            metric["pods"]["metric"]["name"],
            "prometheus.googleapis.com|vllm:num_requests_waiting|gauge",
        )
        self.assertRegex(metric["pods"]["target"]["averageValue"], QUANTITY)

    def test_the_metrics_are_read_where_they_are_served(self) -> None:
        (endpoint,) = self.made(2)["PodMonitoring"]["spec"]["endpoints"]
        self.assertEqual((endpoint["port"], endpoint["path"]), ("http", "/metrics"))
        (port,) = self.made(2)["Service"]["spec"]["ports"]
        self.assertEqual(port["targetPort"], "http")

    def test_nothing_is_open_to_the_outside(self) -> None:
        self.assertEqual(self.made(2)["Service"]["spec"]["type"], "ClusterIP")

    def test_one_pod_goes_before_another_comes(self) -> None:
        strategy = self.made(2)["Deployment"]["spec"]["strategy"]
        self.assertEqual(strategy["rollingUpdate"], {"maxSurge": 0, "maxUnavailable": 1})


class YamlTest(Case):
    """The text is read by a YAML program as the very documents that it was made of."""

    def test_it_reads_back_as_the_same_documents(self) -> None:
        for replicas in (1, 2):
            chosen = serving(image=BY_DIGEST, argv=serve_argv(settings(vision=True)))
            documents = gke_manifest(chosen, replicas)
            text = manifest_yaml(documents, manifest_notes(chosen, replicas))
            self.assertEqual(list(yaml.safe_load_all(text)), documents)

    def test_texts_that_yaml_reads_as_something_else_stay_texts(self) -> None:
        words = ["yes", "No", "null", "~", "true", "off", "1", "0x1f", "1e3", "1.5", "2026-11-30"]
        words += ["", " x", "x ", "a: b", "a #b", "- x", "[x]", "{x}", "*x", "&x", "!x", "%x", "@x"]
        words += ["'x'", '"x"', "a\nb", "a\tb", "é", "=", "<<", "1:30", "0o7", ".inf", "NaN", "y"]
        document = {"words": words, **{word: word for word in words}}
        self.assertEqual(yaml.safe_load(manifest_yaml([document])), document)

    def test_nested_empty_and_plain_values(self) -> None:
        document = {
            "empty": {},
            "none": [],
            "list": [{"a": 1, "b": [{"c": {}}, ["d", []], True]}, {}, "e", 0, False],
            "deep": {"f": {"g": [{"h": {"i": "j"}}]}},
        }
        self.assertEqual(yaml.safe_load(manifest_yaml([document])), document)
        self.assertEqual(
            list(yaml.safe_load_all(manifest_yaml([document, document]))), [document] * 2
        )

    def test_it_is_written_for_people(self) -> None:
        text = runtime_text(2)
        self.assertTrue(text.startswith("# "))
        self.assertIn("\nkind: Deployment\n", text)
        self.assertIn("\n            - google/gemma-4-E2B-it\n", text)
        self.assertEqual(text.count("\n---\n"), 3)
        self.assertFalse([line for line in text.splitlines() if line != line.rstrip()])

    def test_the_notes_say_what_the_cluster_must_have(self) -> None:
        one, several = manifest_notes(serving()), manifest_notes(serving(), 2)
        self.assertIn("never applied to a cluster", " ".join(one))
        self.assertIn("--from-file=HF_TOKEN=", " ".join(one))
        self.assertNotIn("Adapter", " ".join(one))
        self.assertIn("Custom Metrics Stackdriver Adapter", " ".join(several))
        self.assertNotIn("HF_TOKEN", " ".join(manifest_notes(serving(secret=""))))
        for note in several:
            self.assertNotIn("\n", note)  # it becomes one line of comment


if __name__ == "__main__":
    unittest.main()
