"""Planning of reads on the driver: offsets, ranges, their partitions, losses."""
