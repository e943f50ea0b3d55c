"""Restore topics from a load, and replay its dead letters.

Each partition is written in transactions of a producer of its own, in the order of offsets. A transaction has some
thousand records, and the offset after them (in the log that was loaded) as the offset of the group
`klog-restore.NAME`: both are there or neither. A restore that was killed goes on after the last of them.
"""

from spark_klog.base.extras import require

require("A restore", "pyarrow")
