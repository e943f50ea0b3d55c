"""The schema registry's public name: see `spark_klog.registry`."""

from spark_klog.registry.service import SchemaRegistry

__all__ = ["SchemaRegistry"]
