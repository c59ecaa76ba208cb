"""The installed TensorRT-LLM: found, compared with the surface that the adapter uses, imported."""
