"""The kernels of rows to test with: the native one, and as its reference fastavro and google.protobuf, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spark_klog.schemas.avro import decoder
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.protobuf.decoder import ProtobufDecoder
from spark_klog.schemas.protobuf.encoder import ProtobufEncoder

from .avro.fastavro_rows import FastavroBuilders, compile_with_plan
from .avro.fastavro_writer import FastavroEncoder
from .protobuf.google_rows import GoogleDecoder
from .protobuf.google_writer import GoogleEncoder

KERNELS = ("native", "reference")


def use_kernel(name: str, patch: pytest.MonkeyPatch) -> None:
    """Have the codecs made from now on, and those of Protobuf that are there, use one of `KERNELS`."""
    if name == "reference":
        patch.setattr(decoder, "_builders", FastavroBuilders)
        patch.setattr(decoder, "compile_plan", compile_with_plan)
        patch.setattr(AvroEncoder, "_written", FastavroEncoder._written)
        patch.setattr(ProtobufDecoder, "decode", GoogleDecoder.decode)
        patch.setattr(ProtobufEncoder, "_written", GoogleEncoder._written)


@contextmanager
def of_kernel(name: str) -> Iterator[None]:
    """`use_kernel` in the block."""
    with pytest.MonkeyPatch.context() as patch:
        use_kernel(name, patch)
        yield
