"""A pool on Kubernetes: the Deployment of a run's actors, whose number of replicas is changed by an account of the cluster.

    running: GET deployments/actor/scale -> spec.replicas
    start, release: PATCH deployments/actor/scale <- spec.replicas

Kubernetes chooses the pods that leave: those that do not work yet, then the newest. The account needs no other right.
"""

import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import httpx2
import msgspec

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.deploy.clusters.pool import Instance, PoolError
from offbeat.deploy.clusters.services import FLEET
from offbeat.protocols.text import plain

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with the token, the namespace and the certificate of the cluster, in pods that may use the cluster."""
ANSWER_S = 10.0
SHOWN_CHARACTERS = 300


class _Replicas(msgspec.Struct, frozen=True):
    replicas: int = 0


class _Scale(msgspec.Struct, frozen=True):
    """The scale of a Deployment: replicas wanted (`spec`), and pods that are there (`status`)."""

    spec: _Replicas = _Replicas()
    status: _Replicas = _Replicas()


class KubernetesPool:
    """The replicas of one Deployment."""

    def __init__(self, url: str, account: Path, deployment: str = FLEET, verify: ssl.SSLContext | bool = True) -> None:
        """Use the API server at `url` with the token and in the namespace that `account` holds."""
        self._deployment = deployment
        self._account = account
        self._client = httpx2.Client(base_url=url, verify=verify, timeout=ANSWER_S, trust_env=False)
        namespace = (account / "namespace").read_text().strip()
        self._path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{deployment}/scale"

    def running(self) -> list[Instance]:
        """Return an instance for each replica; their names count them, because pods that are to come have none."""
        scale = self._ask("GET")
        name, wanted, present = self._deployment, scale.spec.replicas, scale.status.replicas
        working = [Instance(f"{name}-{number}", "working") for number in range(min(wanted, present))]
        missing = [Instance(f"{name}-{number}", "starting") for number in range(present, wanted)]
        return [*working, *missing, *(Instance(f"{name}-{number}", "leaving") for number in range(wanted, present))]

    def start(self, count: int) -> None:
        """Raise the number of replicas."""
        self._change(count)

    def release(self, names: Sequence[str]) -> None:
        """Lower the number of replicas; each pod that leaves gets SIGTERM and its grace period."""
        self._change(-len(names))

    def _change(self, difference: int) -> None:
        replicas = max(0, self._ask("GET").spec.replicas + difference)
        self._ask("PATCH", msgspec.json.encode({"spec": {"replicas": replicas}}))

    def _ask(self, method: Literal["GET", "PATCH"], content: bytes | None = None) -> _Scale:
        # Tokens are renewed in their file.
        headers = {"Authorization": f"Bearer {(self._account / 'token').read_text().strip()}"}
        if content is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            response = self._client.request(method, self._path, content=content, headers=headers)
        except httpx2.HTTPError as error:
            raise PoolError(f"the API server of Kubernetes does not answer ({plain(str(error))})") from error
        if not response.is_success:
            shown = plain(response.text[:SHOWN_CHARACTERS])
            raise PoolError(f"Kubernetes refuses to {method} {self._path} (HTTP {response.status_code}: {shown})")
        try:
            return msgspec.json.decode(response.content, type=_Scale)
        except msgspec.DecodeError as error:
            raise PoolError(f"the API server of Kubernetes answers something else than a scale ({error})") from error


def open_kubernetes_pool(config: Config, place: str) -> KubernetesPool:
    """Return the pool of the Deployment `place`, by default the fleet's, in the namespace that this process runs in.

    Raises `SettingError` outside of a cluster's pods.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (ACCOUNT / "token").exists():
        cure = "Write the manifests with `offbeat deploy kubernetes --scaled-by reconcile`, which run it beside the learner."
        raise SettingError("--on", "kubernetes", "this process is in no pod with an account of the cluster", cure)
    verify = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    return KubernetesPool(f"https://{f'[{host}]' if ':' in host else host}:{port}", ACCOUNT, place or FLEET, verify)
