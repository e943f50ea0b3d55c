"""Kafka record batches ↔ Arrow record batches: schema, decode, encode."""

from spark_klog.base.extras import require

require("Conversion from and to Arrow", "pyarrow")
