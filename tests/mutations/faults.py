"""Faults for the check of the tests: four or more in each room, each such as a person may make and a review may miss.

A fault replaces a snippet of one file. `test_faults.py` fails if a snippet is not there exactly once: change the fault
with the code, or put another of its kind in its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """`old`, which is in `file` once, becomes `new`; `where` are the tests nearest to it, in order."""

    name: str
    file: str
    old: str
    new: str
    where: tuple[str, ...]

    @property
    def room(self) -> str:
        """The part of the product that has the fault."""
        room = self.name.partition("-")[0]
        return "mirror/restore" if room in ("mirror", "restore") else room

    def applied(self, source: str) -> str:
        """The source with the fault; `ValueError` unless the snippet is in it exactly once."""
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its snippet is {found} times in {self.file}, not once")
        return source.replace(self.old, self.new)


_CODECS = "spark_klog/wire/codecs.py"
_LOG_TESTS = ("tests/log/test_log_model.py", "tests/log/test_faults.py", "tests/log/test_log.py")
_COMMIT_TESTS = ("tests/load/test_tables.py", "tests/load/test_iceberg.py", "tests/load/test_table_rows.py")
_DELTA_TESTS = ("tests/tables/test_delta.py",)
_ICEBERG_TESTS = (
    "tests/tables/test_iceberg.py",
    "tests/tables/test_iceberg_compaction.py",
    "tests/tables/test_iceberg_sequences.py",
)
_DECISION_LOG_TESTS = ("tests/spark/exactly_once/test_decision_log.py", "tests/spark/exactly_once/test_topic_model.py")
_BATCH_TESTS = (
    "tests/spark/exactly_once/test_batch_steps.py",
    "tests/spark/exactly_once/test_write_updates.py",
    "tests/spark/exactly_once/test_update_kills.py",
)
_SEQUENCE_TESTS = ("tests/tables/test_change_sequences.py",)
_MERGE_TESTS = ("tests/tables/test_changes.py", "tests/tables/test_upserts.py", "tests/load/test_upserts.py")

FAULTS = (
    # ----- wire
    Fault(
        "wire-gzip-without-limit",  # a bomb fills the memory before its size is looked at
        _CODECS,
        "part = member.decompress(piece, min(output.room, _PIECE))",
        "part = member.decompress(piece)",
        ("tests/wire",),
    ),
    Fault(
        "wire-lz4-checksum-unchecked",
        "spark_klog/wire/lz4_frames.py",
        "    if header[-1] not in (right, old):\n"
        '        raise DecodeError(f"lz4 frame at byte {position} has header checksum '
        '{header[-1]:#04x}, computed {right:#04x}")\n',
        "",
        ("tests/wire",),
    ),
    Fault(
        "wire-negative-frame",
        "spark_klog/wire/primitives.py",
        "    if not 0 <= size <= limit:",
        "    if size > limit:",
        ("tests/wire", "tests/client/net/test_frame_stream.py", "tests/broker/handlers/test_bad_input.py"),
    ),
    Fault(
        "wire-bytes-beyond-the-end",
        "spark_klog/wire/primitives.py",
        "if size < 0 or size > self.end - start:",
        "if size < 0:",
        ("tests/wire/test_primitives.py", "tests/protocol/test_codec.py"),
    ),
    # ----- protocol
    Fault(
        "protocol-default-of-leader-epoch",  # 0 is an epoch, -1 is none
        "spark_klog/protocol/tables/records.py",
        'F("current_leader_epoch", INT32, "9+", default=-1),',
        'F("current_leader_epoch", INT32, "9+"),',
        ("tests/protocol", "tests/broker/handlers/test_data_plane.py", "tests/broker/handlers/test_wire_oracle.py"),
    ),
    Fault(
        "protocol-field-a-version-early",
        "spark_klog/protocol/tables/transactions.py",
        'F("committed_leader_epoch", INT32, "2+", default=-1),',
        'F("committed_leader_epoch", INT32, "1+", default=-1),',
        ("tests/protocol",),
    ),
    Fault(
        "protocol-memory-of-tags-forgotten",  # what a tagged field takes does not count for what follows
        "spark_klog/protocol/codec.py",
        "            reader.allowance = field.allowance\n",
        "",
        ("tests/protocol", "tests/broker/handlers/test_hostile_requests.py"),
    ),
    Fault(
        "protocol-all-topics-become-none",
        "spark_klog/protocol/targets.py",
        "        if message.get(field.name) is not None:\n            result[field.name] = kept",
        "        result[field.name] = kept",
        ("tests/protocol/test_targets.py", "tests/broker/faults/test_faults_on_demand.py"),
    ),
    # ----- records
    Fault(
        "records-crc-unchecked",  # of batches that are not read in runs, such as compressed ones
        "spark_klog/records/reading/reader.py",
        "if self._checks or is_message:",
        "if self._checks and is_message:",
        ("tests/records", "tests/columns/test_decode.py"),
    ),
    Fault(
        "records-aborted-one-late",
        "spark_klog/records/reading/reader.py",
        "while self._waiting and self._waiting[0][0] <= header.last_offset:",
        "while self._waiting and self._waiting[0][0] < header.last_offset:",
        ("tests/records", "tests/columns/test_decode.py", "tests/client/consumer/test_consumer_transactions.py"),
    ),
    Fault(
        "records-end-of-range",  # a corrupt batch right behind the range fails its read
        "spark_klog/records/reading/reader.py",
        "if header.base_offset >= end:",
        "if header.base_offset > end:",
        ("tests/columns/test_decode.py", "tests/records", "tests/client/fetch/test_fetch_corrupt.py"),
    ),
    Fault(
        "records-control-bit-dropped",  # a marker becomes a record when its segment is compacted
        "spark_klog/log/compaction/passes.py",
        "_KEPT_BITS = LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT | CONTROL_BIT",
        "_KEPT_BITS = LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT",
        ("tests/log/test_retain.py", "tests/log/test_compaction.py"),
    ),
    # ----- columns
    Fault(
        "columns-nulls-of-a-slice",  # the validity bits of a slice begin where the whole array's do
        "spark_klog/columns/encode.py",
        "    if null_count:\n        array = _from_start(array)\n    validity, offsets, data",
        "    validity, offsets, data",
        ("tests/columns", "tests/client/producer/test_producer_arrow.py"),
    ),
    Fault(
        "columns-null-partition",  # the value under a null is any: most often 0
        "spark_klog/columns/encode.py",
        "result = np.where(is_set, own, _FREE if result is None else result)",
        "result = np.where(is_set | (own >= 0), own, _FREE if result is None else result)",
        ("tests/columns", "tests/client/producer/test_producer_arrow.py"),
    ),
    Fault(
        "columns-partition-of-a-bad-record",
        "spark_klog/columns/decode.py",
        "next(part for part in parts if row < part[-1])",
        "next(part for part in parts if row <= part[-1])",
        ("tests/columns", "tests/spark/read/test_bad_records.py"),
    ),
    Fault(
        "columns-largest-record-refused",
        "spark_klog/columns/rows.py",
        "    too_large = np.flatnonzero(sizes > limit)",
        "    too_large = np.flatnonzero(sizes >= limit)",
        (
            "tests/columns",
            "tests/client/producer/test_producer_record_sizes.py",
            "tests/client/producer/test_producer_arrow.py",
        ),
    ),
    # ----- log
    Fault(
        "log-folder-not-synced",  # a new segment's name may be lost, with all that was acknowledged in it
        "spark_klog/log/flushing.py",
        "            folder.sync()\n            folder.close()",
        "            folder.close()",
        _LOG_TESTS,
    ),
    Fault(
        "log-dedupe-forgets",  # after a restart, all but the last batch of a producer
        "spark_klog/log/producer_state.py",
        "batches = before.batches[1 - _BATCHES :] if before is not None and before.epoch == epoch else []",
        "batches: list[ProducerBatch] = []",
        ("tests/log/test_producer_state.py", "tests/log/test_sequences.py", "tests/log/test_sequences_of_events.py"),
    ),
    Fault(
        "log-swap-not-on-disk",  # a power failure may leave neither the old segments nor the compacted one
        "spark_klog/log/compaction/cleaner.py",
        "        folder = self._in_owner(partial(self._begin_swap, old))\n        self._sync_folder(folder)\n",
        "        folder = self._in_owner(partial(self._begin_swap, old))\n",
        ("tests/log/test_cleaner.py", "tests/log/test_swaps.py"),
    ),
    Fault(
        "log-settings-before-their-file",
        "spark_klog/log/partition_log.py",
        "        write_overrides(self.files, self.directory, overrides)\n"
        "        self._overrides, self.config = dict(overrides), config\n",
        "        self._overrides, self.config = dict(overrides), config\n"
        "        write_overrides(self.files, self.directory, overrides)\n",
        (*_LOG_TESTS, "tests/broker/metadata/test_topic_changes.py"),
    ),
    # ----- broker
    Fault(
        "broker-epoch-stays",  # a late marker ends the next transaction
        "spark_klog/broker/transactions/transaction.py",
        "    return replace(transaction, producer=raised, last=now, version=TRANSACTIONS_2, next_id=next_id)",
        "    return replace(transaction, last=now, version=TRANSACTIONS_2, next_id=next_id)",
        ("tests/broker/transactions/test_transaction_machine.py", "tests/broker/transactions/test_transactions_2.py"),
    ),
    Fault(
        "broker-repeated-end",  # EndTxn whose answer was lost, after the epochs are used up
        "spark_klog/broker/transactions/transaction.py",
        "    has_rotated = not transaction.is_prepared and now.epoch == 0",
        "    has_rotated = False",
        ("tests/broker/transactions/test_transaction_machine.py", "tests/broker/transactions/test_transactions_2.py"),
    ),
    Fault(
        "broker-marker-during-verification",  # the answer is of the transaction before
        "spark_klog/broker/transactions/verification.py",
        "        if self._ended != _ended_transactions(log, self._producer):",
        "        if self._ended > _ended_transactions(log, self._producer):",
        ("tests/broker/transactions/test_verification.py", "tests/broker/transactions/test_transactions_2.py"),
    ),
    Fault(
        "broker-marker-wakes-nobody",  # a fetch of committed records waits to its end
        "spark_klog/broker/transactions/markers.py",
        "    partitions.purgatory.wake(key)\n",
        "",
        ("tests/broker/transactions/test_transactions.py", "tests/broker/handlers/test_data_plane.py"),
    ),
    Fault(
        "broker-offsets-of-hidden-topics",
        "spark_klog/broker/handlers/offsets.py",
        "            if broker.authorizer.allows(request.session, SEE, key[0]):\n                answers.setdefault",
        "            if key[0]:\n                answers.setdefault",
        (
            "tests/broker/security/test_refused_users.py",
            "tests/broker/security/test_security_rules.py",
            "tests/broker/security/test_security.py",
        ),
    ),
    Fault(
        "broker-fenced-producer-ends-another",
        "spark_klog/broker/transactions/transaction.py",
        "        if expected is not None and expected != now:  "
        "# a producer that was fenced must not end its successor's\n"
        "            return _FENCED\n",
        "",
        ("tests/broker/transactions/test_transaction_machine.py", "tests/broker/transactions/test_transactions.py"),
    ),
    Fault(
        "broker-code-of-an-early-commit",  # REBALANCE_IN_PROGRESS, which is fatal to a transactional producer
        "spark_klog/broker/groups/group.py",
        "is_early = self.state is State.COMPLETING and not in_transaction",
        "is_early = self.state is State.COMPLETING",
        ("tests/broker/groups/test_group_machine.py", "tests/broker/groups/test_groups.py"),
    ),
    # ----- client
    Fault(
        "client-request-timeout",  # a broker that is silent and keeps the connection
        "spark_klog/client/producer/sender.py",
        "        if request.deadline > self._clock.now():\n            return False",
        "        if request.deadline > self._clock.now() or not request.connection.closed:\n            return False",
        ("tests/client/net/test_silent_brokers.py", "tests/client/producer/test_producer_scripts.py"),
    ),
    Fault(
        "client-heartbeats-asleep",  # after the first rebalance
        "spark_klog/client/consumer/classic_group.py",
        "self._news = protocols, None, None\n            self._tell_changes()\n",
        "self._news = protocols, None, None\n",
        ("tests/client/consumer/test_consumer_rebalances.py", "tests/client/consumer/test_consumer.py"),
    ),
    Fault(
        "client-sequence-wraps-late",
        "spark_klog/client/producer/numbering.py",
        "self.next_sequence = (sequence + count) & INT32_MAX",
        "self.next_sequence = (sequence + count) % INT32_MAX",
        ("tests/client/producer/test_producer.py", "tests/client/producer/test_producer_scripts.py"),
    ),
    Fault(
        "client-epoch-unchecked",  # a committed offset beyond a truncated log
        "spark_klog/client/consumer/assignment.py",
        "        self.is_unchecked = epoch >= 0\n",
        "        self.is_unchecked = False\n",
        ("tests/client/consumer/test_consumer_truncation.py", "tests/client/consumer/test_consumer_positions.py"),
    ),
    # ----- spark
    Fault(
        "spark-filter-off-by-one",  # Spark does not check the rows of this filter again
        "spark_klog/spark/read/pushdown.py",
        "        return value + 1, INT64_MAX",
        "        return value, INT64_MAX",
        ("tests/spark/read/test_ranges.py", "tests/spark/read/test_starts.py", "tests/spark/read/test_source_batch.py"),
    ),
    Fault(
        "spark-sweep-of-a-later-claim",  # a driver that was overtaken aborts its successor's transactions
        "spark_klog/spark/write/exactly_once.py",
        "    if log.end > number:\n        raise Superseded\n    yield Abort(undecided)",
        "    yield Abort(undecided)",
        ("tests/spark/exactly_once/test_model.py", "tests/spark/exactly_once/test_driver.py"),
    ),
    Fault(
        "spark-number-counts-twice",  # two drivers decide the same micro-batch
        "spark_klog/spark/write/decisions/entries.py",
        "        if number <= self.last:",
        "        if number < self.last:",
        _DECISION_LOG_TESTS,
    ),
    Fault(
        "spark-decision-removed",  # by the tombstones that follow it
        "spark_klog/spark/write/decisions/entries.py",
        "            del self._keys[key]\n            for old in",
        "            for old in",
        _DECISION_LOG_TESTS,
    ),
    Fault(
        "spark-other-drivers-entry",  # another one was first at this number
        "spark_klog/spark/write/decisions/decision_log.py",
        "            return live.last_key == key",
        "            return live.last == number",
        _DECISION_LOG_TESTS,
    ),
    Fault(
        "spark-other-epoch-of-the-transaction",  # the broker has aborted it, and the worker has begun another one
        "spark_klog/spark/write/exactly_once_driver.py",
        "if (now.state, now.producer_id, now.producer_epoch) != (_ONGOING, txn.producer_id, txn.epoch):",
        "if (now.state, now.producer_id) != (_ONGOING, txn.producer_id):",
        ("tests/spark/exactly_once/test_driver.py", "tests/spark/exactly_once/test_batch_steps.py"),
    ),
    Fault(
        "spark-local-checkpoint-by-path",  # machines may have checkpoints of the same path
        "spark_klog/spark/write/decisions/decision_place.py",
        "by_id or stream_key(location)",
        "stream_key(location)",
        ("tests/spark/exactly_once/test_decision_place.py",),
    ),
    Fault(
        "spark-same-store-other-key",  # a checkpoint's decisions are lost by another spelling of its address
        "spark_klog/spark/write/decisions/decision_place.py",
        "    scheme = _SAME_STORE.get(scheme, scheme)\n",
        "",
        ("tests/spark/exactly_once/test_decision_place.py",),
    ),
    Fault(
        "spark-write-twice",
        "spark_klog/spark/write/exactly_once_batch.py",
        "        return self._number <= claimed.begun.decided",
        "        return self._number < claimed.begun.decided",
        _BATCH_TESTS,
    ),
    Fault(
        "spark-earlier-version-written",
        "spark_klog/spark/write/exactly_once_batch.py",
        "        if self._number < decided:\n            raise EarlierWrite(str(self._write), self._number, decided)\n",
        "",
        _BATCH_TESTS,
    ),
    Fault(
        "spark-replayed-batch-refused",  # a micro-batch runs again in this process
        "spark_klog/spark/write/updates.py",
        " or not (known.runs <= runs or runs <= known.runs):",
        ":",
        ("tests/spark/exactly_once/test_micro_batches.py",),
    ),
    Fault(
        "spark-available-now-too-early",  # the last run got no further in one source of two
        "spark_klog/spark/available_now.py",
        "        if reached == before:",
        "        if any(before.get(number) == ends for number, ends in reached.items()):",
        ("tests/spark/read/test_available_now.py",),
    ),
    Fault(
        "spark-available-now-repeat-alone",  # the note of a run that failed counts as what was there at the start
        "spark_klog/spark/available_now.py",
        ' and ends and "latestOffset" not in progress["durationMs"]:',
        " and False:",
        ("tests/spark/read/test_available_now.py",),
    ),
    Fault(
        "spark-available-now-leaderless",  # a run ends without the partitions that have no leader at its start
        "spark_klog/spark/read/stream.py",
        "if self._target is not None or self._may_be_last:",
        "if self._target is not None:",
        ("tests/spark/read/test_available_now.py",),
    ),
    Fault(
        "spark-held-up-forgets",  # an end that stands still is new each second: no warning ever
        "spark_klog/spark/read/open_transactions.py",
        "            since = (now, time.time()) if known is None or known.offset != offset else known[2:]",
        "            since = (now, time.time())",
        ("tests/spark/read/test_open_transactions.py",),
    ),
    Fault(
        "spark-skips-what-is-left",  # if retention has deleted the beginning of a range meanwhile
        "spark_klog/spark/read/tasks.py",
        "lost_end = min(low, end) if start < low else end",
        "lost_end = end",
        (
            "tests/spark/read/test_refused_fetches.py",
            "tests/spark/read/test_loss.py",
            "tests/spark/test_scripted_brokers.py",
        ),
    ),
    # ----- load
    Fault(
        "load-shown-before-its-commit",
        "spark_klog/load/target.py",
        "        write_manifest(self.store, manifest)\n",
        "        self.publish(manifest)\n        write_manifest(self.store, manifest)\n",
        ("tests/load/test_runs.py", "tests/load/test_kills.py", "tests/load/test_sequences.py"),
    ),
    Fault(
        "load-size-unchecked",  # a file that was cut off is committed
        "spark_klog/load/commit.py",
        "if store.size(path) != file.size:",
        "if store.size(path) is None:",
        ("tests/load/test_runs.py", "tests/load/test_kills.py", "tests/load/test_status.py"),
    ),
    Fault(
        "load-files-not-synced",  # the file of offsets may outlive a power failure that the records don't
        "spark_klog/files/folder.py",
        "            for _ in (pool.map if len(waiting) > 1 else map)(self._sync, waiting):\n                pass\n",
        "            pass\n",
        ("tests/load/test_store.py", "tests/load/test_kills.py", "tests/load/test_runs.py"),
    ),
    Fault(
        "load-behind-a-failed-range",  # the offsets between are in no file, and the next run begins after them
        "spark_klog/load/commit.py",
        "kept.append(result if is_next else unread(result, kept[-1].until, result.error))",
        "kept.append(result)",
        ("tests/load/test_runs.py", "tests/load/test_sequences.py", "tests/load/test_outages.py"),
    ),
    Fault(
        "load-two-into-one-output",  # the records of two topics are in one table, and its journal is of both
        "spark_klog/load/by_topic.py",
        "            if len(topics) > 1:\n",
        "            if len(topics) > 2:\n",
        ("tests/load/test_by_topic.py",),
    ),
    Fault(
        "load-up-to-date-for-good",  # a topic with new records is passed over
        "spark_klog/load/by_topic.py",
        "return (look.ids, look.end) == (self.look.ids, self.look.end)",
        "return look.ids == self.look.ids",
        ("tests/load/test_by_topic.py",),
    ),
    # ----- mirror/restore
    Fault(
        "mirror-first-of-a-run",
        "spark_klog/mirror/progress.py",
        "self._runs[index].first <= offset:",
        "self._runs[index].first < offset:",
        ("tests/mirror/test_mirror_offsets.py", "tests/mirror/test_mirror_copies.py"),
    ),
    Fault(
        "mirror-progress-before-the-records",  # killed then, the mirror leaves them out
        "spark_klog/mirror/mirror.py",
        "while noted and (noted[0].receipt is None or noted[0].receipt.done.is_set()):",
        "while noted:",
        (
            "tests/mirror/test_mirror_offsets.py",
            "tests/mirror/test_mirror_sequences.py",
            "tests/mirror/test_mirror_outages.py",
            "tests/mirror/test_mirror_kills.py",
        ),
    ),
    Fault(
        "mirror-groups-go-back",  # consumers that were moved to the target read again what they have read
        "spark_klog/mirror/mirror.py",
        "if key not in there or there[key].offset < new.offset}",
        "if key not in there or there[key].offset != new.offset}",
        ("tests/mirror/test_mirror_offsets.py", "tests/mirror/test_mirror_kafka.py"),
    ),
    Fault(
        "restore-resumes-a-file-late",  # if the last restore has stopped before the last record of a file
        "spark_klog/restore.py",
        "        if group[0].last < start:",
        "        if group[0].last <= start:",
        ("tests/restore",),
    ),
    # ----- tables: what makes a commit of Delta or Iceberg a run of a load
    Fault(
        "tables-commit-before-its-candidate",  # killed in between, the journal knows the offsets of the run alone
        "spark_klog/load/table_commit.py",
        "        self.store.write(paths.candidate(manifest.run, token), to_json(manifest))\n",
        "",
        _COMMIT_TESTS,
    ),
    Fault(
        "tables-without-app-transaction",
        "spark_klog/tables/delta.py",
        "app_transactions=[transaction]",
        "app_transactions=[]",
        _DELTA_TESTS,
    ),
    Fault(
        "tables-offsets-not-in-the-commit",
        "spark_klog/tables/delta.py",
        '    entry = {"version": RUN_VERSION, **vars(run), **figures}\n',
        '    entry = {"version": RUN_VERSION, **vars(run), **figures, "offsets": {}}\n',
        _DELTA_TESTS,
    ),
    Fault(
        "tables-offsets-of-properties-alone",  # a snapshot without them says nothing once the property is unset
        "spark_klog/tables/iceberg.py",
        "        append = transaction.update_snapshot(snapshot_properties=run_texts(run)).merge_append()\n",
        "        append = transaction.update_snapshot().merge_append()\n",
        _ICEBERG_TESTS,
    ),
    Fault(
        "tables-conflict-swallowed",  # another attempt's commit is taken for the own one, whose records are lost
        "spark_klog/tables/table.py",
        "if last is not None and (last.number, last.token) == (run.number, run.token):",
        "if last is not None and last.number == run.number:",
        (*_DELTA_TESTS, *_COMMIT_TESTS),
    ),
    Fault(
        "tables-lost-answer-removes",  # the manifests of a snapshot that is there, as of a failed one
        "spark_klog/tables/iceberg_transaction.py",
        "for path in {snapshot.manifest_list, *ours, *data_files} - named:",
        "for path in {snapshot.manifest_list, *ours, *data_files}:",
        ("tests/tables/test_unclear_commits.py",),
    ),
    Fault(
        "tables-restore-unseen",  # runs that a RESTORE has taken away count as being there
        "spark_klog/tables/delta.py",
        "            last = by.get(int(version), commit) if version.isdecimal() else commit\n",
        "            last = None\n",
        (*_DELTA_TESTS, *_COMMIT_TESTS),
    ),
    Fault(
        "tables-journal-leads",  # a table that was made anew is loaded on from the middle
        "spark_klog/load/table_commit.py",
        "        if at < number:\n",
        "        if 0 < at < number:\n",
        _COMMIT_TESTS,
    ),
    Fault(
        "tables-incarnation-ignored",  # changes of a topic that was made anew are older than all before it
        "spark_klog/tables/delta_merge.py",
        'within = f"{compared(INCARNATION)} OR ({compared(INCARNATION, OFFSET)})"',
        "within = compared(OFFSET)",
        _MERGE_TESTS,
    ),
    Fault(
        "tables-incarnation-forgotten",  # by a journal that was lost
        "spark_klog/load/table_commit.py",
        "again = max(was.incarnation + is_new, run.incarnations.get(topic, 0))",
        "again = was.incarnation + is_new",
        _COMMIT_TESTS,
    ),
    Fault(
        "tables-deleted-key-comes-back",  # an older change of a key that a newer one has moved
        "spark_klog/tables/change_order.py",
        "        self._is_left[of_changes[is_past | ~goes[of_rows]]] = False\n",
        "",
        _MERGE_TESTS,
    ),
    Fault(
        "tables-truncation-forgets-rows",  # that no change of the run is about
        "spark_klog/tables/delta_merge.py",
        "        merger = merger.when_not_matched_by_source_delete(is_gone)\n",
        "        pass\n",
        _SEQUENCE_TESTS,
    ),
    Fault(
        "tables-merge-misses-a-file",  # whose last key is in a change
        "spark_klog/tables/iceberg_partitions.py",
        "if at == len(values) or values[at] > last:",
        "if at == len(values) or values[at] >= last:",
        ("tests/tables/test_merge_reads.py",),
    ),
    Fault(
        "tables-files-of-several-partitions",  # several values have one bucket, and each bucket one folder
        "spark_klog/tables/iceberg_partitions.py",
        "return list(numbers), np.array(of_values, np.int64)[places]",
        "return [list(numbers)[one] for one in of_values], places",
        ("tests/load/test_partitions.py",),
    ),
    Fault(
        "tables-value-of-a-deleted-row",  # is taken for one that an event lacks
        "spark_klog/tables/change_order.py",
        "np.where(is_first | is_after | is_row, at, 0)",
        "np.where(is_first | is_row, at, 0)",
        _SEQUENCE_TESTS,
    ),
    Fault(
        "tables-order-of-texts",  # 9 is before 10
        "spark_klog/tables/change_order.py",
        'length = pc.utf8_lpad(pc.utf8_length(digits).cast(pa.string()), 2, "0")',
        'length = pc.utf8_lpad("", 2, "0")',
        _SEQUENCE_TESTS,
    ),
    Fault(
        "tables-run-without-a-change",  # no row changes, and no commit has the run: the journal leads
        "spark_klog/tables/delta.py",
        "if table.transaction_version(run.load) != run.number:",
        "if changes is None:",
        _MERGE_TESTS,
    ),
    Fault(
        "tables-slot-at-the-edge",  # the changes of a row group's last keys are left out
        "spark_klog/tables/change_files.py",
        "known.min < end and known.max >= first:",
        "known.min < end and known.max > first:",
        _MERGE_TESTS,
    ),
    Fault(
        "tables-orphans-too-eager",  # files that a table had, which readers of its earlier versions need
        "spark_klog/load/target.py",
        "if paths.token_of(path) in tokens and path not in known]",
        "if path not in known]",
        _COMMIT_TESTS,
    ),
    Fault(
        "tables-attempts-go-on",  # files of an attempt that is late are neither in the table nor removed
        "spark_klog/load/target.py",
        "for token in of_run if is_last_time or not is_known else of_run & counted:",
        "for token in of_run:",
        _COMMIT_TESTS,
    ),
    Fault(
        "tables-compaction-revives-rows",  # those that others have deleted while it went on
        "spark_klog/tables/iceberg_compaction.py",
        "live = {entry.data_file.file_path: entry.data_file for entry in _undisturbed(table)}",
        "live = {entry.data_file.file_path: entry.data_file for entry in data_entries(table)}",
        _ICEBERG_TESTS,
    ),
    Fault(
        "tables-vacuumed-files-committed",
        "spark_klog/load/table_commit.py",
        "if not all(self.store.size(entry.path) == entry.size for entry in entries):",
        "if False:",
        _COMMIT_TESTS,
    ),
    Fault(
        "tables-checkpoint-of-another-time",  # the folder was restored, and the sum has runs that are not there
        "spark_klog/load/journal/checkpoint.py",
        '("load", "first", "manifest")] != [identity.load, identity.first, _digest(manifest)]:',
        '("load", "first")] != [identity.load, identity.first]:',
        ("tests/load/test_checkpoints.py", "tests/load/test_status.py"),
    ),
)
