"""IncrementalAlterConfigs v0-1 (KIP-339): see `alter_configs`."""

from spark_klog.broker.handlers.alter_configs import handle_incremental as handle

__all__ = ["handle"]
