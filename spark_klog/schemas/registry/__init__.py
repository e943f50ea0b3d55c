"""A client of Confluent's, Apicurio's, Karapace's and Redpanda's registries, and of ours (`spark_klog.registry`)."""
