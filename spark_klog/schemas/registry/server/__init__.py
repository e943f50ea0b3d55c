"""A schema registry with Confluent's REST API, whose state is the compacted topic `_schemas`.

errors.py    refusals with Confluent's codes
records.py   the topic's records: keys and values
state.py     what the records say: subjects, versions, ids, levels of compatibility, modes
log.py       the topic: read to its end, written and read back
registry.py  the operations: register, look up, delete, compare, configure
api.py       the REST API
"""
