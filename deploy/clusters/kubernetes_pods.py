"""The pods of a run on Kubernetes, and the Deployment of its actors as a pool.

Pods have no rights, and a root file system that is read-only. The number of replicas is changed by an account of the cluster:

    running: GET deployments/actor/scale -> spec.replicas
    start, release: PATCH deployments/actor/scale <- spec.replicas

Kubernetes chooses the pods that leave: those that do not work yet, then the newest. The account needs no other right.
"""

import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import httpx2
import msgspec

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.common.settings.hub_keys import LEARNER
from offbeat.deploy.clusters.container import (
    ALLOWED,
    CONFIG,
    KEYS,
    PAGE_PORT,
    RUNS,
    USER,
    Document,
    actor_command,
    learner_command,
    run_folder,
)
from offbeat.deploy.clusters.pool import Instance, PoolError
from offbeat.deploy.clusters.services import FLEET, NOTICE_S, notice_s
from offbeat.deploy.local.memory import tensor_parallel_size
from offbeat.protocols.text import plain

GPU = "nvidia.com/gpu"
LABELS = {
    name: {"app.kubernetes.io/name": "offbeat", "app.kubernetes.io/component": component}
    for name, component in ((LEARNER, "learner"), (FLEET, "actor"))
}
"""Labels of each service's pods and objects. Services, the Deployment and the network policies select by them, and a
Deployment's selector cannot be changed: a label that only informs goes into `_template`."""
CONFIG_MAP, ALLOWED_MAP = "run-config", "allowed-keys"
LEARNER_SECRET, ACTOR_SECRET = "learner-keys", "actor-keys"
CLAIM = "runs"
RECONCILER = "reconciler"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with the token, the namespace and the certificate of the cluster, in pods that may use the cluster."""
STARTING_S = 1800
"""Longest time in which a service starts: it downloads and loads a model, and compiles."""
PERIOD_S = 10
"""Seconds between two questions to a service."""


class PodOptions(NamedTuple):
    """The choices about one kind of pods."""

    resources: Mapping[str, str] = {}
    """Quantities of the service's container, by resource: requested, and at the same time its limits."""
    extra: Mapping[str, Any] = {}
    """Fields of the pod's `spec` that are passed through, such as nodeSelector and tolerations."""
    secret: str = ""
    """Name of a Secret whose entries become environment variables. Empty: none."""
    requests: Mapping[str, str] = {}
    """Estimated quantities of what `resources` leaves out: requested, without a limit."""


def literal(word: str) -> str:
    """Return a word of a command that Kubernetes does not change: it replaces $(NAME) by a variable, and $$ by $."""
    return word.replace("$", "$$")


def _mount(volume: str, path: str) -> Document:
    return {"name": volume, "mountPath": path}


_SHARED_MOUNTS = [
    _mount("config", str(PurePosixPath(CONFIG).parent)),
    _mount("keys", KEYS),
    _mount("tmp", "/tmp"),
    _mount("shm", "/dev/shm"),
]


