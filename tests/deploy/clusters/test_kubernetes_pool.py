"""Claims about the pool on Kubernetes, against an API server that knows the scale of one Deployment."""

import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.deploy.clusters.kubernetes_pods import KubernetesPool, open_kubernetes_pool
from offbeat.deploy.clusters.pool import Instance, PoolError

PATH = "/apis/apps/v1/namespaces/my-run/deployments/actor/scale"


class ApiServer:
    """Answers for PATH those who bear the token."""

    def __init__(self) -> None:
        self.token, self.replicas, self.pods = "first", 0, 0
        self.patches: list[dict[str, Any]] = []
        self.answer: bytes | None = None
        """Sent instead of the scale."""


def handler_of(api: ApiServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.headers["Authorization"] != f"Bearer {api.token}":
                self.send(401, {"kind": "Status", "message": "Unauthorized"})
            elif self.path != PATH:
                self.send(404, {"kind": "Status", "message": "not found"})
            else:
                # Go leaves out a spec of 0 replicas.
                spec = {"replicas": api.replicas} if api.replicas else {}
                self.send(200, {"kind": "Scale", "spec": spec, "status": {"replicas": api.pods}})

        def do_PATCH(self) -> None:
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            api.patches.append(patch)
            api.replicas = patch["spec"]["replicas"]
            self.do_GET()

        def send(self, status: int, content: object) -> None:
            body = json.dumps(content).encode() if api.answer is None else api.answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    return Handler


@contextmanager
def serving(api: ApiServer, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve on loopback, and return the port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler_of(api))
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("my-run")
    return tmp_path


@pytest.fixture
def api() -> ApiServer:
    return ApiServer()


@pytest.fixture
def pool(api: ApiServer, account: Path) -> Iterator[KubernetesPool]:
    with serving(api) as port:
        yield KubernetesPool(f"http://127.0.0.1:{port}", account)


def states(pool: KubernetesPool) -> list[str]:
    return [instance.state for instance in pool.running()]


def test_actors_are_started_and_released_by_the_number_of_replicas(api: ApiServer, pool: KubernetesPool) -> None:
    assert pool.running() == []
    pool.start(3)
    pool.start(1)
    assert (api.replicas, states(pool)) == (4, ["starting"] * 4)
    api.pods = 4
    assert states(pool) == ["working"] * 4
    pool.release([instance.name for instance in pool.running()[2:]])
    assert (api.replicas, states(pool)) == (2, ["working"] * 2 + ["leaving"] * 2)
    api.pods = 2
    pool.release(["actor-0", "actor-1"])
    api.pods = 0
    assert (api.replicas, pool.running()) == (0, [])
    assert api.patches[0] == {"spec": {"replicas": 3}}


def test_names_tell_the_replicas_apart(api: ApiServer, pool: KubernetesPool) -> None:
    api.replicas, api.pods = 3, 2
    assert pool.running() == [
        Instance("actor-0", "working"),
        Instance("actor-1", "working"),
        Instance("actor-2", "starting"),
    ]


def test_number_never_falls_below_zero_when_somebody_else_has_scaled(api: ApiServer, pool: KubernetesPool) -> None:
    api.replicas = api.pods = 1
    pool.release(["actor-0", "actor-1", "actor-2"])
    assert api.replicas == 0


def test_renewed_token_is_read_again(api: ApiServer, pool: KubernetesPool, account: Path) -> None:
    pool.start(1)
    api.token = "second"
    with pytest.raises(PoolError, match=r"HTTP 401.*Unauthorized"):
        pool.running()
    (account / "token").write_text("second")
    assert len(pool.running()) == 1


def test_what_the_cluster_refuses_is_told_and_changes_nothing(api: ApiServer, account: Path) -> None:
    with serving(api) as port:
        (account / "namespace").write_text("elsewhere")
        elsewhere = KubernetesPool(f"http://127.0.0.1:{port}", account)
        with pytest.raises(PoolError, match=r"namespaces/elsewhere/.*HTTP 404.*not found"):
            elsewhere.start(1)
    assert not api.patches
    with pytest.raises(PoolError, match="does not answer"):
        KubernetesPool(f"http://127.0.0.1:{port}", account).running()


def test_answer_that_is_no_scale_is_an_error_of_the_pool(api: ApiServer, pool: KubernetesPool) -> None:
    api.answer = b"<html>"
    with pytest.raises(PoolError, match="something else than a scale"):
        pool.running()


def test_pod_finds_its_cluster_and_trusts_only_its_certificate(
    api: ApiServer, account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=api -keyout key -out ca.crt"
    subprocess.run([*make.split(), "-addext", "subjectAltName=IP:127.0.0.1"], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
    with serving(api, context) as port:
        monkeypatch.setattr("offbeat.deploy.clusters.kubernetes_pods.ACCOUNT", account)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        pool = open_kubernetes_pool(Config(), "")
        pool.start(2)
        assert api.replicas == 2
        with pytest.raises(PoolError, match=r"does not answer.*CERTIFICATE_VERIFY_FAILED"):
            KubernetesPool(f"https://127.0.0.1:{port}", account).running()


def test_outside_of_a_cluster_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingError, match="deploy kubernetes --scaled-by reconcile"):
        open_kubernetes_pool(Config(), "")
