"""Schema registries: Confluent's REST API as a client of it and as a server, and what both know of schemas.

client.py  a client, also of Apicurio, Karapace and Redpanda
formats/   schemas of the three formats: parsed, in canonical form, and compared with each other
server/    a registry that keeps its state in a compacted topic
"""
