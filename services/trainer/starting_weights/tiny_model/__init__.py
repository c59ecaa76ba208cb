"""The tiny model: tokenizer, chat template, architecture and demonstrations."""
