"""The manifests of a run on Kubernetes: a Job for the learner, a Deployment for the actors, and what they need.

| file | contents |
|---|---|
| `config.yaml` | ConfigMaps: the user's TOML file, the keys that may connect |
| `keys.yaml` | Secrets: the keys of the learner and those of the actors |
| `learner.yaml` | Job, its volume claim, Service |
| `actors.yaml` | Deployment |
| `network.yaml` | NetworkPolicies |
| `scaling.yaml` | KEDA's ScaledObject, or the rights of `offbeat reconcile` |
| `kustomization.yaml` | all of them |

The learner is a Job because runs end: a StatefulSet would start a finished learner again and again, and keep its GPUs.
"""

import logging
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from offbeat.common.settings.config import Config, actors_wanted
from offbeat.common.settings.hub_keys import LEARNER
from offbeat.deploy.clusters import container, kubernetes_pods
from offbeat.deploy.clusters.services import FLEET
from offbeat.deploy.local.keygen import ALLOWED_KEYS
from offbeat.deploy.local.memory import GIB, engine_need, learner_need, offloaded_bytes
from offbeat.deploy.local.model_sizes import model_sizes

logger = logging.getLogger(__name__)

KUSTOMIZATION = "kustomization.yaml"
_COMMENTS = {
    "keys.yaml": (
        "The keys are readable here: keep this file out of version control. Where sealed-secrets or the External Secrets",
        "Operator make secrets, have them make these, and remove this file from kustomization.yaml.",
        "operator.key is for `offbeat status` and `offbeat set` in the learner's pod: whoever may exec there may use it.",
    ),
    "network.yaml": (
        "These rules are about incoming connections. Outgoing ones are free, because model hubs, judges and trackers may",
        "be anywhere. To restrict them, add policyTypes Egress, with rules for DNS (port 53), the run's pods, and those.",
    ),
}
"""Further comments at the head of a file."""
PROCESS_BYTES = 4 * GIB
"""Memory of one service's process for its libraries and what it computes on the CPU: an estimate."""
RESTARTS = 50
"""Number of times that Kubernetes starts a learner that failed again; between two it waits up to five minutes."""
ABSENT_FOR = "15m"
"""Time for which KEDA leaves the actors as they are when the learner's numbers are missing, in Prometheus's notation."""
ABSENT_S = 900


class Cluster(NamedTuple):
    """The choices that a run's settings do not make."""

    image: str
    namespace: str
    learner: kubernetes_pods.PodOptions
    actor: kubernetes_pods.PodOptions
    storage: str = "100Gi"
    """Size of the learner's volume."""
    storage_class: str = ""
    """Empty: the cluster's default."""
    monitoring: str = ""
    """Namespace whose pods may read pages and numbers. Empty: none."""
    prometheus: str = ""
    """Address of the Prometheus that KEDA asks for the number of actors wanted. Empty: no KEDA."""
    reconciles: bool = False
    """Run `offbeat reconcile` beside the learner."""


def write_manifests(path: Path, overrides: Sequence[str], out: Path, cluster: Cluster) -> str:
    """Write the manifests of the run in the TOML file `path` to `out`; return what the user does next.

    Raises `SettingError` for keys in `out` that are incomplete, and for settings that contradict each other in a cluster.
    """
    settings, in_cluster = container.load_in_container(path, overrides)
    settings = [kubernetes_pods.literal(setting) for setting in settings]
    cluster = _with_requests(in_cluster, cluster)
    texts = container.fleet_keys(out / "keys")
    documents = {
        "config.yaml": _config_maps(path, texts),
        "keys.yaml": _secrets(texts),
        "learner.yaml": _learner(in_cluster, settings, cluster),
        "actors.yaml": [_actors(in_cluster, settings, cluster)],
        "network.yaml": _network(in_cluster, cluster),
        "scaling.yaml": _scaling(in_cluster, cluster),
    }
    written = {name: content for name, content in documents.items() if content}
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    kustomization |= {"namespace": cluster.namespace, "resources": list(written)}
    comment = "Written by `offbeat deploy kubernetes`. Change it as you like."
    out.mkdir(parents=True, exist_ok=True)
    for name, content in written.items():
        container.write_yaml(out / name, "\n".join([comment, *_COMMENTS.get(name, ())]), content)
    container.write_yaml(out / KUSTOMIZATION, f"{comment} Start: kubectl apply -k .", [kustomization])
    return _next_steps(in_cluster, out, cluster, [*written, KUSTOMIZATION])


