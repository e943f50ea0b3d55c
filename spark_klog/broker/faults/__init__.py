"""Faults on demand: drop, delay, truncate or corrupt requests and responses, or answer them with an error."""

from spark_klog.broker.faults.script import Corrupt, Delay, Drop, ErrorAnswer, Fault, Truncate

__all__ = ["Corrupt", "Delay", "Drop", "ErrorAnswer", "Fault", "Truncate"]
