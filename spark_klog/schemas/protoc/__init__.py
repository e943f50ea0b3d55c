"""Files of Protobuf: .proto texts to descriptors and back, without Arrow. Registry and decoders use them."""
