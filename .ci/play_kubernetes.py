"""Plays the files of `offbeat deploy kubernetes` in real containers, podman being the kubelet: `.ci/play_kubernetes.py IMAGE`.

The quick start with two actors: a third one joins, one leaves by SIGTERM, the learner is drained and started again, then
killed and started again; the ledger is audited at the end. Then the files of `--scaled-by reconcile`: `Cluster` below is the
API server and the Deployment's controller, and `offbeat scale` asks for three actors, then for one. Fields of the pods that
podman does not take are read, or asserted, here: volumes with fsGroup, the Service's name, the downward API. What else a
cluster does is not here: admission, rights of accounts, NetworkPolicies, limits of memory.

It needs root, podman with netavark and aardvark-dns, kubectl, openssl, and an image such as .ci/build_image makes. PODMAN may
hold a command with options.
"""

import http.server
import json
import os
import secrets
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

PODMAN = os.environ.get("PODMAN", "podman").split()
NETWORK = "offbeat-play"
SETTINGS = ("launch.num_actors=2", "train.num_steps=1500")
GRACE_S = 50
SCALE = "/apis/apps/v1/namespaces/default/deployments/actor/scale"


def podman(*words: str, is_checked: bool = True) -> str:
    """Run podman; return its output."""
    done = subprocess.run([*PODMAN, *words], capture_output=True, text=True, timeout=400, check=False)
    if is_checked and done.returncode:
        raise SystemExit(f"podman {' '.join(words[:3])}: {done.stderr.strip()}")
    return done.stdout.strip()


class Node:
    """A machine that starts pods of the manifests in `folder`, with their volumes in `scratch`."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        built = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True).stdout
        self._objects: dict[tuple[str, str], Any] = {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(built)}
        self.claims = scratch / "claims"
        self.token: dict[str, str] = {}
        """The files of the account that pods may have, by name."""
        self.address = ""
        """The address of the API server."""
        self._scratch = scratch

    def start(self, kind: str, name: str, pod: str) -> None:
        """Start a pod of a Job or a Deployment; its first container has the pod's name."""
        template = self._objects[kind, name]["spec"]["template"]
        spec, labels = template["spec"], template["metadata"]["labels"]
        shutil.rmtree(self._scratch / pod, ignore_errors=True)
        volumes = {volume["name"]: self._make(pod, volume, spec["securityContext"]["fsGroup"]) for volume in spec["volumes"]}
        network = ["--hostname", pod, "--network", NETWORK]
        for (other, service), body in self._objects.items():
            if other == "Service" and body["spec"]["selector"].items() <= labels.items():
                network += ["--network-alias", service]
        first, *more = spec["containers"]
        if more:
            # The pod's network, which stays when one of its containers has ended.
            podman("run", "-d", "--name", f"{pod}-network", *network, "--entrypoint", '["sleep"]', first["image"], "infinity")
            network = ["--network", f"container:{pod}-network"]
        for name, container in [(pod, first), *((f"{pod}-{one['name']}", one) for one in more)]:
            self._run(name, pod, container, spec["securityContext"], volumes, network)

    def _run(
        self, name: str, pod: str, container: Any, user: Any, volumes: dict[str, tuple[Path, bool]], network: list[str]
    ) -> None:
        rights = container["securityContext"]
        assert rights == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        command = [word.replace("$(POD_NAME)", pod) for word in container["command"]]
        words = ["run", "-d", "--name", name, *network, "--read-only", "--read-only-tmpfs=false"]
        words += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--group-add", str(user["fsGroup"])]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--entrypoint", json.dumps(command[:1])]
        words += [
            word for entry in container.get("env", []) for word in ("--env", f"{entry['name']}={entry.get('value', pod)}")
        ]
        words += ["--env", f"KUBERNETES_SERVICE_HOST={self.address}"]
        for mount in container["volumeMounts"]:
            folder, is_read_only = volumes[mount["name"]]
            words += ["--volume", f"{folder}:{mount['mountPath']}{':ro' if is_read_only or mount.get('readOnly') else ''}"]
        podman(*words, container["image"], *command[1:])

    def _make(self, pod: str, volume: dict[str, Any], group: int) -> tuple[Path, bool]:
        """Return the folder of a volume, and whether it is read-only."""
        if "configMap" in volume:
            entries, mode = self._objects["ConfigMap", volume["configMap"]["name"]]["data"], 0o644
        elif "secret" in volume:
            # With an fsGroup the group gets what the owner has of `defaultMode`.
            assert volume["secret"]["defaultMode"] == 0o400
            entries, mode = self._objects["Secret", volume["secret"]["secretName"]]["stringData"], 0o440
        elif "projected" in volume:
            entries, mode = self.token, 0o440
        else:
            claim = volume.get("persistentVolumeClaim")
            assert claim is not None or "emptyDir" in volume, volume
            folder = self._scratch / pod / volume["name"] if claim is None else self.claims / claim["claimName"]
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, 0, group)
            folder.chmod(0o2775)
            return folder, False
        folder = self._scratch / pod / volume["name"]
        folder.mkdir(parents=True)
        for name, text in entries.items():
            (folder / name).write_text(text)
            os.chown(folder / name, 0, group)
            (folder / name).chmod(mode)
        return folder, True


