"""A release: an sdist, wheels for all platforms and an SBOM; how they are built and checked (`make dist`)."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