def learner_pod(config: Config, image: str, settings: Sequence[str], options: PodOptions, *, reconciles: bool) -> Document:
    """Return the template of the learner's pod; raise `SettingError` for options that do not suit it."""
    processes = str(config.launch.learner_processes)
    if (gpus := options.resources.get(GPU, processes)) != processes:
        problem = f"each learner process takes one GPU, and launch.learner_processes is {processes}"
        raise SettingError("--learner", f"{GPU}={gpus}", problem, "Make them equal.")
    runs = _mount(CLAIM, RUNS)
    mounts = [*_SHARED_MOUNTS, _mount("allowed", ALLOWED), runs]
    learner = _container(LEARNER, image, learner_command(config, settings), mounts, options)
    # A learner that moves to another machine need not download the model again.
    learner["env"] = [{"name": "HF_HOME", "value": f"{RUNS}/huggingface"}]
    learner |= _watched()
    volumes: list[Document] = [
        {"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM}},
        {"name": "allowed", "configMap": {"name": ALLOWED_MAP}},
    ]
    containers = [learner]
    if reconciles:
        containers.append(_reconciler(config, image, [*_SHARED_MOUNTS, {**runs, "readOnly": True}]))
        volumes.append(_token())
    spec = _spec(containers, volumes, LEARNER_SECRET, NOTICE_S, options)
    spec["restartPolicy"] = "OnFailure"
    if reconciles:
        spec["serviceAccountName"] = RECONCILER
    return _template(LEARNER, _with_extra("--learner", spec, options))


def actor_pod(config: Config, image: str, settings: Sequence[str], options: PodOptions) -> Document:
    """Return the template of the actors' pods; raise `SettingError` for options that do not suit them."""
    size = str(tensor_parallel_size(config))
    if (gpus := options.resources.get(GPU, size)) != size:
        problem = f"an actor takes one GPU for each part of the model, and tensor_parallel_size is {size}"
        raise SettingError("--actor", f"{GPU}={gpus}", problem, "Make them equal.")
    actor = _container("actor", image, actor_command(settings, "$(POD_NAME)"), _SHARED_MOUNTS, options)
    actor["env"] = [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    actor |= _watched()
    spec = _spec([actor], [], ACTOR_SECRET, notice_s(config), options)
    hosts = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    spec["topologySpreadConstraints"] = [{**hosts, "labelSelector": {"matchLabels": LABELS[FLEET]}}]
    return _template(FLEET, _with_extra("--actor", spec, options))


def _reconciler(config: Config, image: str, mounts: Sequence[Document]) -> Document:
    """Return the container that keeps as many actors as the learner wants, from the moment when there is a run."""
    # The third word behind `sh` is the folder, whose name may have blanks.
    waiting = 'until [ -e "$3"/config.toml ]; do sleep 1; done\nexec "$@"'
    command = ["sh", "-c", waiting, "sh", "offbeat", "reconcile", literal(run_folder(config)), "--on", "kubernetes"]
    token = _mount("token", str(ACCOUNT))
    return _container(RECONCILER, image, command, [*mounts, token], PodOptions({"cpu": "100m", "memory": "512Mi"}))


def _container(name: str, image: str, command: list[str], mounts: Sequence[Document], options: PodOptions) -> Document:
    container: Document = {"name": name, "image": image, "command": command}
    if options.secret:
        container["envFrom"] = [{"secretRef": {"name": options.secret}}]
    if requests := {**options.requests, **options.resources}:
        container["resources"] = {"requests": requests}
    if options.resources:
        container["resources"]["limits"] = dict(options.resources)
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    container["volumeMounts"] = list(mounts)
    return container


def _watched() -> Document:
    """Return the port and the probes of a service that answers monitors; unreachable peers do not make it unhealthy."""

    def probe(path: str, failures: int) -> Document:
        get = {"path": path, "port": PAGE_PORT}
        return {"httpGet": get, "periodSeconds": PERIOD_S, "timeoutSeconds": 5, "failureThreshold": failures}

    return {
        "ports": [{"name": "page", "containerPort": PAGE_PORT}],
        "startupProbe": probe("/healthz", STARTING_S // PERIOD_S),
        "livenessProbe": probe("/healthz", 6),
        "readinessProbe": probe("/readyz", 1),
    }


def _spec(containers: list[Document], volumes: list[Document], secret: str, grace_s: int, options: PodOptions) -> Document:
    shm = {"sizeLimit": options.requests["memory"]} if "memory" in options.requests else {}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            # The group of the volumes' files.
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": containers,
        "volumes": [
            {"name": "config", "configMap": {"name": CONFIG_MAP}},
            {"name": "keys", "secret": {"secretName": secret, "defaultMode": 0o400}},
            {"name": "tmp", "emptyDir": {}},
            # vLLM's and NCCL's processes share memory; the container's limit counts it. Without a limit this bounds it.
            {"name": "shm", "emptyDir": {"medium": "Memory", **shm}},
            *volumes,
        ],
    }


def _with_extra(option: str, spec: Document, options: PodOptions) -> Document:
    if taken := sorted(spec.keys() & options.extra.keys()):
        cure = "Remove it there, and change the files that are written, or patch them in kustomization.yaml."
        raise SettingError(option, taken[0], "offbeat writes this field of the pod itself", cure)
    return {**spec, **options.extra}


def _template(name: str, spec: Document) -> Document:
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PAGE_PORT)}
    if name == LEARNER:
        # A learner that is moved costs the run minutes. `kubectl drain` still moves it: it pauses, and goes on elsewhere.
        annotations |= {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
    return {"metadata": {"labels": LABELS[name], "annotations": annotations}, "spec": spec}


def _token() -> Document:
    """Return the volume of the reconciler's account, which the learner's container does not see."""
    return {
        "name": "token",
        "projected": {
            "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
            ]
        },
    }


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