class Cluster:
    """An API server that knows the scale of the actors' Deployment, and a controller that starts and stops its pods."""

    def __init__(self, node: Node, scratch: Path, address: str) -> None:
        self.replicas = 1
        """Number of pods that are wanted; a Deployment that says nothing begins with 1."""
        self.pods: list[str] = []
        """Pods that run, the oldest first."""
        self.stopped: list[str] = []
        self._node = node
        self._num_started = 0
        self._is_over = threading.Event()
        key, certificate = scratch / "key.pem", scratch / "ca.crt"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=play"]
        words += ["-addext", f"subjectAltName=IP:{address}", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(words, check=True, capture_output=True)
        node.address = address
        node.token = {"token": secrets.token_hex(), "namespace": "default", "ca.crt": certificate.read_text()}
        self._server = http.server.ThreadingHTTPServer(("", 443), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._threads = [threading.Thread(target=self._server.serve_forever), threading.Thread(target=self._control)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both."""
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    def _handler(cluster) -> type[http.server.BaseHTTPRequestHandler]:  # noqa: N805, as the handler has a self of its own
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.headers["Authorization"] == f"Bearer {cluster._node.token['token']}"
                if not is_known or self.path != SCALE:
                    self.send_error(404 if is_known else 401)
                    return
                scale = {"spec": {"replicas": cluster.replicas}, "status": {"replicas": len(cluster.pods)}}
                body = json.dumps(scale).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_PATCH(self) -> None:
                change = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                cluster.replicas = change["spec"]["replicas"]
                self.do_GET()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def _control(self) -> None:
        while not self._is_over.wait(0.5):
            self.pods = [pod for pod in self.pods if state(pod).startswith("running")]
            while len(self.pods) < self.replicas:
                pod = f"actor-{self._num_started}"
                self._num_started += 1
                self._node.start("Deployment", "actor", pod)
                self.pods.append(pod)
            while len(self.pods) > self.replicas:
                podman("stop", "-t", str(GRACE_S), self.pods[-1])
                self.stopped.append(self.pods.pop())


def get(pod: str, path: str) -> tuple[int, str]:
    """Return the status and the text of a page of a pod; status 0 where nothing answers."""
    address = podman("inspect", pod, "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
    try:
        with urllib.request.urlopen(f"http://{address}:9400{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


def is_ready(pod: str) -> bool:
    """Tell what the readiness probe says."""
    return get(pod, "/readyz")[0] == 200


def version() -> float:
    """Return the policy version that the learner shows to Prometheus; -1 before it does."""
    lines = get("learner", "/metrics")[1].splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith("offbeat_policy_version ")), -1)


def state(pod: str) -> str:
    """Return how a container is, such as `exited 0`."""
    return podman("inspect", pod, "--format", "{{.State.Status}} {{.State.ExitCode}}")


def wait_for(what: str, is_so: Callable[[], bool], timeout_s: float = 300) -> None:
    """Wait until something is so, and print how long it took."""
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > timeout_s:
            raise SystemExit(f"{what}: not within {timeout_s} s")
        time.sleep(0.5)
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


def audit(node: Node) -> None:
    """Check the run that has ended."""
    subprocess.run([sys.executable, "-m", "offbeat.deploy.cli.main", "audit", node.claims / "runs" / "quickstart"], check=True)


def play(node: Node) -> None:
    """Live through a run's good and bad hours."""
    actors = ["actor-0", "actor-1", "actor-2"]
    for pod in actors[:2]:
        node.start("Deployment", "actor", pod)
    node.start("Job", "learner", "learner")
    wait_for("learner and two actors are ready", lambda: all(map(is_ready, ["learner", *actors[:2]])))
    print(podman("exec", "learner", "offbeat", "status", "/runs/quickstart"))
    assert "<html" in get("learner", "/")[1]
    node.start("Deployment", "actor", actors[2])
    wait_for("a third actor is ready", lambda: is_ready(actors[2]))
    began = time.monotonic()
    podman("stop", "-t", str(GRACE_S), actors[0])
    print(f"an actor left {time.monotonic() - began:.1f} s after SIGTERM: {state(actors[0])}")
    assert state(actors[0]) == "exited 0"
    for how, signal, code in (("drained", "TERM", 143), ("killed", "KILL", 137)):
        before = version()
        podman("kill", "-s", signal, "learner")
        wait_for(f"the learner is {how}", lambda: state("learner").startswith("exited"))
        assert state("learner") == f"exited {code}", state("learner")
        podman("rm", "learner")
        node.start("Job", "learner", "learner")
        wait_for("it is ready again", lambda: is_ready("learner"))
        wait_for("it is further than before", lambda before=before: version() > before + 50)
    wait_for("the run's end", lambda: state("learner").startswith("exited"), 1200)
    wait_for("the actors' end", lambda: all(state(pod).startswith("exited") for pod in actors))
    assert [state(pod) for pod in ("learner", *actors)] == ["exited 0"] * 4
    audit(node)


def play_scaling(node: Node, cluster: Cluster) -> None:
    """Let `offbeat reconcile` follow what `offbeat scale` asks for, to the run's end."""
    node.start("Job", "learner", "learner")
    wait_for("the two actors of the settings are ready", lambda: len(cluster.pods) == 2 and all(map(is_ready, cluster.pods)))
    for number in (3, 1):
        podman("exec", "learner", "offbeat", "scale", "/runs/quickstart", str(number))
        wait_for(f"as many actors are ready as were asked for, {number}", lambda n=number: len(cluster.pods) == n)
        wait_for("and answer", lambda: all(map(is_ready, cluster.pods)))
    assert [state(pod) for pod in cluster.stopped] == ["exited 0"] * 2
    wait_for("the run's end", lambda: state("learner").startswith("exited"), 1200)
    wait_for("no actor is wanted", lambda: cluster.replicas == 0)
    wait_for("the end of reconcile", lambda: state("learner-reconciler").startswith("exited"))
    assert [state(pod) for pod in ("learner", "learner-reconciler")] == ["exited 0"] * 2
    print(podman("logs", "learner-reconciler"))
    audit(node)


def main() -> None:
    """Write the manifests of the image, play them, and remove what there was."""
    (image,) = sys.argv[1:]
    for options in ([], ["--scaled-by", "reconcile"]):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "deployed")
            deploy = ["deploy", "kubernetes", *SETTINGS, "--out", folder, "--image", image, *options]
            subprocess.run([sys.executable, "-m", "offbeat.deploy.cli.main", *deploy], check=True)
            podman("network", "create", NETWORK)
            node = Node(folder, Path(scratch))
            try:
                if not options:
                    play(node)
                    continue
                gateway = json.loads(podman("network", "inspect", NETWORK))[0]["subnets"][0]["gateway"]
                cluster = Cluster(node, Path(scratch), gateway)
                try:
                    play_scaling(node, cluster)
                finally:
                    cluster.close()
            finally:
                # First those that share the network of another one.
                podman("rm", "-f", "-i", "learner", "learner-reconciler", is_checked=False)
                left = podman("ps", "-a", "-q", "--filter", f"network={NETWORK}").split()
                podman("rm", "-f", "-i", *left, is_checked=False)
                podman("network", "rm", NETWORK, is_checked=False)


if __name__ == "__main__":
    main()
