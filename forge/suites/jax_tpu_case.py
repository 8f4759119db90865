"""Google as the provider of a rig whose machines serve with the JAX engine and without docker.

What obeys the script and tells its starts is the engine of each machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge.suites.fake_host import FakeHost
from forge.suites.fake_jax_host import FakeJaxHost
from forge.suites.google_case import GoogleProvider, ScriptedHosts
from forge.suites.rented_tpu import TPU_TOOLS_WITH_EFFECT, TPU_WORDS, QueuedCase

JAX_TPU_WORDS = {
    **TPU_WORDS,
    "wait_for_model_ready": "wait_for_jax_ready",
    "get_server_logs": "get_jax_logs",
    "get_endpoint": "get_jax_endpoint",
    "run_benchmark": "run_benchmark",
}
_VLLM_ALONE = (
    *("wait_for_vllm_ready", "get_vllm_docker_logs", "get_vllm_endpoint", "manage_vllm_docker"),
    *("run_vllm_benchmark", "save_hf_token", "get_tpu_serial_log"),
)
JAX_TPU_TOOLS_WITH_EFFECT = {
    **{name: how for name, how in TPU_TOOLS_WITH_EFFECT.items() if name not in _VLLM_ALONE},
    "wait_for_jax_ready": "reads",
    "get_jax_logs": "reads",
    "get_jax_endpoint": "reads",
    "manage_jax_server": "destroys",
    "deploy_jax_server": "destroys",
    "verify_jax_tpu": "reads",
    "run_benchmark": "changes",
}


class JaxHosts(ScriptedHosts):
    """Machines whose model server obeys the one script from its birth."""

    kind = FakeJaxHost

    def _host(self, alias: str, name: str) -> FakeHost:
        with self._making:
            fresh = alias not in self.hosts
            host = super()._host(alias, name)
            if fresh:
                jax_of(host).script(**self._provider.engine_orders)
            return host


def jax_of(host: FakeHost) -> Any:
    """The scripted engine of a machine."""
    assert isinstance(host, FakeJaxHost)
    return host.jax


class JaxTpuProvider(GoogleProvider):
    """Google, with such machines."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hosts = JaxHosts(self.google, folder / "hosts", self)
        self.bin = self.hosts.bin

    def script(self, **orders: Any) -> None:
        self.engine_orders = orders
        for host in self.machines():
            jax_of(host).script(**orders)

    def requests(self) -> list[dict[str, Any]]:
        return [one for host in self.machines() for one in jax_of(host).requests()]

    def starts(self) -> list[dict[str, Any]]:
        return [one for host in self.machines() for one in jax_of(host).starts()]


class JaxTpuCase(QueuedCase):
    """A case on such machines."""

    def marks(self, host: FakeHost) -> list[tuple[str, str, str]]:
        """Phase, state and words of each mark of the boots, oldest first."""
        text = (host.root / "var/lib/gemma4/boot.log").read_text()
        parts = [line.partition("GEMMA4-BOOT ")[2].split(maxsplit=3) for line in text.splitlines()]
        return [(one[0], one[1], " ".join(one[3:])) for one in parts if one]
