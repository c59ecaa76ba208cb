"""Fields of requests: decoding, bounds, and fields that a protocol ignores or refuses."""