def _with_requests(config: Config, cluster: Cluster) -> Cluster:
    """Return the cluster with estimated requests for processors and memory, where the user has named none."""
    learner, actor = cluster.learner, cluster.actor
    requests = {LEARNER: {"cpu": str(config.launch.learner_processes)}, FLEET: {"cpu": "2"}}
    sizes = model_sizes(config.model.path, asks_hub=False)
    if sizes is not None:
        # The double buffer of the weights, and what a GPU would hold where there is none.
        weights = 2 * sizes.num_parameters * (2 if config.model.dtype == "bfloat16" else 4)
        # An optimizer in host memory is in this memory with a GPU or without.
        on_cpu = learner_need(replace(config, train=replace(config.train, deepspeed={})), sizes)
        on_learner = on_cpu.num_bytes
        if kubernetes_pods.GPU in learner.resources:
            optimizer = on_cpu.part_bytes("optimizer") - learner_need(config, sizes).part_bytes("optimizer")
            on_learner = optimizer + offloaded_bytes(config, sizes)
        on_actor = 0.0 if kubernetes_pods.GPU in actor.resources else engine_need(config, sizes).num_bytes
        processes = config.launch.learner_processes
        requests[LEARNER]["memory"] = _gib_of(processes * (PROCESS_BYTES + on_learner) + weights)
        requests[FLEET]["memory"] = _gib_of(PROCESS_BYTES + on_actor + weights)
    elif "memory" not in learner.resources or "memory" not in actor.resources:
        logger.warning(
            "the config of %s is not on this machine, so the pods request no memory and are killed first where it is short: "
            "give --learner memory=... and --actor memory=...",
            config.model.path,
        )
    return cluster._replace(learner=_requesting(learner, requests[LEARNER]), actor=_requesting(actor, requests[FLEET]))


def _requesting(options: kubernetes_pods.PodOptions, requests: dict[str, str]) -> kubernetes_pods.PodOptions:
    return options._replace(requests={name: what for name, what in requests.items() if name not in options.resources})


def _gib_of(num_bytes: float) -> str:
    return f"{math.ceil(num_bytes / GIB)}Gi"


def _object(version: str, kind: str, name: str, fields: container.Document, *, labeled: bool = False) -> container.Document:
    """Return an object of the cluster; `labeled`: with the labels of the service of this name."""
    labels = {"labels": kubernetes_pods.LABELS[name]} if labeled else {}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **labels}, **fields}


def _config_maps(path: Path, texts: dict[str, str]) -> list[container.Document]:
    config, allowed = {"run.toml": path.read_text(encoding="utf-8")}, {ALLOWED_KEYS: texts[ALLOWED_KEYS]}
    return [
        _object("v1", "ConfigMap", kubernetes_pods.CONFIG_MAP, {"data": config}),
        _object("v1", "ConfigMap", kubernetes_pods.ALLOWED_MAP, {"data": allowed}),
    ]


def _secrets(texts: dict[str, str]) -> list[container.Document]:
    return [
        _object("v1", "Secret", name, {"type": "Opaque", "stringData": {file: texts[file] for file in files}})
        for name, files in (
            (kubernetes_pods.LEARNER_SECRET, container.LEARNER_KEYS),
            (kubernetes_pods.ACTOR_SECRET, container.ACTOR_KEYS),
        )
    ]


def _learner(config: Config, settings: Sequence[str], cluster: Cluster) -> list[container.Document]:
    claim: container.Document = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": cluster.storage}}}
    if cluster.storage_class:
        claim["storageClassName"] = cluster.storage_class
    ports = {
        "hub": container.HUB_PORT,
        "weights": container.PULL_PORT,
        "collective": container.COLLECTIVE_PORT,
        "page": container.PAGE_PORT,
    }
    service = {
        "selector": kubernetes_pods.LABELS[LEARNER],
        # Actors join before the learner has weights for them.
        "publishNotReadyAddresses": True,
        "ports": [{"name": name, "port": port, "targetPort": port} for name, port in ports.items()],
    }
    job = {
        "backoffLimit": RESTARTS,
        # Never two learners: the next one waits until the last one's end is certain.
        "podReplacementPolicy": "Failed",
        "template": kubernetes_pods.learner_pod(
            config, cluster.image, settings, cluster.learner, reconciles=cluster.reconciles
        ),
    }
    return [
        _object("v1", "PersistentVolumeClaim", kubernetes_pods.CLAIM, {"spec": claim}),
        _object("v1", "Service", LEARNER, {"spec": service}, labeled=True),
        _object("batch/v1", "Job", LEARNER, {"spec": job}, labeled=True),
    ]


def _actors(config: Config, settings: Sequence[str], cluster: Cluster) -> container.Document:
    scaled = bool(cluster.prometheus) or cluster.reconciles
    deployment = {
        # Whoever scales owns the number: applying the files again leaves it alone.
        **({} if scaled else {"replicas": actors_wanted(config)}),
        "selector": {"matchLabels": kubernetes_pods.LABELS[FLEET]},
        # New actors need GPUs that the old ones hold.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "50%"}},
        "template": kubernetes_pods.actor_pod(config, cluster.image, settings, cluster.actor),
    }
    return _object("apps/v1", "Deployment", FLEET, {"spec": deployment}, labeled=True)


