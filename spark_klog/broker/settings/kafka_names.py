"""Names of Apache Kafka's broker settings that have no use here, and suggestions for unknown names.

They are the names in KafkaConfig of 0.10.2, 3.9 and 4.1, without those that this broker uses. A configuration written
for Kafka must start this broker too, so these names are accepted, and one line of the log lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Names by prefix.
_NAMES = {
    "alter.": """
        config.policy.class.name log.dirs.replication.quota.window.num log.dirs.replication.quota.window.size.seconds
    """,
    "broker.": """
        heartbeat.interval.ms id.generation.enable rack session.timeout.ms
    """,
    "compression.": """
        gzip.level lz4.level type zstd.level
    """,
    "controlled.": """
        shutdown.enable shutdown.max.retries shutdown.retry.backoff.ms
    """,
    "controller.": """
        quorum.append.linger.ms quorum.bootstrap.servers quorum.election.backoff.max.ms quorum.election.timeout.ms
        quorum.fetch.timeout.ms quorum.request.timeout.ms quorum.retry.backoff.ms quorum.voters quota.window.num
        quota.window.size.seconds socket.timeout.ms
    """,
    "delegation.": """
        token.expiry.check.interval.ms token.expiry.time.ms token.master.key token.max.lifetime.ms token.secret.key
    """,
    "group.": """
        consumer.assignors consumer.heartbeat.interval.ms consumer.max.heartbeat.interval.ms
        consumer.max.session.timeout.ms consumer.max.size consumer.migration.policy consumer.min.heartbeat.interval.ms
        consumer.min.session.timeout.ms consumer.session.timeout.ms coordinator.append.linger.ms
        coordinator.rebalance.protocols coordinator.threads share.assignors share.delivery.count.limit
        share.heartbeat.interval.ms share.max.groups share.max.heartbeat.interval.ms share.max.record.lock.duration.ms
        share.max.session.timeout.ms share.max.share.sessions share.max.size share.min.heartbeat.interval.ms
        share.min.record.lock.duration.ms share.min.session.timeout.ms share.partition.max.record.locks
        share.record.lock.duration.ms share.session.timeout.ms streams.heartbeat.interval.ms
        streams.max.heartbeat.interval.ms streams.max.session.timeout.ms streams.max.size streams.max.standby.replicas
        streams.min.heartbeat.interval.ms streams.min.session.timeout.ms streams.num.standby.replicas
        streams.session.timeout.ms
    """,
    "log.": """
        cleaner.io.buffer.load.factor cleaner.io.buffer.size cleaner.io.max.bytes.per.second cleaner.threads
        dir.failure.timeout.ms flush.scheduler.interval.ms flush.start.offset.checkpoint.interval.ms
        local.retention.bytes local.retention.ms message.downconversion.enable message.format.version
        message.timestamp.before.max.ms message.timestamp.difference.max.ms preallocate
        roll.jitter.hours roll.jitter.ms
    """,
    "max.": """
        connection.creation.rate connections.per.ip.overrides request.partition.size.limit
    """,
    "metadata.": """
        log.dir log.max.record.bytes.between.snapshots log.max.snapshot.interval.ms log.segment.bytes log.segment.ms
        max.idle.interval.ms max.retention.bytes max.retention.ms
    """,
    "metrics.": """
        num.samples recording.level sample.window.ms
    """,
    "num.": """
        io.threads network.threads recovery.threads.per.data.dir replica.alter.log.dirs.threads replica.fetchers
    """,
    "offsets.": """
        commit.required.acks commit.timeout.ms load.buffer.size topic.compression.codec topic.replication.factor
        topic.segment.bytes
    """,
    "password.": """
        encoder.cipher.algorithm encoder.iterations encoder.key.length encoder.keyfactory.algorithm encoder.old.secret
        encoder.secret
    """,
    "quota.": """
        consumer.default producer.default window.num window.size.seconds
    """,
    "remote.": """
        fetch.max.wait.ms list.offsets.request.timeout.ms log.index.file.cache.total.size.bytes
        log.manager.copier.thread.pool.size log.manager.copy.max.bytes.per.second log.manager.copy.quota.window.num
        log.manager.copy.quota.window.size.seconds log.manager.expiration.thread.pool.size
        log.manager.fetch.max.bytes.per.second log.manager.fetch.quota.window.num
        log.manager.fetch.quota.window.size.seconds log.manager.task.interval.ms log.manager.thread.pool.size
        log.metadata.custom.metadata.max.bytes log.metadata.manager.class.name log.metadata.manager.class.path
        log.metadata.manager.impl.prefix log.metadata.manager.listener.name log.reader.max.pending.tasks
        log.reader.threads log.storage.manager.class.name log.storage.manager.class.path
        log.storage.manager.impl.prefix log.storage.system.enable
    """,
    "replica.": """
        fetch.backoff.ms fetch.max.bytes fetch.min.bytes fetch.response.max.bytes fetch.wait.max.ms
        high.watermark.checkpoint.interval.ms lag.time.max.ms selector.class socket.receive.buffer.bytes
        socket.timeout.ms
    """,
    "sasl.": """
        client.callback.handler.class jaas.config kerberos.kinit.cmd kerberos.min.time.before.relogin
        kerberos.principal.to.local.rules kerberos.service.name kerberos.ticket.renew.jitter
        kerberos.ticket.renew.window.factor login.callback.handler.class login.class login.connect.timeout.ms
        login.read.timeout.ms login.refresh.buffer.seconds login.refresh.min.period.seconds
        login.refresh.window.factor login.refresh.window.jitter login.retry.backoff.max.ms login.retry.backoff.ms
        mechanism.controller.protocol mechanism.inter.broker.protocol oauthbearer.assertion.algorithm
        oauthbearer.assertion.claim.aud oauthbearer.assertion.claim.exp.seconds oauthbearer.assertion.claim.iss
        oauthbearer.assertion.claim.jti.include oauthbearer.assertion.claim.nbf.seconds
        oauthbearer.assertion.claim.sub oauthbearer.assertion.file oauthbearer.assertion.private.key.file
        oauthbearer.assertion.private.key.passphrase oauthbearer.assertion.template.file
        oauthbearer.client.credentials.client.id oauthbearer.client.credentials.client.secret
        oauthbearer.clock.skew.seconds oauthbearer.expected.audience oauthbearer.expected.issuer
        oauthbearer.jwks.endpoint.refresh.ms oauthbearer.jwks.endpoint.retry.backoff.max.ms
        oauthbearer.jwks.endpoint.retry.backoff.ms oauthbearer.jwks.endpoint.url oauthbearer.jwt.retriever.class
        oauthbearer.jwt.validator.class oauthbearer.scope oauthbearer.scope.claim.name oauthbearer.sub.claim.name
        oauthbearer.token.endpoint.url server.callback.handler.class server.max.receive.size
    """,
    "share.": """
        coordinator.append.linger.ms coordinator.load.buffer.size coordinator.snapshot.update.records.per.snapshot
        coordinator.state.topic.compression.codec coordinator.state.topic.min.isr
        coordinator.state.topic.num.partitions coordinator.state.topic.replication.factor
        coordinator.state.topic.segment.bytes coordinator.threads coordinator.write.timeout.ms
        fetch.purgatory.purge.interval.requests
    """,
    "socket.": """
        connection.setup.timeout.max.ms connection.setup.timeout.ms listen.backlog.size receive.buffer.bytes
        send.buffer.bytes
    """,
    "ssl.": """
        allow.dn.changes allow.san.changes cipher.suites enabled.protocols endpoint.identification.algorithm
        engine.factory.class keymanager.algorithm keystore.certificate.chain keystore.key keystore.password
        principal.mapping.rules protocol provider secure.random.implementation trustmanager.algorithm
        truststore.certificates truststore.password
    """,
    "transaction.": """
        partition.verification.enable state.log.load.buffer.size state.log.min.isr state.log.replication.factor
        state.log.segment.bytes two.phase.commit.enable
    """,
    "zookeeper.": """
        connection.timeout.ms max.in.flight.requests metadata.migration.enable set.acl ssl.cipher.suites
        ssl.client.enable ssl.crl.enable ssl.enabled.protocols ssl.endpoint.identification.algorithm
        ssl.keystore.location ssl.keystore.password ssl.keystore.type ssl.ocsp.enable ssl.protocol
        ssl.truststore.location ssl.truststore.password ssl.truststore.type sync.time.ms
    """,
    "": """
        add.partitions.to.txn.retry.backoff.max.ms add.partitions.to.txn.retry.backoff.ms advertised.host.name
        advertised.port auto.include.jmx.reporter auto.leader.rebalance.enable background.threads
        client.quota.callback.class connections.max.reauth.ms control.plane.listener.name
        create.topic.policy.class.name default.replication.factor delete.records.purgatory.purge.interval.requests
        delete.topic.enable early.start.listeners eligible.leader.replicas.enable
        fetch.purgatory.purge.interval.requests initial.broker.registration.timeout.ms inter.broker.listener.name
        inter.broker.protocol.version kafka.metrics.polling.interval.secs kafka.metrics.reporters
        leader.imbalance.check.interval.seconds leader.imbalance.per.broker.percentage metric.reporters
        min.insync.replicas principal.builder.class process.roles producer.id.expiration.ms
        producer.purgatory.purge.interval.requests queued.max.requests replication.quota.window.num
        replication.quota.window.size.seconds request.timeout.ms reserved.broker.max.id security.inter.broker.protocol
        security.providers telemetry.max.bytes unclean.leader.election.enable
    """,
}
WITHOUT_USE = frozenset(prefix + word for prefix, words in _NAMES.items() for word in words.split())
_SECRET = re.compile(r"password|secret|passphrase|jaas|private\.key|master\.key|keystore\.key", re.IGNORECASE)


def advice(name: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Advice for an unknown name: the nearest of the `known` and `others`, ignoring case; else the `known` ones."""
    from difflib import get_close_matches

    known = sorted(known)
    by_lower = {one.lower(): one for one in (*known, *others)}
    nearest = [by_lower[one] for one in get_close_matches(name.lower(), by_lower, n=3, cutoff=0.75)]
    return f"did you mean {' or '.join(nearest)}?" if nearest else f"the known ones are {', '.join(known)}"


def without_secret(text: str) -> str:
    """A text that is not NAME=VALUE, for an error message: cut where the value of a secret may follow."""
    found = _SECRET.search(text)
    return text[: found.end()] + "[hidden]" if found else text


def shown(name: str, value: str) -> str:
    """NAME=VALUE for logs and errors, with secrets hidden."""
    return f"{name}={'[hidden]' if _SECRET.search(name) else value}"
