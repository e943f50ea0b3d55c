"""Record formats of every magic, conversion between them, and the kernels that decode and encode records."""
