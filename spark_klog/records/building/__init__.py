"""Record batches that are built or changed: offsets assigned, magics converted, records removed."""
