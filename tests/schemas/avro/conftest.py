from .support import kernel

__all__ = ["kernel"]
