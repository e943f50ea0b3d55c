"""Record formats: record batch v2, its reference reader and builder, and the kernel contract."""
