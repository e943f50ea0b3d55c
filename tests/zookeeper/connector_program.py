"""Run a ConsumerConnector in a process that tests can kill: python connector_program.py SETTINGS TOPIC STREAMS.

Prints a line for each message: TOPIC PARTITION OFFSET VALUE. Ends at the end of its standard input.
"""

from __future__ import annotations

import json
import sys
import threading

from spark_klog.classic import ConsumerConnector, KafkaStream

_printing = threading.Lock()


def _print(line: str) -> None:
    with _printing:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def _follow(stream: KafkaStream) -> None:
    for message in stream:
        _print(f"{message.topic} {message.partition} {message.offset} {(message.value or b'').decode()}")


def main(settings: str, topic: str, streams: str) -> None:
    with ConsumerConnector(json.loads(settings)) as connector:
        for stream in connector.create_message_streams({topic: int(streams)})[topic]:
            threading.Thread(target=_follow, args=(stream,), daemon=True).start()
        _print(f"joined {connector.consumer_id}")
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
