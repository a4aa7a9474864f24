"""A real Apache Kafka of one node (KRaft: broker and controller in one process) or of two, of the jars that
`ops/install-kafka` fetches."""

from __future__ import annotations

import os
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import trustme
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from freshet.process.ports import lease_ports
from tests.servers.certificates import issued
from tests.servers.processes import Process, run_to_end

_ROOT = Path(__file__).parents[2]
_START_S = 180.0
"""Alone it is up in 2 to 4 s; beside builds and tests on the same two cores it took 90."""


USER, PASSWORD = "freshet", "a-word-of-the-tests"
"""Who may use the port with TLS."""


RIGHTS = {
    ResourceType.TOPIC: (
        *("READ", "WRITE", "CREATE", "DELETE"),
        *("DESCRIBE", "DESCRIBE_CONFIGS", "ALTER", "ALTER_CONFIGS"),
    ),
    ResourceType.GROUP: ("READ", "DESCRIBE"),
    ResourceType.TRANSACTIONAL_ID: ("WRITE", "DESCRIBE"),
}
"""What the services do, to names that begin with the log's prefix and a dot; docs/security.md says so."""


class Kafka:
    """One node in one folder. Killed or stopped, it starts again on its data and its ports.

    `port` takes any client, `secure_port` USER by SASL PLAIN or SCRAM-SHA-512 over TLS, with a certificate
    of the authority `certificate`, and lets it do what `allow` says, nothing else.
    """

    def __init__(
        self,
        folder: Path,
        properties: Mapping[str, str] | None = None,
        *,
        joins: Kafka | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the folder, which must be empty or not there; nothing runs yet.

        Args:
            folder: data, settings and the log `broker.log`.
            properties: settings of the broker, besides and above ours.
            joins: node 1 of a cluster, its controller; this becomes node 2, a broker only.
            environment: variables of the broker's process, beside the present ones.
        """
        self.port, self.secure_port, self._controller_port = lease_ports(3)
        self._cluster_id = urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")
        folder.mkdir(parents=True, exist_ok=True)
        self.certificate = folder / "ca.pem"
        _make_certificate(folder)
        self._settings = folder / "server.properties"
        settings = _settings(folder / "data", self.port, self._controller_port)
        if joins is not None:
            self._cluster_id = joins._cluster_id
            settings |= _second(self.port, joins._controller_port)
        settings["listeners"] += f",SECURE://127.0.0.1:{self.secure_port}"
        settings |= _secure(folder / "broker.pem") | dict(properties or {})
        self._settings.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        tool = [*_java(), "kafka.tools.StorageTool"]
        run_to_end(
            [
                *(*tool, "format", f"--cluster-id={self._cluster_id}", "-c", str(self._settings)),
                *("--add-scram", f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"),
            ],
            within_s=_START_S,
        )
        self._process = Process(
            [*_java(), "-Xms256m", "-Xmx512m", "kafka.Kafka", str(self._settings)],
            folder / "broker.log",
            {**os.environ, **(environment or {})},
        )

    @property
    def bootstrap(self) -> str:
        """`host:port`, as clients name it."""
        return f"127.0.0.1:{self.port}"

    def allow(self, prefix: str) -> None:
        """Give USER the RIGHTS to what begins with `prefix` and a dot."""
        bindings = [
            AclBinding(
                kind,
                f"{prefix}.",
                ResourcePatternType.PREFIXED,
                f"User:{USER}",
                "*",
                AclOperation[right],
                AclPermissionType.ALLOW,
            )
            for kind, rights in RIGHTS.items()
            for right in rights
        ]
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        for made in admin.create_acls(bindings).values():
            made.result(_START_S)
        given = AclBindingFilter(
            ResourceType.ANY,
            f"{prefix}.",
            ResourcePatternType.PREFIXED,
            f"User:{USER}",
            None,  # type: ignore[arg-type]  # of any host
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        deadline, pause = time.monotonic() + _START_S, threading.Event()
        while len(admin.describe_acls(given).result(_START_S)) < len(bindings):
            if time.monotonic() > deadline:
                raise RuntimeError("the broker does not go by the rights that it was given")
            pause.wait(0.02)

    @property
    def pid(self) -> int:
        """Process id of the broker that was started last."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Does it run, or is it paused?"""
        return self._process.alive

    def start(self) -> None:
        """Start it and wait until it takes part in the cluster.

        RuntimeError: with the end of its log, if it does not.
        """
        self._process.start(lambda said: "Kafka Server started" in said, within_s=_START_S)

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        self._process.launch()

    def stop(self) -> None:
        """End it as an operator would. Idempotent."""
        self._process.stop()

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing is answered."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self._process.resume()

    def restart(self) -> None:
        """SIGKILL it, if it runs, and start it again on its data."""
        self.kill()
        self.start()

    def __enter__(self) -> Kafka:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()  # what it wrote is not wanted any more


def secure_url(
    kafka: Kafka,
    prefix: str,
    folder: Path,
    mechanism: str,
    *,
    password: str = PASSWORD,
    authority: Path | None = None,
) -> str:
    """Return the URL of the log behind `secure_port`; its settings are written into `folder`."""
    (folder / "password").write_text(password)
    (folder / "kafka.properties").write_text(
        f"security.protocol=SASL_SSL\nsasl.mechanism={mechanism}\n"
        f"sasl.username={USER}\nsasl.password=${{file:{folder}/password}}\n"
        f"ssl.ca.location={authority or kafka.certificate}\n"
    )
    return f"kafka://127.0.0.1:{kafka.secure_port}/{prefix}?properties={folder}/kafka.properties"


def _java() -> list[str]:
    """Return the command of a JVM. It lives for minutes, half of which the optimising compiler would take."""
    jars = Path(os.environ.get("FRESHET_TEST_KAFKA", _ROOT / "build" / "kafka"))
    if not any(jars.glob("kafka_*.jar")):
        raise RuntimeError(
            f"expected Kafka's jars in {jars}, found none: run ops/install-kafka, or pytest -m 'not kafka'"
        )
    quick = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    logs = f"-Dlog4j2.configurationFile={_ROOT / 'ops/kafka/log4j2.properties'}"
    return ["java", *quick, logs, "-cp", f"{jars}/*"]


def _settings(data: Path, port: int, controller_port: int) -> dict[str, str]:
    """Settings of a cluster of one: internal topics have one replica, and groups do not wait for members."""
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        "broker.heartbeat.interval.ms": "500",
        "broker.session.timeout.ms": "3000",  # who was killed comes back no sooner than this (default 9 s)
    }


def _second(port: int, controller_port: int) -> dict[str, str]:
    """Settings of a broker in the cluster of that controller."""
    return {
        "process.roles": "broker",
        "node.id": "2",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port}",
    }


def _secure(keystore: Path) -> dict[str, str]:
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    return {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL",
        "listener.name.secure.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "listener.name.secure.scram-sha-512.sasl.jaas.config": "org.apache.kafka.common.security.scram."
        "ScramLoginModule required;",
        "listener.name.secure.plain.sasl.jaas.config": f'{login} user_{USER}="{PASSWORD}";',
        "listener.name.secure.ssl.keystore.type": "PEM",
        "listener.name.secure.ssl.keystore.location": str(keystore),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # who comes by a port without a password: the tests themselves
    }


def _make_certificate(folder: Path) -> None:
    """`ca.pem`, and `broker.pem` with the broker's certificate and key. Kafka reads keys in PKCS #8 only."""
    files = issued(trustme.CA(), folder, "broker")
    key = load_pem_private_key(files.key.read_bytes(), None)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files.ca.rename(folder / "ca.pem")
    (folder / "broker.pem").write_bytes(text + files.cert.read_bytes())
