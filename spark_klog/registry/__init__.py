"""A schema registry with Confluent's REST API, whose state is the compacted topic `_schemas`.

errors.py       refusals with Confluent's codes
records.py      the topic's records: keys and values
state.py        what the records say: subjects, versions, ids, levels of compatibility, modes
log.py          the topic: read to its end, written and read back
registry.py     the operations: register, look up, delete, compare, configure
work.py         what takes long, processes.py runs it in processes of its own
api.py          the REST API
service.py      all of it in a thread, behind a port
formats/        schemas of the three formats: parsed, in canonical form, and compared with each other
differences.py  what a newer schema changes, in words

A registry's client is in `spark_klog.schemas.registry`.
"""
