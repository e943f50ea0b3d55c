from tests.schemas.avro.support import kernel

__all__ = ["kernel"]