def _network(config: Config, cluster: Cluster) -> list[container.Document]:
    """Return policies by which only actors reach the learner, and nobody reaches the actors."""
    monitors: list[container.Document] = []
    if cluster.monitoring:
        namespace = {"matchLabels": {"kubernetes.io/metadata.name": cluster.monitoring}}
        monitors = [{"from": [{"namespaceSelector": namespace}], "ports": [{"port": container.PAGE_PORT}]}]
    # Members of a collective meet each other at ports that the kernel chooses.
    is_collective = config.weights.backend != "pull"
    to_learner: container.Document = {"from": [{"podSelector": {"matchLabels": kubernetes_pods.LABELS[FLEET]}}]}
    if not is_collective:
        to_learner["ports"] = [{"port": container.HUB_PORT}, {"port": container.PULL_PORT}]
    members = [{"podSelector": {"matchLabels": labels}} for labels in kubernetes_pods.LABELS.values()]
    to_actors: list[container.Document] = [{"from": members}] if is_collective else []
    policies: list[container.Document] = []
    for name, rules in ((LEARNER, [to_learner]), (FLEET, to_actors)):
        selector = {"podSelector": {"matchLabels": kubernetes_pods.LABELS[name]}}
        spec = {**selector, "policyTypes": ["Ingress"], "ingress": [*rules, *monitors]}
        policies.append(_object("networking.k8s.io/v1", "NetworkPolicy", name, {"spec": spec}))
    return policies


def _scaling(config: Config, cluster: Cluster) -> list[container.Document]:
    if cluster.prometheus:
        return [_scaled_object(cluster, config.hub.max_actors)]
    return _rights(cluster.namespace) if cluster.reconciles else []


def _scaled_object(cluster: Cluster, most: int) -> container.Document:
    """Return the object by which KEDA copies the number of actors that the learner wants."""
    number = f'max(last_over_time(offbeat_actors_wanted{{namespace="{cluster.namespace}"}}[{ABSENT_FOR}]))'
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        # A run that has ended wants none.
        "metadata": {"serverAddress": cluster.prometheus, "query": f"{number} or vector(0)", "threshold": "1"},
    }
    # The learner waits before it changes its mind, so nothing else does.
    at_once = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": most, "periodSeconds": 15}]}
    spec = {
        "scaleTargetRef": {"name": FLEET},
        "minReplicaCount": 0,
        "maxReplicaCount": most,
        "pollingInterval": 15,
        "cooldownPeriod": ABSENT_S,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": at_once, "scaleDown": at_once}}},
        "triggers": [trigger],
    }
    return _object("keda.sh/v1alpha1", "ScaledObject", FLEET, {"spec": spec})


def _rights(namespace: str) -> list[container.Document]:
    """Return the account of `offbeat reconcile`, which may change the number of actors and nothing else."""
    group, name = "rbac.authorization.k8s.io", kubernetes_pods.RECONCILER
    rule = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": [FLEET], "verbs": ["get", "patch"]}
    binding = {
        "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    return [
        _object("v1", "ServiceAccount", name, {"automountServiceAccountToken": False}),
        _object(f"{group}/v1", "Role", name, {"rules": [rule]}),
        _object(f"{group}/v1", "RoleBinding", name, binding),
    ]


def _estimates(cluster: Cluster) -> str:
    """Return a sentence with the requests that were estimated."""
    estimates = [
        f"{option} " + ", ".join(f"{name}={what}" for name, what in options.requests.items())
        for option, options in (("learner:", cluster.learner), ("each actor:", cluster.actor))
        if options.requests
    ]
    if not estimates:
        return ""
    return f"\nRequested by estimate ({'; '.join(estimates)}), without limits; --learner and --actor name your own.\n"


def _next_steps(config: Config, out: Path, cluster: Cluster, names: Sequence[str]) -> str:
    space, folder, run = (shlex.quote(word) for word in (cluster.namespace, str(out), container.run_folder(config)))
    return f"""\
made {", ".join(names)} in {out}.{_estimates(cluster)} To start the run:
  kubectl create namespace {space}
  kubectl apply -k {folder}
To look at it:
  kubectl -n {space} exec -it job/{LEARNER} -c {LEARNER} -- offbeat status {run} --watch
  kubectl -n {space} port-forward job/{LEARNER} {container.PAGE_PORT}, and http://127.0.0.1:{container.PAGE_PORT}/ in a browser
Relative paths in {container.CONFIG} are relative to {container.WORK} in the image.
keys.yaml holds secret keys: keep it as you keep passwords."""
