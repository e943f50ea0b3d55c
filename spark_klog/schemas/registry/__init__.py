"""A client of schema registries: Confluent's REST API, as Apicurio, Karapace and Redpanda serve it too."""
