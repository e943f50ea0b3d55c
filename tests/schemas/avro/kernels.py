"""The kernels to test with, as values of SPARK_KLOG_KERNEL: the native one if it was built, and fastavro's rows."""

from __future__ import annotations

from spark_klog.schemas.avro.decoder import avro_kernel

KERNELS = ["reference"] if avro_kernel() is None else ["native", "reference"]
