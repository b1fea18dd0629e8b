"""Plays the files of `offbeat deploy kubernetes` in real containers, podman being the kubelet: `.ci/play_kubernetes.py IMAGE`.

The quick start with two actors: a third one joins, one leaves by SIGTERM, the learner is drained and started again, then killed
and started again; the ledger is audited at the end. Fields of the pods that podman does not take are read, or asserted, here:
volumes with fsGroup, the Service's name, the downward API. What a cluster does is not here: controllers, admission,
NetworkPolicies, limits of memory.

It needs root, podman with netavark and aardvark-dns, kubectl, and an image such as .ci/build_image makes. PODMAN may hold a
command with options.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
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
        self._scratch = scratch

    def start(self, kind: str, name: str, pod: str) -> None:
        """Start a pod of a Job or a Deployment."""
        template = self._objects[kind, name]["spec"]["template"]
        spec, labels = template["spec"], template["metadata"]["labels"]
        (container,) = spec["containers"]
        rights = container["securityContext"]
        assert rights == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        user = spec["securityContext"]
        command = [word.replace("$(POD_NAME)", pod) for word in container["command"]]
        words = ["run", "-d", "--name", pod, "--hostname", pod, "--network", NETWORK, "--read-only", "--read-only-tmpfs=false"]
        words += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--group-add", str(user["fsGroup"])]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--entrypoint", json.dumps(command[:1])]
        for (other, service), body in self._objects.items():
            if other == "Service" and body["spec"]["selector"].items() <= labels.items():
                words += ["--network-alias", service]
        words += [
            word for entry in container.get("env", []) for word in ("--env", f"{entry['name']}={entry.get('value', pod)}")
        ]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        shutil.rmtree(self._scratch / pod, ignore_errors=True)
        for mount in container["volumeMounts"]:
            folder, is_read_only = self._make(pod, volumes[mount["name"]], user["fsGroup"])
            words += ["--volume", f"{folder}:{mount['mountPath']}{':ro' if is_read_only else ''}"]
        podman(*words, container["image"], *command[1:])

    def _make(self, pod: str, volume: dict[str, Any], group: int) -> tuple[Path, bool]:
        """Return the folder of a volume, and whether it is read-only."""
        if "configMap" in volume:
            entries, mode = self._objects["ConfigMap", volume["configMap"]["name"]]["data"], 0o644
        elif "secret" in volume:
            # With an fsGroup the group gets what the owner has of `defaultMode`.
            assert volume["secret"]["defaultMode"] == 0o400
            entries, mode = self._objects["Secret", volume["secret"]["secretName"]]["stringData"], 0o440
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
    wait_for("the run's end", lambda: state("learner").startswith("exited"))
    wait_for("the actors' end", lambda: all(state(pod).startswith("exited") for pod in actors))
    assert [state(pod) for pod in ("learner", *actors)] == ["exited 0"] * 4
    subprocess.run([sys.executable, "-m", "offbeat.deploy.cli.main", "audit", node.claims / "runs" / "quickstart"], check=True)


def main() -> None:
    """Write the manifests of the image, play them, and remove what there was."""
    (image,) = sys.argv[1:]
    pods = ("actor-0", "actor-1", "actor-2", "learner")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "deployed")
        deploy = ["deploy", "kubernetes", *SETTINGS, "--out", folder, "--image", image]
        subprocess.run([sys.executable, "-m", "offbeat.deploy.cli.main", *deploy], check=True)
        podman("network", "create", NETWORK)
        try:
            play(Node(folder, Path(scratch)))
        finally:
            podman("rm", "-f", "-i", *pods, is_checked=False)
            podman("network", "rm", NETWORK, is_checked=False)


if __name__ == "__main__":
    main()
