"""Record batches ↔ Arrow: the one schema, decode, encode."""
