"""The Kafka commit log for PySpark: `spark.read.format("klog")`, a client, and a broker to embed."""

__version__ = "0.1.0"
